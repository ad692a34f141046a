"""Reads JSON files, writes files whole or not at all, and makes short names from JSON values."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError


def read(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        KVQuantError: the file is not a JSON object.
    """
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise KVQuantError(f"{path}: not a readable JSON file ({error}). Delete it or repair it.") from error
    if not isinstance(value, dict):
        raise KVQuantError(f"{path}: not a JSON object. Delete it or repair it.")
    return value


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, lambda file: file.write(json.dumps(content, indent=1) + "\n"))


def digest(value: Any) -> str:
    """Returns a short hash of plain JSON values, to use as a name."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def write_whole(path: Path, write: Callable[[Any], None], mode: str = "w") -> None:
    """Creates or replaces a file atomically: whole or not at all, however the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, mode) as file:
            write(file)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
