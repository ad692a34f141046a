"""Records the origin of a result: commit, device, versions and command, in one form for all recorded figures."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: The repository's root, if the package runs from a repository.
ROOT = Path(__file__).resolve().parent.parent.parent


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> tuple[str, bool]:
    """Returns the commit and whether the tree differs from it; KVQ_COMMIT replaces both on a host without git."""
    if "KVQ_COMMIT" in os.environ:
        return os.environ["KVQ_COMMIT"], False
    if not (ROOT / ".git").exists():
        return "unknown", False
    return _git("rev-parse", "HEAD") or "unknown", bool(_git("status", "--porcelain", "--untracked-files=no"))


def versions() -> dict[str, str]:
    found = {}
    names = ("torch", "triton", "sglang", "flashinfer-python", "transformers", "sglang-kvq")
    for name in (*names, "sentence-transformers", "scikit-learn"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def device_name(device: str) -> str:
    """Returns the GPU's name for ``cuda``, CPU for ``cpu``, else ``device``; asks the driver, without torch."""
    if device == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
        return names[0].strip() if names else device
    return "CPU" if device == "cpu" else device


def without_paths(text: str) -> str:
    """Reduces absolute paths, which differ between machines, to their last part; keeps URLs."""
    return re.sub(r"(?<![\w.:/~-])~?/(?:[^\s/'\",:;()\[\]]+/)*([^\s/'\",:;()\[\]]+)/?", r"\1", text)


def header(name: str, words: Sequence[str], device: str) -> dict[str, Any]:
    """Returns the fields that every result file begins with; ``words`` is the command."""
    sha, dirty = commit()
    return {
        "name": name,
        "command": shlex.join(without_paths(word) for word in words),
        "commit": sha,
        "dirty": dirty,
        "device": device,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
    }
