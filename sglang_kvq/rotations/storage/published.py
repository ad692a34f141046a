"""The layout of the published RotationZoo (https://github.com/FutureMLS-Lab/OSCAR): two ``.pt`` files.

Each is ``{"format_version": 1, "objective": str, "source_grouping": str, "layers": {layer: {"layer_id": int,
"rotation": float32 [D, D], "eigenvalues": float32 [D]}}}``. We also read and write a per-head variant,
rotation ``[heads, D, D]`` and eigenvalues ``[heads, D]`` with source_grouping "head".
"""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.messages import first_line

K_FILE = "k_rotation_qqt_r_h_pbr.pt"
V_FILE = "v_rotation_sst_r_h_pbr.pt"


def load_published(folder: Path, *, layers: int | None = None) -> Rotations:
    """Read both files of ``folder``; geometry and orthogonality are checked by the caller.

    Args:
        layers: the model's layers; None takes as many as the file has.

    Raises:
        KVQuantError: a file missing, truncated, refused by ``weights_only``, or without some layer.
    """
    (k, k_eigen, objective), (v, v_eigen, _) = (_read(folder / name, layers) for name in (K_FILE, V_FILE))
    meta = RotationMeta(objective=objective, source=str(folder))
    return Rotations(k, v, meta, k_eigen, v_eigen)


def save_published(rotations: Rotations, folder: Path) -> None:
    """Write both files into the existing ``folder``. The clip ratios and corpus are not part of this layout.

    Raises:
        KVQuantError: queries are not rotated like keys, or they are for transform coding, which this layout cannot say.
    """
    if rotations.is_transform:
        raise KVQuantError(
            f"{rotations.meta.source or 'rotations'}: transform coding has matrices of queries and outputs, a mean and "
            "energies (composition transform), which the published layout has no place for; calibrate with "
            "--composition oscar or offset to convert."
        )
    if rotations.q is not None:
        raise KVQuantError(
            f"{rotations.meta.source or 'rotations'}: queries and keys have different matrices (composition balanced), "
            "which the published layout has no place for; calibrate with --composition oscar or offset to convert."
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
        grouping = "layer" if shared else "head"
        document = {
            "format_version": 1,
            "objective": rotations.meta.objective,
            "source_grouping": grouping,
            "layers": entries,
        }
        torch.save(document, folder / name)


def _read(path: Path, layers: int | None) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """Stacked rotations ``[layers, heads, D, D]``, eigenvalues ``[layers, heads, D]`` or None, and the objective."""
    if not path.is_file():
        raise KVQuantError(f"{path.parent}: {path.name} is missing; the folder needs both {K_FILE} and {V_FILE}.")
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises half a dozen types
        raise KVQuantError(
            f"{path}: not loadable as plain tensors ({first_line(error)}). It is truncated, or a pickle with code in "
            "it, which is never run; fetch it again from its publisher."
        ) from error
    entries = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise KVQuantError(f'{path}: no "layers" table; this is not a rotation file. Expected the RotationZoo layout.')
    if document.get("format_version", 1) != 1:
        raise KVQuantError(
            f"{path}: format_version {document['format_version']} is unknown (1 is supported); update sglang-kvq."
        )
    wanted = range(layers if layers is not None else max(entries) + 1)
    missing = [i for i in wanted if i not in entries]
    if missing:
        raise KVQuantError(
            f"{path}: layer {missing[0]} is missing ({len(missing)} of {len(wanted)} layers are); the file has layers "
            f"{sorted(entries)}. Use rotations of this model, or make them with `kvq calibrate`."
        )
    if len(entries) > len(wanted):
        raise KVQuantError(
            f"{path}: it has {len(entries)} layers, the model has {len(wanted)}; it belongs to another model. Pass "
            "this one's with --kv-quant-rotations, or make them with `kvq calibrate`."
        )
    try:
        rotation = torch.stack([entries[i]["rotation"].float() for i in wanted])
        given = [entries[i].get("eigenvalues") for i in wanted]
        eigen = None if any(e is None for e in given) else torch.stack([e.float() for e in given])
    except (KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise KVQuantError(f"{path}: malformed layer table ({first_line(error)}); fetch the file again.") from error
    if rotation.dim() == 3:  # one matrix per layer
        rotation = rotation.unsqueeze(1)
        eigen = eigen.unsqueeze(1) if eigen is not None else None
    return rotation, eigen, str(document.get("objective", "unknown"))
