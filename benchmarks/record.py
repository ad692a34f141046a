"""The format of a result file: what was measured, where, with which versions and by which command; parses commands."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from sglang_kvq.evaluation import provenance

ROOT = Path(__file__).resolve().parent.parent
#: Source of a result: fields of a file, or of a row that an earlier run left in it.
SOURCE = ("command", "commit", "dirty", "date")
#: Fields of every file.
HEADER = {"name", *SOURCE, "device", "versions", "rows"}


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def command() -> list[str]:
    """Returns the command that was typed: ``python FILE …``, or ``python -m MODULE …`` for a module or package."""
    file = Path(os.path.relpath(sys.argv[0], ROOT))
    spec = sys.modules["__main__"].__spec__
    if file.name == "__main__.py":
        run = ["-m", ".".join(file.parent.parts)]
    elif spec is not None and spec.origin == str(ROOT / file):
        run = ["-m", ".".join(file.with_suffix("").parts)]
    else:
        run = [str(file)]
    return ["python", *run, *sys.argv[1:]]


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Parses the command line as far as ``--``; also returns the words after it, which are flags of servers."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:at]), words[at + 1 :]


def write(path: str | Path, name: str, rows: list[dict], **more) -> None:
    """Writes one result file; a row is a flat dict of plain values."""
    result = {**provenance.header(name, command(), device_name()), **more, "rows": rows}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def read_rows(path: str | Path) -> list[dict]:
    """Returns the rows of a result file; none if the file does not exist."""
    return json.loads(Path(path).read_text())["rows"] if Path(path).exists() else []


def merge(path: str | Path, name: str, rows: list[dict], *, key: str, **more) -> None:
    """Writes rows, and keeps the file's rows whose ``key`` is not among the new ones, and its other fields.

    A row that is kept from another run records that run's commit and command.
    """
    kept = []
    if Path(path).exists():
        old = json.loads(Path(path).read_text())
        source = {field: old[field] for field in SOURCE}
        new = {row[key] for row in rows}
        kept = [{**source, **row} for row in old["rows"] if row[key] not in new]
        more = {field: old[field] for field in old.keys() - HEADER} | more
    write(path, name, [*kept, *rows], **more)
