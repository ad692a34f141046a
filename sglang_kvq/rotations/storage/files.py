"""Reads and writes rotation folders: ``rotations.safetensors`` and ``config.json``, or a published pair of files.

The tensors are those of ``Rotations`` that ``TENSORS`` and ``SPECTRA`` name, in float32. ``config.json`` has the fields
of ``schema.RotationConfig``, including the tensor file's ``sha256``. ``storage.published`` handles the other layout.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from sglang_kvq.errors import KVQuantError, first_line
from sglang_kvq.rotations.base import TRANSFORM_TENSORS, Rotations, check_rotations
from sglang_kvq.rotations.identity import LayerNumbers
from sglang_kvq.rotations.storage import hub, published
from sglang_kvq.rotations.storage.hub import TENSOR_FILE
from sglang_kvq.rotations.storage.registry import HubLocation
from sglang_kvq.rotations.storage.schema import (
    CONFIG_FILE,
    TRANSFORM_VERSION,
    RotationConfig,
    dumps,
    is_of_a_model,
    parse_config,
    plain_tensor,
)

#: The tensors by ``format_version`` of config.json: keys and queries share a rotation; queries have their own; all
#: tensors for transform coding.
TENSORS = {1: ("k", "v"), 2: ("k", "v", "q"), TRANSFORM_VERSION: ("k", "v", "q", *TRANSFORM_TENSORS)}
#: Optional tensors of every version.
SPECTRA = ("k_eigenvalues", "v_eigenvalues")

#: Stamp of each file of a folder: real path, time of writing, size.
_FileStamps = tuple[tuple[Path, int, int], ...]

_NO_ROTATIONS = "Make rotations with `kvq calibrate MODEL`, or use --kv-quant int4, which needs none."
#: Files that a folder may hold beside rotations and still be replaced.
_BESIDE = (CONFIG_FILE, "README.md", ".gitattributes")


def load_rotations(
    location: str | Path, *, layers: int, kv_heads: int, head_dim: int, numbers: LayerNumbers | None = None
) -> Rotations:
    """Loads and checks rotations for a model of this geometry.

    Args:
        location: a folder in either layout, a file of one, or a place on the hub, ``org/name[/folder][@revision]``.
        numbers: the model's numbers of its layers, by which published files may name them.

    Raises:
        KVQuantError: nothing is there; the hub is unreachable; a file is missing, truncated, altered or refused; the
            geometry differs; a layer is missing; values are not finite or not orthogonal. The message has the fix.
    """
    return _load_checked(_resolve(str(location)), layers, kv_heads, head_dim, numbers)


def load_once(
    location: str | Path, *, layers: int, kv_heads: int, head_dim: int, numbers: LayerNumbers | None = None
) -> Rotations:
    """Works like ``load_rotations``, but keeps the last rotations until their files change.

    A starting server asks for them several times. The hub is asked once in a process. The tensors are shared by all
    callers; do not write to them.
    """
    place = _resolve(str(location), _download_once)
    return _load_kept(place, layers, kv_heads, head_dim, numbers, _stamp(place))


def read_local(folder: Path) -> tuple[Rotations, int | None]:
    """Calls ``read_rotations`` for a folder on this machine; refuses a path that is no folder."""
    if not folder.is_dir():
        raise KVQuantError(f"{folder}: no such folder. {_NO_ROTATIONS}")
    return read_rotations(folder)


def read_rotations(location: str | Path) -> tuple[Rotations, int | None]:
    """Loads and checks rotations of any geometry; also returns their model's number of KV heads, None if unknown."""
    rotations, kv_heads = _load(_resolve(str(location)))
    heads = max(rotations.k.shape[1], rotations.v.shape[1])
    known_heads = kv_heads or (heads if heads > 1 else None)
    check_rotations(
        rotations, layers=rotations.k.shape[0], kv_heads=known_heads or heads, head_dim=rotations.k.shape[-1]
    )
    return rotations, known_heads


def save_rotations(
    rotations: Rotations,
    folder: str | Path,
    *,
    kv_heads: int,
    overwrite: bool = False,
    more: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Writes ``folder`` in our layout, whole or not at all. ``more``: further fields of its ``config.json``.

    Raises:
        KVQuantError: the rotations are not valid, or the folder exists and ``overwrite`` is False.
    """
    layers, _, head_dim, _ = rotations.k.shape
    check_rotations(rotations, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    version = TRANSFORM_VERSION if rotations.is_transform else 1 if rotations.q is None else 2
    tensors: dict[str, torch.Tensor] = {}
    for name in (*TENSORS[version], *SPECTRA):
        tensor = getattr(rotations, name)
        if tensor is not None:
            tensor = tensor.float().contiguous()
            shared = any(tensor.data_ptr() == other.data_ptr() for other in tensors.values())
            tensors[name] = tensor.clone() if shared else tensor  # safetensors refuses shared memory
    meta = asdict(rotations.meta)
    for name in ("source", "sha256", "files"):  # these describe the files that were read, not the new one
        del meta[name]
    with new_folder(folder, overwrite=overwrite) as temporary:
        save_file(tensors, temporary / TENSOR_FILE)
        (temporary / TENSOR_FILE).chmod(0o644)  # safetensors makes it private
        config = {
            "format_version": version,
            "geometry": {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim},
            "granularity": rotations.granularity,
            **meta,
            "sha256": _sha256((temporary / TENSOR_FILE).read_bytes()),
            **more,
        }
        (temporary / CONFIG_FILE).write_text(dumps(config) + "\n")


def convert_rotations(
    source: str | Path, output: str | Path, *, to: str, kv_heads: int | None = None, overwrite: bool = False
) -> None:
    """Rewrites rotations in the layout ``to``: "safetensors" or "pt". The arguments are those of ``kvq convert``.

    Raises:
        KVQuantError: as ``load_rotations`` and ``save_rotations``; or the number of KV heads is needed and not known,
            or is not the source's.
    """
    place = _resolve(str(source))
    rotations, known_heads = read_rotations(place)
    if kv_heads is not None and known_heads not in (None, kv_heads):
        raise KVQuantError(
            f"--kv-heads {kv_heads}: {source} is for a model with {known_heads} KV heads. Leave --kv-heads out."
        )
    if to == "pt":
        with new_folder(output, overwrite=overwrite) as temporary:
            published.save_published(rotations, temporary)
        return
    heads = kv_heads or known_heads
    if heads is None:
        raise KVQuantError(f"{source}: it does not say how many KV heads the model has. Pass --kv-heads.")
    more: Mapping[str, object] = {}
    if (place / TENSOR_FILE).is_file():  # our layout, so its config.json may hold measurements of these rotations
        more = parse_config(place / CONFIG_FILE, _read(place / CONFIG_FILE)).model_extra or {}
    save_rotations(rotations, output, kv_heads=heads, overwrite=overwrite, more=more)


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary folder next to ``folder``; renames it to ``folder`` if the block succeeds, else deletes it.

    A folder that is replaced exists until the new one has its name.

    Raises:
        KVQuantError: ``folder`` exists, and may not or must not be replaced; or it cannot be written.
    """
    check_output(Path(folder), overwrite=overwrite)
    folder = Path(folder).resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private
        _replace(folder, temporary)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch raises RuntimeError, for a full disk too
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(folder: Path, new: Path) -> None:
    """Gives ``new`` the name ``folder``, and then deletes the folder that had this name."""
    old = new.with_name(f"{new.name}.old")
    if folder.is_dir():
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _is_rotation_file(path: Path) -> bool:
    rotation = path.suffix in (".safetensors", ".pt") and "rotation" in path.name
    return path.is_file() and (rotation or path.name in _BESIDE)


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Refuses an output folder that exists, unless it may be replaced and holds rotations or nothing."""
    try:
        if not folder.exists():
            return
        if not overwrite:
            raise KVQuantError(f"{folder} exists. Choose another --output, or pass --overwrite to replace it.")
        others = sorted(path.name for path in folder.iterdir() if not _is_rotation_file(path))
    except OSError as error:
        raise _unwritable(folder, error) from error
    if others:
        raise KVQuantError(
            f"{folder}: --overwrite replaces folders of rotations only, and this one holds {others[0]}. Choose another "
            "--output."
        )


def _unwritable(folder: Path, error: Exception) -> KVQuantError:
    return KVQuantError(f"cannot write {folder}: {first_line(error)}. Free some space, or choose another --output.")


def _load_checked(
    place: Path, layers: int, kv_heads: int, head_dim: int, numbers: LayerNumbers | None, stamp: _FileStamps = ()
) -> Rotations:
    rotations, known_heads = _load(place, layers, numbers)
    # Shared rotations have a shape that fits any number of heads; the recorded geometry still reveals another model.
    if known_heads is not None and known_heads != kv_heads:
        raise KVQuantError(
            f"{rotations.meta.source}: calibrated on a model with {known_heads} KV heads "
            f"({rotations.meta.base_model}); this model has {kv_heads}. {_NO_ROTATIONS}"
        )
    check_rotations(rotations, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    return rotations


#: ``_load_checked`` that keeps only the last rotations, because those of a large model take some hundred megabytes.
#: Arguments with other file stamps load them again.
_load_kept = lru_cache(maxsize=1)(_load_checked)


def _stamp(place: Path) -> _FileStamps:
    """Returns a stamp that changes if a folder's files change."""
    folder = place if place.is_dir() else place.parent
    files = [folder / name for name in sorted(_names(folder)) if _is_ours(name)]
    return tuple((file.resolve(), (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files)


def _is_ours(name: str) -> bool:
    return name in (TENSOR_FILE, CONFIG_FILE) or published.is_rotation_file(name)


def _names(folder: Path) -> set[str]:
    """Returns the names of a folder's files."""
    try:
        return {path.name for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        raise KVQuantError(f"{folder}: cannot be read ({error.strerror}). Check its permissions.") from error


def _load(place: Path, layers: int | None = None, numbers: LayerNumbers | None = None) -> tuple[Rotations, int | None]:
    """Loads a local folder in either layout, or the pair that a file belongs to; also returns the recorded KV heads."""
    folder, chosen = (place, None) if place.is_dir() else (place.parent, place.name)
    names = _names(folder)
    if chosen is None and TENSOR_FILE in names:
        return _load_native(folder, names)
    if chosen is not None and not published.is_rotation_file(chosen):
        raise KVQuantError(
            f"{place}: its name is not one of rotations ({TENSOR_FILE}, k_rotation*.pt, v_rotation*.pt). Pass the "
            "folder that holds them."
        )
    pair = published.choose_pair(names, str(folder), chosen)
    if pair is None and published.holds_latents(folder.name, names):
        raise published.latents_error(str(folder))
    if pair is None and CONFIG_FILE in names:
        return _load_native(folder, names)
    if pair is None:
        raise KVQuantError(
            f"{folder}: no rotations in this folder (neither {TENSOR_FILE} nor {published.K_FILE} nor another "
            f"k_rotation*.pt). {_NO_ROTATIONS}"
        )
    data = {name: _read(folder / name) for name in (*pair, CONFIG_FILE) if name in names}
    rotations = published.load_published(folder, pair, data, layers=layers, numbers=numbers)
    meta = replace(rotations.meta, sha256=_sha256(data[pair.k] + data[pair.v]), files=_digests(data))
    return replace(rotations, meta=meta), None


def _load_native(folder: Path, names: set[str]) -> tuple[Rotations, int]:
    for name in (TENSOR_FILE, CONFIG_FILE):
        if name not in names:
            if name == TENSOR_FILE and is_of_a_model(_read(folder / CONFIG_FILE)):
                raise KVQuantError(f"{folder}: the folder of a model, not of rotations. {_NO_ROTATIONS}")
            raise KVQuantError(
                f"{folder}: {name} is missing beside its partner. Fetch the folder again. {_NO_ROTATIONS}"
            )
    data = {name: _read(folder / name) for name in (TENSOR_FILE, CONFIG_FILE)}
    config, path = parse_config(folder / CONFIG_FILE, data[CONFIG_FILE]), folder / TENSOR_FILE
    try:
        tensors = load(data[TENSOR_FILE])
    except Exception as error:  # SafetensorError, or torch's error for data that is no tensor
        raise KVQuantError(
            f"{path}: truncated or damaged ({first_line(error)}). Fetch it again or recreate it with `kvq calibrate`."
        ) from error
    missing = [name for name in TENSORS[config.format_version] if name not in tensors]
    if missing:
        raise KVQuantError(
            f"{path}: there is no tensor {missing[0]}, which format_version {config.format_version} has. Fetch it "
            "again or recreate it with `kvq calibrate`."
        )
    digests = _digests(data)
    if digests[TENSOR_FILE] != config.sha256:
        raise KVQuantError(
            f"{path}: sha256 {digests[TENSOR_FILE]} differs from {config.sha256} in {CONFIG_FILE}; the two files do "
            "not belong together or one was altered. Fetch both again."
        )
    parts = _checked_tensors(path, tensors, config)
    return Rotations(**parts, meta=config.meta(str(folder), digests)), config.geometry.kv_heads


def _checked_tensors(path: Path, tensors: dict[str, torch.Tensor], config: RotationConfig) -> dict[str, torch.Tensor]:
    """Returns the tensors and spectra of the config's version, in float32; refuses shapes unlike its ``geometry``."""
    geometry, found = config.geometry, {}
    for name in (*TENSORS[config.format_version], *SPECTRA):
        if name not in tensors:
            continue
        heads = tensors[name].shape[1] if tensors[name].dim() > 1 else 0
        shape = [geometry.layers, heads if heads in (1, geometry.kv_heads) else geometry.kv_heads, geometry.head_dim]
        matrix = name in ("k", "v", "q", "o")
        found[name] = plain_tensor(str(path), f"tensor {name}", tensors[name], shape + shape[-1:] * matrix)
    return found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise KVQuantError(f"{file}: cannot be read ({error.strerror}). Check its permissions.") from error


def _resolve(location: str, download: Callable[[HubLocation], Path] = hub.download) -> Path:
    """Returns a local folder, or a file in it that selects one of several pairs: ``location`` itself, or a download."""
    try:
        path = Path(location).expanduser()
        if path.is_file() and path.name in (TENSOR_FILE, CONFIG_FILE):
            return path.parent
        if path.is_dir() or path.is_file():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # unknown user, name too long, folder without permission
        raise KVQuantError(
            f"{location}: not a folder that can be read ({first_line(error)}). {_NO_ROTATIONS}"
        ) from error
    place = HubLocation.parse(location)
    if place is None:
        raise KVQuantError(f"{location}: no such folder. {_NO_ROTATIONS}")
    return download(place)


_download_once = lru_cache(maxsize=8)(hub.download)


def _digests(data: dict[str, bytes]) -> dict[str, str]:
    return {name: _sha256(content) for name, content in data.items()}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
