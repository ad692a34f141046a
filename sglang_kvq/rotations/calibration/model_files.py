"""A model's files on this machine: what is missing, damaged, unreadable, or no weights but codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.eligible import unread
from sglang_kvq.rotations.messages import first_line

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
#: No header of a safetensors file is longer.
_LONGEST_HEADER = 100_000_000
#: Names of dtypes in safetensors of which a weight is a code.
_CODES = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4", "F8_E4M3FNUZ"})


def check_files(folder: Path) -> None:
    """Look at the beginning and the length of every file that loading reads.

    Raises:
        KVQuantError: the first file that is missing, cannot be read, is a Git LFS pointer, or is damaged.
    """
    if not _exists(folder / _CONFIG):
        raise KVQuantError(f"{folder}: no {_CONFIG} in this folder; give the folder of a model, or a hub id ORG/NAME.")
    for path in sorted(folder.glob("*.json")):
        _check_json(path)
    weights = _shards(folder) or sorted(folder.glob("*.safetensors"))
    for path in weights:
        _header(path)
    for path in [] if weights else sorted(folder.glob("*.bin")):
        _beginning(path)
    if not weights and not any(folder.glob("*.bin")):
        raise KVQuantError(f"{folder}: no weights in this folder (*.safetensors); fetch the whole model.")


def check_codes(path: str, folder: Path) -> None:
    """Refuse weights of 8 bits or less in a checkpoint whose config names no quantization.

    Args:
        path: the model's name, for messages.
        folder: where its files are.

    Raises:
        KVQuantError: it names the first such tensor.
    """
    for file in _shards(folder) or sorted(folder.glob("*.safetensors")):
        for name, tensor in _header(file).items():
            if name != "__metadata__" and _is_code(name, tensor):
                raise unread(path, f"{tensor['dtype']} codes ({name} in {file.name}), and no method is named")


def _is_code(name: str, tensor: dict[str, Any]) -> bool:
    """Tells a tensor of codes from others; old checkpoints have masks of bytes, called ``bias``."""
    return tensor["dtype"] in _CODES and len(tensor["shape"]) > 1 and not name.endswith("bias")


def _shards(folder: Path) -> list[Path]:
    """The files that the index names, nothing without an index."""
    index = folder / _INDEX
    if not _exists(index):
        return []
    shards = [folder / name for name in sorted(set(_check_json(index).get("weight_map", {}).values()))]
    for path in shards:
        if not _exists(path):
            raise KVQuantError(f"{path}: {_INDEX} names this file, and it is missing; fetch it.")
    return shards


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file whose length is what the header says."""
    begin, size = _beginning(path), path.stat().st_size
    length = int.from_bytes(begin[:8], "little")
    try:
        if len(begin) < 8 or length > min(size, _LONGEST_HEADER):
            raise ValueError("no safetensors header")
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(8 + length)[8:])
        end = 8 + length + max((x["data_offsets"][1] for n, x in header.items() if n != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KVQuantError(f"{path}: damaged or no safetensors file ({first_line(error)}); fetch it again.") from error
    if size != end:
        raise KVQuantError(
            f"{path}: {size:,} bytes, and its header says {end:,}; the download ended early: fetch it again."
        )
    return header


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # of a folder that this user may not enter
        raise _unreadable(path, error) from error


def _check_json(path: Path) -> dict[str, Any]:
    _beginning(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KVQuantError(f"{path}: not JSON ({first_line(error)}); fetch it again.") from error
    return found if isinstance(found, dict) else {}


def _beginning(path: Path) -> bytes:
    """The first bytes of a file that is one."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
    except OSError as error:
        raise _unreadable(path, error) from error
    if begin == _POINTER:
        raise KVQuantError(
            f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or fetch the model "
            "with `hf download`."
        )
    if not begin:
        raise KVQuantError(f"{path}: an empty file; fetch it again.")
    return begin


def _unreadable(path: Path, error: OSError) -> KVQuantError:
    return KVQuantError(
        f"{path}: cannot be read ({error.strerror or error}); give this user the right to read it, or fetch it again."
    )
