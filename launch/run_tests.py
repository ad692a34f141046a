"""Runs the suite: unit tests once, then tests of SGLang with the oldest and the newest release in parallel.

./test                    everything
./test --quick            unit tests only
./test -k allocator -x    any pytest arguments, for each of the runs
./test tests/e2e          only these paths, each in the environments it belongs to
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import cpu_env
from launch.progress import StepFailed, call
from sglang_kvq.releases import NEWEST, OLDEST

ROOT = Path(__file__).resolve().parent.parent
UNIT = "unit tests"
#: Checks that must pass before any test runs: commands of the newest release's environment.
LINTERS = (("ruff", "format", "--check", "--quiet"), ("ruff", "check", "--quiet"), ("mypy",))
#: Tests that run in both environments; all others are unit tests and run once.
BOTH = (Path("tests/sglang"), Path("tests/e2e"))
#: Unit tests run in one process per core; the two releases run in parallel. Each process has one thread: threads that
#: wait for those of another process cost far more than a second core gains.
SPREAD = ("--numprocesses=auto", "--dist=worksteal")
ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: Number of slowest tests that each run lists.
SLOWEST = 12
#: pytest's exit code for "no tests collected", which -k may cause in one of the runs.
NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Run:
    """One pytest process."""

    title: str
    version: str
    arguments: tuple[str, ...]


def is_sglang(path: str) -> bool:
    """Returns whether a path from the command line lies in the folders that run in both environments."""
    relative = Path(os.path.relpath(path.split("::")[0], ROOT))
    return any(folder == relative or folder in relative.parents for folder in BOTH)


def plan(quick: bool, words: list[str]) -> list[Run]:
    """Returns the runs for a command line. Words that name existing files or folders are paths; others go to pytest."""
    paths = [word for word in words if not word.startswith("-") and Path(word.split("::")[0]).exists()]
    options = tuple(word for word in words if word not in paths)
    wide = [path for path in paths if path.rstrip("/") == "tests"]
    unit = [path for path in paths if not is_sglang(path)] if paths else ["tests"]
    both = [path for path in paths if is_sglang(path)]
    if wide or not paths:
        both = [str(folder) for folder in BOTH if (ROOT / folder).is_dir()]
    ignored = tuple(f"--ignore={folder}" for folder in BOTH)
    runs = [Run(UNIT, NEWEST, (*unit, *ignored, *SPREAD, *options))] if unit else []
    if not quick and both:
        runs += [Run(f"SGLang {version}", version, (*both, *options)) for version in (NEWEST, OLDEST)]
    return runs


def counts(report: Path) -> Counter[str]:
    """Counts tests by outcome, from a JUnit file."""
    found: Counter[str] = Counter()
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            found.update(failed=bad, skipped=skipped, passed=int(suite.get("tests", 0)) - bad - skipped)
    return found


def lint() -> list[str]:
    """Runs the linters and returns the commands that found something; shows their output."""
    bin = ROOT / ".venvs" / f"sglang-{NEWEST}" / "bin"
    print("\n=== ruff and mypy ===", flush=True)
    return [" ".join(words) for words in LINTERS if subprocess.run([bin / words[0], *words[1:]], cwd=ROOT).returncode]


def execute(runs: list[Run], model: Path) -> list[tuple[int, Counter[str]]]:
    """Executes runs in parallel; returns pytest's exit codes and counts. Only the first one's output is live."""
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{n}.log" for n in range(len(runs))]
        reports = [Path(folder) / f"{n}.xml" for n in range(len(runs))]
        try:
            for run, log, report in zip(runs, logs, reports):
                python = ROOT / ".venvs" / f"sglang-{run.version}" / "bin" / "python"
                command = [
                    str(python),
                    "-m",
                    "pytest",
                    *run.arguments,
                    f"--junitxml={report}",
                    "-p",
                    "no:cacheprovider",
                ]
                command += ["--model", str(model), f"--durations={SLOWEST}"]
                output = log.open("wb") if running else None
                running.append(
                    subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ONE_CORE}, stdout=output, stderr=output)
                )
            for run, process, log in zip(runs, running, logs):
                shown = process is running[0]
                print(f"\n=== {run.title} ===", flush=True)
                process.wait()
                if not shown:
                    print(log.read_text(errors="replace"), flush=True)
        finally:
            for process in running:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        return [(process.returncode, counts(report)) for process, report in zip(running, reports)]


def prepare(runs: list[Run]) -> Path:
    """Prepares the environments for these runs, and the model that servers and the test of rotations load."""
    for version in dict.fromkeys(run.version for run in runs):
        print(f"environment with SGLang {version}", flush=True)
        cpu_env.ensure(ROOT / ".venvs" / f"sglang-{version}", version)
    # Converting the model needs packages that only the environment has.
    target = ROOT / ".models" / "SmolLM2-135M-Instruct"
    if not (target / "config.json").exists():
        print("the small model that tests load", flush=True)
        call(
            [ROOT / ".venvs" / f"sglang-{runs[0].version}" / "bin" / "python", ROOT / "launch" / "model.py"],
            ROOT / ".models" / "fetch.log",
        )
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="linters and unit tests only, in the newest release's environment"
    )
    options, words = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begin = time.monotonic()
    runs = plan(options.quick, words)
    try:
        model = prepare(runs)
    except StepFailed as error:
        print(f"could not prepare the tests: {error}", flush=True)
        return 1
    total: Counter[str] = Counter()
    broken = [] if words else lint()
    for together in ([runs[0]], runs[1:]) if runs[0].title == UNIT else (runs,):
        for run, (code, found) in zip(together, execute(together, model)):
            total.update(found)
            if code not in (0, NOTHING_COLLECTED):
                broken.append(f"{run.title} (pytest exited with {code})")
    if not total["passed"] + total["failed"]:
        broken.append("no test ran")
    print(f"\n{time.monotonic() - begin:.0f} s; " + (f"FAILED: {', '.join(broken)}" if broken else "all good"))
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
