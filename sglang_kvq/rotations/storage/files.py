"""Rotation folders: ``rotations.safetensors`` beside ``config.json``, or the published ``.pt`` pair.

``rotations.safetensors`` holds float32 ``k`` and ``v`` ``[layers, heads, D, D]`` (heads is 1 for a rotation shared
by a layer, else the KV heads) and, if known, ``k_eigenvalues`` and ``v_eigenvalues`` ``[layers, heads, D]``. From
version 2 on there is ``q`` like ``k``; in version 3, for transform coding, also ``o`` like ``v``, and ``k_mean``,
``k_energies`` and ``v_energies`` ``[layers, heads, D]``: ``Rotations`` says what they are. ``config.json`` holds
``format_version``, ``geometry`` (layers, kv_heads, head_dim), ``granularity``, the fields of ``RotationMeta``, and
``sha256`` of the tensor file.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import TRANSFORM_TENSORS, RotationMeta, Rotations, check_meta, check_rotations
from sglang_kvq.rotations.messages import first_line
from sglang_kvq.rotations.storage import hub, published
from sglang_kvq.rotations.storage.hub import CONFIG_FILE, TENSOR_FILE, TRANSFORM_VERSION
from sglang_kvq.rotations.storage.registry import known_digests

#: The tensors of each format_version of config.json: keys and queries share a rotation; queries have their own; all
#: that transform coding needs.
TENSORS = {1: ("k", "v"), 2: ("k", "v", "q"), TRANSFORM_VERSION: ("k", "v", "q", *TRANSFORM_TENSORS)}
#: These may be there too.
SPECTRA = ("k_eigenvalues", "v_eigenvalues")

#: Of each file of a folder: where it really is, when it was written, and its size.
_FileStamps = tuple[tuple[Path, int, int], ...]

_NO_ROTATIONS = "Make them with `kvq calibrate MODEL`, or use --kv-quant hadamard, which needs none."


def load_rotations(location: str | Path, *, layers: int, kv_heads: int, head_dim: int) -> Rotations:
    """Load and check rotations for a model of this geometry.

    Args:
        location: a folder in either layout, a file of one, or a hub id ``org/name[/sub/folder]``, which is
            downloaded (or taken from the local hub cache) when no such folder exists.

    Raises:
        KVQuantError: nothing there; hub unreachable; file missing, truncated, altered or refused; other
            geometry; a layer missing; not finite; not orthogonal. The message has the fix.
    """
    return _load_checked(_resolve(str(location)), layers, kv_heads, head_dim)


def load_once(location: str | Path, *, layers: int, kv_heads: int, head_dim: int) -> Rotations:
    """``load_rotations``, but the last ones are kept until their files change: a server's start asks several times.

    The tensors are shared by all callers; do not write to them.
    """
    folder = _resolve(str(location))
    return _load_kept(folder, _stamp(folder), layers, kv_heads, head_dim)


def read_local(folder: Path) -> tuple[Rotations, int | None]:
    """``read_rotations`` of a folder on this machine.

    Raises:
        KVQuantError: also if it is none.
    """
    if not folder.is_dir():
        raise KVQuantError(f"{folder}: no such folder. {_NO_ROTATIONS}")
    return read_rotations(folder)


def read_rotations(location: str | Path) -> tuple[Rotations, int | None]:
    """Load rotations of whatever geometry they have, checked for orthogonality.

    Returns:
        the rotations, and the KV heads of their model if the files tell.
    """
    rotations, config = _load(_resolve(str(location)), None)
    heads = max(rotations.k.shape[1], rotations.v.shape[1])
    known_heads = config.get("geometry", {}).get("kv_heads") or (heads if heads > 1 else None)
    check_rotations(
        rotations, layers=rotations.k.shape[0], kv_heads=known_heads or heads, head_dim=rotations.k.shape[-1]
    )
    check_meta(rotations.meta, layers=rotations.k.shape[0])
    return rotations, known_heads


def save_rotations(rotations: Rotations, folder: str | Path, *, kv_heads: int, overwrite: bool = False) -> None:
    """Write ``folder`` in our layout, whole or not at all.

    Raises:
        KVQuantError: the rotations are not valid, or the folder exists and ``overwrite`` is False.
    """
    layers, _, head_dim, _ = rotations.k.shape
    check_rotations(rotations, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    check_meta(rotations.meta, layers=layers)
    version = TRANSFORM_VERSION if rotations.is_transform else 1 if rotations.q is None else 2
    tensors: dict[str, torch.Tensor] = {}
    for name in (*TENSORS[version], *SPECTRA):
        tensor = getattr(rotations, name)
        if tensor is not None:
            tensor = tensor.float().contiguous()
            shared = any(tensor.data_ptr() == other.data_ptr() for other in tensors.values())
            tensors[name] = tensor.clone() if shared else tensor  # safetensors refuses shared memory
    meta = asdict(rotations.meta)
    del meta["source"], meta["sha256"]  # where they were found is not a property of the file; its hash is a new one
    with new_folder(folder, overwrite=overwrite) as temporary:
        save_file(tensors, temporary / TENSOR_FILE)
        (temporary / TENSOR_FILE).chmod(0o644)  # safetensors makes it private
        config = {
            "format_version": version,
            "geometry": {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim},
            "granularity": rotations.granularity,
            **meta,
            "sha256": _sha256((temporary / TENSOR_FILE).read_bytes()),
        }
        (temporary / CONFIG_FILE).write_text(_dumps(config) + "\n")


def convert_rotations(
    source: str | Path, output: str | Path, *, to: str, kv_heads: int | None = None, overwrite: bool = False
) -> None:
    """Rewrite rotations in the layout ``to``: "safetensors" or "pt". Arguments as ``kvq convert``.

    Raises:
        KVQuantError: as ``load_rotations`` and ``save_rotations``; or KV heads needed and not known.
    """
    rotations, known_heads = read_rotations(source)
    if to == "pt":
        with new_folder(output, overwrite=overwrite) as temporary:
            published.save_published(rotations, temporary)
        return
    heads = kv_heads or known_heads
    if heads is None:
        raise KVQuantError(f"{source}: it does not say how many KV heads the model has; pass --kv-heads.")
    save_rotations(rotations, output, kv_heads=heads, overwrite=overwrite)


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its name when the block succeeds, and vanishes otherwise.

    Raises:
        KVQuantError: the folder exists, and may not or must not be replaced; or it cannot be written.
    """
    folder = Path(folder)
    check_output(folder, overwrite=overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private
        if folder.is_dir():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except (OSError, SafetensorError, RuntimeError) as error:  # the last one is torch's, of a full disk too
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that exists, unless it may be replaced and holds rotations or nothing.

    Raises:
        KVQuantError: it names the folder and the fix.
    """
    try:
        if not folder.exists():
            return
        if not overwrite:
            raise KVQuantError(f"{folder} exists; choose another --output, or pass --overwrite to replace it.")
        held = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise _unwritable(folder, error) from error
    if held and not any(
        path.suffix in (".safetensors", ".pt") and "rotation" in path.name for path in folder.iterdir()
    ):
        raise KVQuantError(
            f"{folder}: --overwrite replaces folders of rotations only, and this one holds {held[0]}; choose another "
            "--output."
        )


def _unwritable(folder: Path, error: Exception) -> KVQuantError:
    reason = getattr(error, "strerror", None) or first_line(error)
    return KVQuantError(f"cannot write {folder}: {reason}; free some space, or choose another --output.")


def _load_checked(folder: Path, layers: int, kv_heads: int, head_dim: int) -> Rotations:
    rotations, config = _load(folder, layers)
    _check_heads(rotations, config, kv_heads)
    check_rotations(rotations, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    check_meta(rotations.meta, layers=layers)
    return rotations


@lru_cache(maxsize=1)  # a large model's take some hundred megabytes
def _load_kept(folder: Path, stamp: _FileStamps, layers: int, kv_heads: int, head_dim: int) -> Rotations:
    return _load_checked(folder, layers, kv_heads, head_dim)


def _stamp(folder: Path) -> _FileStamps:
    """What tells whether a folder's files are still the same."""
    files = [folder / name for layout in hub.LAYOUTS for name in layout if (folder / name).is_file()]
    return tuple((file.resolve(), (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files)


def _load(folder: Path, layers: int | None) -> tuple[Rotations, dict[str, Any]]:
    """Rotations of a local folder in either layout, and its ``config.json`` (empty for the published one)."""
    if (folder / TENSOR_FILE).is_file() or (folder / CONFIG_FILE).is_file():
        return _load_native(folder)
    if (folder / published.K_FILE).is_file() or (folder / published.V_FILE).is_file():
        rotations = published.load_published(folder, layers=layers)
        digest = _sha256((folder / published.K_FILE).read_bytes() + (folder / published.V_FILE).read_bytes())
        return replace(rotations, meta=replace(rotations.meta, sha256=digest)), {}
    raise KVQuantError(
        f"{folder}: no rotations in this folder (neither {TENSOR_FILE} nor {published.K_FILE}). {_NO_ROTATIONS}"
    )


def _load_native(folder: Path) -> tuple[Rotations, dict[str, Any]]:
    for name in (TENSOR_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise KVQuantError(
                f"{folder}: {name} is missing beside its partner; fetch the folder again. {_NO_ROTATIONS}"
            )
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        version, digest = config["format_version"], config["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise KVQuantError(
            f"{folder / CONFIG_FILE}: not the config.json of rotations ({error}); recreate it with `kvq calibrate`."
        ) from error
    if version not in TENSORS:
        raise KVQuantError(
            f"{folder / CONFIG_FILE}: format_version {version}, this sglang-kvq reads {', '.join(map(str, TENSORS))}; "
            "update sglang-kvq."
        )
    data = (folder / TENSOR_FILE).read_bytes()
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise KVQuantError(
            f"{folder / TENSOR_FILE}: truncated or damaged ({error}); fetch it again or recreate it with `kvq "
            "calibrate`."
        ) from error
    missing = [name for name in TENSORS[version] if name not in tensors]
    if missing:
        raise KVQuantError(
            f"{folder / TENSOR_FILE}: there is no tensor {missing[0]}, which format_version {version} has; fetch it "
            "again or recreate it with `kvq calibrate`."
        )
    if _sha256(data) != digest:
        raise KVQuantError(
            f"{folder / TENSOR_FILE}: sha256 {_sha256(data)} differs from {digest} in {CONFIG_FILE}; the two files do "
            "not belong together or one was altered: fetch both again."
        )
    known = {f.name for f in fields(RotationMeta)}
    stored = {name: value for name, value in config.items() if name in known}
    for name in ("clip_k", "clip_v"):
        if isinstance(stored.get(name), list):
            stored[name] = tuple(stored[name])
    meta = RotationMeta(**stored)
    parts = {name: tensors[name] for name in (*TENSORS[version], *SPECTRA) if name in tensors}
    return Rotations(**parts, meta=replace(meta, source=str(folder))), config


def _check_heads(rotations: Rotations, config: dict[str, Any], kv_heads: int) -> None:
    """Shared rotations fit any number of heads in shape; the recorded geometry still tells another model."""
    recorded = config.get("geometry", {}).get("kv_heads")
    if recorded is not None and recorded != kv_heads:
        raise KVQuantError(
            f"{rotations.meta.source}: calibrated on a model with {recorded} KV heads ({rotations.meta.base_model}); "
            f"this model has {kv_heads}. {_NO_ROTATIONS}"
        )


def _resolve(location: str) -> Path:
    """A local folder: ``location`` itself, its folder if it is a file, or a download."""
    path = Path(location).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if not hub.HUB_ID.match(location):
        raise KVQuantError(f"{location}: no such folder. {_NO_ROTATIONS}")
    return hub.download(location, sha256=known_digests(location))


def _dumps(config: dict[str, Any]) -> str:
    """JSON with one line per field; lists of numbers are not spread over a line each."""
    text = json.dumps(config, indent=2)
    return re.sub(r"\[\s+([-\d.e,\s]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
