"""Puts faults into a copy of the package, one at a time, and runs the tests that must find each.

    python -m tests.mutations [--only N ...]

``faults.yaml`` has the faults. Exit status 0 means that tests found every one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.newcomer import clone_to

#: pytest's exit code for failed tests; any other code is no verdict.
FAILED = 1


@dataclass(frozen=True)
class Fault:
    """A change of one file that breaks the property named in ``what``; ``old`` occurs once in that file."""

    what: str
    file: str
    tests: str
    old: str
    new: str

    def put_into(self, tree: Path) -> tuple[Path, str]:
        """Changes the file and returns its path and its former text."""
        places = {path: path.read_text() for path in (tree / "sglang_kvq").glob(self.file)}
        times = {path: text.count(self.old) for path, text in places.items()}
        if sum(times.values()) != 1:
            raise ValueError(
                f"{self.file}: {self.old!r} occurs {sum(times.values())} times instead of once. Correct faults.yaml."
            )
        path = max(times, key=times.__getitem__)
        path.write_text(places[path].replace(self.old, self.new))
        return path, places[path]


def load() -> list[Fault]:
    """Reads all faults."""
    return [Fault(**fields) for fields in yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())]


def found(fault: Fault, tree: Path) -> str:
    """Returns "" if the tests find the fault, otherwise the end of their output."""
    path, before = fault.put_into(tree)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(fault.tests)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(before)
    return "" if done.returncode == FAILED else f"pytest exited with {done.returncode}\n{done.stdout[-1500:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of faults, from 1")
    only, faults, missed = parser.parse_args().only, load(), 0
    with tempfile.TemporaryDirectory() as folder:
        clone_to(Path(folder))
        for number, fault in enumerate(faults, 1):
            if only and number not in only:
                continue
            begin = time.monotonic()
            trouble = found(fault, Path(folder))
            missed += bool(trouble)
            verdict = "MISSED" if trouble else "found"
            print(
                f"{number:2} {verdict} {time.monotonic() - begin:4.0f} s  {fault.what}\n{trouble}", end="", flush=True
            )
    print(f"{missed} missed")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
