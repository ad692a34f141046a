"""Finds a model's files in a folder, on the hub or in its cache; refuses missing, damaged and unreadable files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_kvq.errors import KVQuantError, first_line, shorten
from sglang_kvq.rotations.calibration.eligible import unread

#: Seconds to wait for the hub. transformers alone would ask it for one file after another, with retries, for a minute.
TIMEOUT = 4.0
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
#: JSON files beside these two that loading reads; others may hold anything.
_READ = (
    *("added_tokens.json", "generation_config.json", "hf_quant_config.json", "pytorch_model.bin.index.json"),
    *("special_tokens_map.json", "tekken.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"),
)
_POINTER = b"version https://git-lfs"
#: Dtypes in safetensors files whose elements are codes, not weights.
_CODES = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4", "F8_E4M3FNUZ"})


def find_model(path: str, revision: str | None = None) -> dict[str, Any]:
    """Looks for a model before anything is loaded.

    Returns:
        keywords for every ``from_pretrained``: the revision, and ``local_files_only`` if the hub does not answer.
    """
    if path and Path(path).exists():
        if not Path(path).is_dir():
            raise KVQuantError(f"{path}: a file, not the folder of a model. Give its folder.")
        return {"revision": revision}
    if not _HUB_ID.fullmatch(path):
        raise KVQuantError(f"{path}: no such folder, and not a hub id ORG/NAME. Check the path.")
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    problem = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            HfApi().model_info(path, revision=revision, timeout=TIMEOUT)
            return {"revision": revision}
        except RevisionNotFoundError:
            raise KVQuantError(
                f"--revision {revision}: {path} has no such revision on the hub. Leave it out."
            ) from None
        except GatedRepoError as error:
            raise KVQuantError(
                f"{path}: gated on the hub ({first_line(error)}). Ask for access, and `hf auth login`."
            ) from None
        except RepositoryNotFoundError:
            problem = "the hub has no model of this name that you may see"
        except HfHubHTTPError as error:
            problem = f"the hub answers {first_line(error)}"
        except Exception as error:  # its type depends on the HTTP library that huggingface_hub uses
            problem = f"the hub does not answer ({type(error).__name__}: {first_line(error)})"
    if cached_folder(path, revision) is None:
        raise KVQuantError(
            f"{path}: no such folder, not in the hub's cache, and {problem}. Check the name. Without a network: "
            "download the model where there is one, and give its folder."
        )
    return {"revision": revision, "local_files_only": True}


def cached_folder(path: str, revision: str | None = None) -> Path | None:
    """Returns the folder with a model's files on this machine: ``path``, or one in the hub's cache; None if absent."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, _CONFIG, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


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
