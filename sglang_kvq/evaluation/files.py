"""Reads JSON files, writes files whole or not at all, and makes short names from JSON values."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError, first_line

#: Bytes at the end of a file that tell two files of weights apart.
_END = 64 << 10


def read(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        KVQuantError: the file is not a JSON object.
    """
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise KVQuantError(f"{path}: {first_line(error)}. Check the path and its permissions.") from error
    except ValueError as error:
        raise KVQuantError(f"{path}: not a readable JSON file ({error}). Delete it or repair it.") from error
    if not isinstance(value, dict):
        raise KVQuantError(f"{path}: not a JSON object. Delete it or repair it.")
    return value


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, lambda file: file.write(json.dumps(content, indent=1) + "\n"))


def digest(value: Any) -> str:
    """Returns a short hash of plain JSON values, to use as a name."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def model_identity(model: str) -> str:
    """Returns a text that differs for different models: a hub name, or a folder's name and a hash of its content.

    The hash covers the config, and the size and the last bytes of each file of weights: fine-tuned models may differ in
    nothing else.
    """
    folder = Path(model)
    if not folder.is_dir():
        return model
    config = folder / "config.json"
    weights = [(path.name, path.stat().st_size, _end(path)) for path in sorted(folder.glob("*.safetensors"))]
    return f"{folder.resolve().name} {digest([config.read_text() if config.exists() else '', weights])}"


def _end(path: Path) -> str:
    """Returns a hash of a file's last ``_END`` bytes."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _END, 0))
        return hashlib.sha256(file.read()).hexdigest()


def write_whole(path: Path, write: Callable[[Any], None], mode: str = "w") -> None:
    """Creates or replaces a file atomically: whole or not at all, however the process ends.

    Raises:
        KVQuantError: the system does not let it be written; names the file.
    """
    try:
        _write_whole(path, write, mode)
    except OSError as error:
        raise KVQuantError(
            f"{path}: cannot be written: {error.strerror or error}. Free some space, or choose another folder."
        ) from error


def _write_whole(path: Path, write: Callable[[Any], None], mode: str) -> None:
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
