"""The form of a result: what was measured, where, with what, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> tuple[str, bool]:
    """Commit and whether the tree differs from it. A host without git gets both from KVQ_COMMIT."""
    if "KVQ_COMMIT" in os.environ:
        return os.environ["KVQ_COMMIT"], False
    return _git("rev-parse", "HEAD") or "unknown", bool(_git("status", "--porcelain", "--untracked-files=no"))


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "sglang", "flashinfer-python", "sglang-kvq"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _shown(argument: str) -> str:
    """An argument as others can use it: absolute paths are those of one machine, so only their name stays."""
    return Path(argument).name if os.path.isabs(argument) else argument


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def write(path: str | Path, name: str, rows: list[dict], **more) -> None:
    """Write one result file; a row is a flat dict of plain values."""
    sha, dirty = commit()
    result = {
        "name": name,
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *map(_shown, sys.argv[1:])]),
        "commit": sha,
        "dirty": dirty,
        "device": device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        **more,
        "rows": rows,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def read_rows(path: str | Path) -> list[dict]:
    """Rows of a result file; none if it does not exist."""
    return json.loads(Path(path).read_text())["rows"] if Path(path).exists() else []


def merge(path: str | Path, name: str, rows: list[dict], *, key: str, **more) -> None:
    """``write``, keeping the file's rows whose ``key`` is not among the new ones.

    A row kept from a run at another commit or by another command says so itself.
    """
    kept = []
    if Path(path).exists():
        old = json.loads(Path(path).read_text())
        source = {field: old[field] for field in ("command", "commit", "dirty", "date")}
        new = {row[key] for row in rows}
        kept = [{**source, **row} for row in old["rows"] if row[key] not in new]
    write(path, name, [*kept, *rows], **more)
