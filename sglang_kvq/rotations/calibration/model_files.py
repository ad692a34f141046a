"""Checks a model's files in a folder; refuses missing, damaged and unreadable ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_kvq.errors import KVQuantError, first_line, shorten
from sglang_kvq.rotations.calibration.eligible import unread

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
#: JSON files beside these two that loading reads; others may hold anything.
_READ = (
    *("added_tokens.json", "generation_config.json", "hf_quant_config.json", "pytorch_model.bin.index.json"),
    *("special_tokens_map.json", "tekken.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
)
_POINTER = b"version https://git-lfs"
#: Dtypes in safetensors files whose elements are codes, not weights.
_CODES = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4", "F8_E4M3FNUZ"})


def check_files(folder: Path) -> None:
    """Checks the beginning and the length of every file that loading reads.

    Raises:
        KVQuantError: the first file that is missing, cannot be read, is a Git LFS pointer, or is damaged.
    """
    if not _exists(folder / _CONFIG):
        raise KVQuantError(f"{folder}: no {_CONFIG} in this folder. Give the folder of a model, or a hub id ORG/NAME.")
    check_config(folder)
    for name in _READ:
        if _exists(folder / name):
            _read_json(folder / name)
    weights = weight_files(folder)
    for path in weights:
        _tensors(path)
    for path in [] if weights else sorted(folder.glob("*.bin")):
        _beginning(path)
    if not weights and not any(folder.glob("*.bin")):
        raise KVQuantError(f"{folder}: no weights in this folder (*.safetensors). Fetch the whole model.")


def check_config(folder: Path) -> None:
    """Refuses a folder's ``config.json`` that cannot be read or is no JSON object; a missing one passes."""
    path = folder / _CONFIG
    if _exists(path) and not isinstance(found := _read_json(path), dict):
        raise KVQuantError(f"{path}: {shorten(found)}, not a JSON object of a model's settings. Fetch it again.")


def check_codes(path: str, folder: Path) -> None:
    """Refuses weights of 8 bits or less in a checkpoint whose config names no quantization."""
    for file in weight_files(folder):
        for name, (dtype, shape) in _tensors(file).items():
            # Old checkpoints have masks of bytes, called ``bias``.
            if dtype in _CODES and len(shape) > 1 and not name.endswith("bias"):
                raise unread(path, f"{dtype} codes ({name} in {file.name}), and no method is named")


def weight_files(folder: Path) -> list[Path]:
    """Returns a folder's safetensors files: those of the index, or all. Some models ship their weights twice."""
    return _shards(folder) or sorted(folder.glob("*.safetensors"))


def _shards(folder: Path) -> list[Path]:
    """Returns the files that the index names; empty without an index."""
    index = folder / _INDEX
    if not _exists(index):
        return []
    found = _read_json(index)
    names = found.get("weight_map", {}) if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise KVQuantError(f"{index}: its weight_map does not name a file for each weight. Fetch it again.")
    shards = [folder / name for name in sorted(set(names.values()))]
    for path in shards:
        if not _exists(path):
            raise KVQuantError(f"{path}: {_INDEX} names this file, and it is missing. Fetch it.")
    return shards


def _tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Returns each tensor's dtype and shape, from a safetensors header that must agree with the file's length."""
    _beginning(path)
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()}
    except (SafetensorError, OSError) as error:
        raise KVQuantError(
            f"{path}: the download ended early, or no safetensors file ({first_line(error)}). Fetch it again."
        ) from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # in a folder that this user may not enter
        raise _unreadable(path, error) from error


def _read_json(path: Path) -> Any:
    _beginning(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KVQuantError(f"{path}: not JSON ({first_line(error)}). Fetch it again.") from error


def _beginning(path: Path) -> bytes:
    """Returns the first bytes of a file; refuses an empty file and a Git LFS pointer."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
    except OSError as error:
        raise _unreadable(path, error) from error
    if begin == _POINTER:
        raise KVQuantError(
            f"{path}: a Git LFS pointer, not the file itself. Run `git lfs pull` in its folder, or fetch the model "
            "with `hf download`."
        )
    if not begin:
        raise KVQuantError(f"{path}: an empty file. Fetch it again.")
    return begin


def _unreadable(path: Path, error: OSError) -> KVQuantError:
    return KVQuantError(
        f"{path}: cannot be read ({error.strerror or error}). Give this user the right to read it, or fetch it again."
    )
