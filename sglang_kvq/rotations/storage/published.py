"""The layout of the published RotationZoo (https://github.com/FutureMLS-Lab/OSCAR): two ``.pt`` files.

Each is ``{"format_version": int, "objective": str, "source_grouping": str, "layers": {layer: {"layer_id": int,
"rotation": float32, "eigenvalues": float32}}}``. In version 1 a layer's heads share a rotation ``[D, D]``, with
eigenvalues ``[D]``; in version 2 each KV head has its own, ``[heads, D, D]`` and ``[heads, D]``. Eigenvalues may be
missing. ``layers`` has the model's own layer numbers, as integers or strings: of full-attention layers, or of all.

A folder may hold several pairs. If one has a matrix per head (version 2), ``choose_pair`` takes it unless the user
names another. We write version 1 with layers numbered from 0; source_grouping "head" then means a matrix per head.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_kvq.errors import KVQuantError, first_line, shorten
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.identity import LayerNumbers
from sglang_kvq.rotations.storage.schema import CONFIG_FILE, plain_tensor


class Pair(NamedTuple):
    """Names of the files of keys and of values."""

    k: str
    v: str


K_FILE = "k_rotation_qqt_r_h_pbr.pt"
V_FILE = "v_rotation_sst_r_h_pbr.pt"
#: The files with a matrix for each KV head.
PER_HEAD = Pair("k_rotation_perhead.pt", "v_rotation_perhead.pt")
#: Each file's partner. In all other pairs, the two names differ only in their first letter.
_PARTNERS = {K_FILE: V_FILE, V_FILE: K_FILE}
_ROTATION_FILE = re.compile(r"[kv]_rotation[\w.-]*\.pt")
_LATENT_FILE = re.compile(r"layer_\d+\.pt|c_kv.*")
_FETCH = "Fetch the folder again from its publisher."
#: Each ``format_version`` that can be read; the second has matrices per head.
VERSIONS = (1, 2)


def is_rotation_file(name: str) -> bool:
    """Returns True if a file of this name holds published rotations of keys or values."""
    return _ROTATION_FILE.fullmatch(name) is not None


def holds_latents(folder: str, names: Iterable[str]) -> bool:
    """Returns True if the names of a folder and its files are those of rotations of MLA's latents, a file per layer."""
    return Path(folder).name.startswith("c_kv") or any(_LATENT_FILE.fullmatch(name) for name in names)


def latents_error(where: str) -> KVQuantError:
    """Returns the error for a folder that ``holds_latents``."""
    return KVQuantError(
        f"{where}: these rotations are of MLA's latents (c_kv), not of keys and values; --kv-quant does not serve MLA. "
        "Serve the model without --kv-quant."
    )


def choose_pair(names: Collection[str], where: str, chosen: str | None = None) -> Pair | None:
    """Returns the two files from which a folder's rotations are read; None if it has no files of this layout.

    If the user named one of the files, ``chosen``, its pair is returned, whatever other files there are.

    Raises:
        KVQuantError: a file has no partner; there are several pairs, none of them ``PER_HEAD``.
    """
    found = sorted(name for name in names if is_rotation_file(name))
    if chosen is not None:
        return _whole(_pair_of(chosen), found, where)
    if not found:
        return None
    if any(name in PER_HEAD for name in found):
        return _whole(PER_HEAD, found, where)
    keys, values = ([name for name in found if name[0] == part] for part in "kv")
    pairs = sorted({_pair_of(name) for name in found})
    whole = [pair for pair in pairs if set(pair) <= set(found)]
    if len(keys) == len(values) == 1:
        return Pair(keys[0], values[0])
    if len(whole) > 1:
        raise KVQuantError(
            f"{where}: several pairs of rotations ({', '.join(pair.k for pair in whole)}). Name the one you mean: "
            f"--kv-quant-rotations {where}/{whole[0].k}."
        )
    return _whole(whole[0] if whole else pairs[0], found, where)


def _pair_of(name: str) -> Pair:
    partner = _PARTNERS.get(name, {"k": "v", "v": "k"}[name[0]] + name[1:])
    return Pair(name, partner) if name[0] == "k" else Pair(partner, name)


def _whole(pair: Pair, found: Collection[str], where: str) -> Pair:
    missing = [name for name in pair if name not in found]
    if missing:
        raise KVQuantError(f"{where}: {missing[0]} is missing; the folder needs both {pair.k} and {pair.v}. {_FETCH}")
    return pair


def load_published(
    folder: Path, pair: Pair, data: dict[str, bytes], *, layers: int | None = None, numbers: LayerNumbers | None = None
) -> Rotations:
    """Returns the rotations in a pair of files; the caller checks their orthogonality.

    Args:
        data: contents of both files, by name, and of ``config.json`` if the folder has one.
        layers: number of layers that the model's cache holds; None takes all layers in the files.
        numbers: the model's own numbers of these layers; None takes the files' layers in order.

    Raises:
        KVQuantError: a file is truncated, refused by ``weights_only``, or lacks a layer; a tensor has another shape;
            heads share matrices although the folder's version is 2.
    """
    files = [_File(folder / name, data[name]) for name in pair]
    if 2 in (_declared_version(folder, data), *(file.version for file in files)):
        for file in files:
            file.check_per_head()
    wanted = [file.layers_of(layers, numbers) for file in files]
    if wanted[0] != wanted[1]:
        raise KVQuantError(
            f"{folder}: {pair.k} and {pair.v} have different layers; they do not belong together. {_FETCH}"
        )
    (k, k_eigenvalues), (v, v_eigenvalues) = (file.stack(numbers) for file, numbers in zip(files, wanted))
    meta = RotationMeta(objective=files[0].objective, source=str(folder))
    return Rotations(k, v, meta, k_eigenvalues, v_eigenvalues)


def _declared_version(folder: Path, data: dict[str, bytes]) -> Any:
    """Returns ``format_version`` of a ``config.json`` next to the files; None without one."""
    try:
        config = json.loads(data.get(CONFIG_FILE, b"{}"))
    except (ValueError, RecursionError) as error:
        raise KVQuantError(f"{folder / CONFIG_FILE}: not valid JSON ({first_line(error)}). {_FETCH}") from error
    if not isinstance(config, dict):
        raise KVQuantError(f"{folder / CONFIG_FILE}: not a JSON object ({shorten(config)}). {_FETCH}")
    version = config.get("format_version")
    if "sha256" in config and "geometry" in config:
        raise KVQuantError(
            f"{folder / CONFIG_FILE}: it describes rotations.safetensors, which is missing. Without it, remove "
            f"{CONFIG_FILE} to load the published files beside it."
        )
    if version is not None and (type(version) is not int or version not in VERSIONS):
        raise _version_error(folder / CONFIG_FILE, version)
    return version


def _version_error(path: Path, version: Any) -> KVQuantError:
    read = " and ".join(map(str, VERSIONS))
    return KVQuantError(
        f"{path}: format_version {shorten(version)}; of published rotations, this sglang-kvq reads versions {read}. "
        "Update sglang-kvq, or make rotations with `kvq calibrate`."
    )


class _File:
    """One of the two files, after checks; ``entries`` is its table of layers, by the layer's number."""

    def __init__(self, path: Path, data: bytes) -> None:
        document = _unpickle(path, data)
        self.path, self.version = path, document.get("format_version", 1)
        if type(self.version) is not int or self.version not in VERSIONS:
            raise _version_error(path, self.version)
        objective = document.get("objective", "unknown")
        self.objective = objective if isinstance(objective, str) and objective.isprintable() else shorten(objective)
        self.entries: dict[int, dict[Any, Any]] = {}
        for key, entry in document["layers"].items():
            number = self._number(key)
            own = entry.get("layer_id", key) if isinstance(entry, dict) else None
            if own is None or self._number(own) != number or number in self.entries:
                raise KVQuantError(
                    f"{path}: the entry of layer {number} is damaged ({shorten(entry)}). Fetch the file again."
                )
            self.entries[number] = entry

    def _number(self, key: Any) -> int:
        if type(key) is str and re.fullmatch("[0-9]{1,6}", key):
            key = int(key)
        if type(key) is not int or not 0 <= key < 10**6:
            raise KVQuantError(f"{self.path}: {shorten(key)} is not a layer number. Fetch the file again.")
        return key

    def layers_of(self, layers: int | None, numbers: LayerNumbers | None) -> list[int]:
        """Returns the numbers that the wanted layers have in this file, in the model's order."""
        there = set(self.entries)
        if layers is None:
            return sorted(there)
        own = numbers.cached if numbers else tuple(sorted(there)) if len(there) == layers else tuple(range(layers))
        everything = set(range(numbers.total if numbers else layers))
        for wanted, held in ((own, set(own)), (range(layers), set(range(layers))), (own, everything)):
            if there == held:
                return list(wanted)
        missing = [i for i in own if i not in there]
        if missing:
            raise KVQuantError(
                f"{self.path}: layer {missing[0]} is missing ({len(missing)} of {len(own)} layers are); the file has "
                f"layers {shorten(sorted(there))}. Use rotations of this model, or make them with `kvq calibrate`."
            )
        raise KVQuantError(
            f"{self.path}: it has {len(there)} layers, the model has {layers}; it belongs to another model. Pass this "
            "one's with --kv-quant-rotations, or make them with `kvq calibrate`."
        )

    def check_per_head(self) -> None:
        """Refuses matrices that a layer's heads share."""
        for number, entry in self.entries.items():
            rotation = entry.get("rotation")
            if isinstance(rotation, torch.Tensor) and rotation.dim() != 3:
                raise KVQuantError(
                    f"{self.path}: format_version 2 means a matrix for each KV head, layer {number} has shape "
                    f"{list(rotation.shape)}: this is the older shared file, which is less accurate. Fetch "
                    f"{PER_HEAD.k} and {PER_HEAD.v} into the folder, or make rotations with `kvq calibrate`."
                )

    def stack(self, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns these layers' rotations ``[layers, heads, D, D]`` and eigenvalues ``[layers, heads, D]``, float32.

        Eigenvalues are None if any layer lacks them.
        """
        rotations: list[torch.Tensor] = []
        spectra: list[torch.Tensor] = []
        for number in numbers:
            entry, shape = self.entries[number], rotations[0].shape if rotations else None
            rotation = plain_tensor(str(self.path), f"rotation of layer {number}", entry.get("rotation"), shape)
            if rotation.dim() not in (2, 3) or rotation.shape[-1] != rotation.shape[-2]:
                raise KVQuantError(
                    f"{self.path}: rotation of layer {number} has shape {list(rotation.shape)}, expected [D, D] or "
                    "[heads, D, D]. Fetch the file again."
                )
            rotations.append(rotation)
            if entry.get("eigenvalues") is not None:
                name = f"eigenvalues of layer {number}"
                spectra.append(plain_tensor(str(self.path), name, entry["eigenvalues"], rotation.shape[:-1]))
        stacked, spectrum = torch.stack(rotations), torch.stack(spectra) if len(spectra) == len(numbers) else None
        if stacked.dim() == 3:  # heads share them
            stacked, spectrum = stacked.unsqueeze(1), None if spectrum is None else spectrum.unsqueeze(1)
        return stacked, spectrum


def _unpickle(path: Path, data: bytes) -> dict[Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about odd pickles; the error below says what is wrong
            document = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises half a dozen types
        raise KVQuantError(
            f"{path}: not loadable as plain tensors ({first_line(error)}). It is truncated, or a pickle with code in "
            "it, which is never run. Fetch it again from its publisher."
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("layers"), dict) or not document["layers"]:
        raise KVQuantError(f'{path}: no "layers" table; this is not a rotation file. Expected the RotationZoo layout.')
    return document


def save_published(rotations: Rotations, folder: Path) -> None:
    """Writes both files into the existing ``folder``. The clip ratios and corpus are not part of this layout."""
    if rotations.q is not None:
        what = "queries and keys have different matrices (composition balanced)"
        if rotations.is_transform:
            what = "transform coding has matrices of queries and outputs, a mean and energies (composition transform)"
        raise KVQuantError(
            f"{rotations.meta.source or 'rotations'}: {what}, which the published layout has no place for. Calibrate "
            "with --composition oscar or offset to convert."
        )
    for name, r, eigen in (
        (K_FILE, rotations.k, rotations.k_eigenvalues),
        (V_FILE, rotations.v, rotations.v_eigenvalues),
    ):
        if eigen is None:
            eigen = torch.zeros(r.shape[:3])
        shared = r.shape[1] == 1
        entries = {
            i: {
                "layer_id": i,
                "rotation": (r[i, 0] if shared else r[i]).clone(),
                "eigenvalues": (eigen[i, 0] if shared else eigen[i]).clone(),
            }
            for i in range(r.shape[0])
        }
        about = {"objective": rotations.meta.objective, "source_grouping": "layer" if shared else "head"}
        torch.save({"format_version": 1, **about, "layers": entries}, folder / name)
