"""Rotation files as OSCAR's authors publish them: real ones, which the repository does not contain, and random ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT

#: Names of the files of keys and values, by kind.
SHARED = ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt")
PER_HEAD = ("k_rotation_perhead.pt", "v_rotation_perhead.pt")
PLAIN = ("k_rotation.pt", "v_rotation.pt")
HADAMARD = ("k_rotation_hadamard.pt", "v_rotation_hadamard.pt")


def real_files(model: str) -> Path:
    """Returns the folder of a model's published rotations, in ``oscar_rotations`` of the shared data.

    The shared data lie in ``$KVQ_SHARED_DATA``, or in ``shared/data`` next to the repository or above it. Without the
    variable, a test is skipped where no place has the folder: a fresh clone elsewhere has none.

    Raises:
        FileNotFoundError: ``$KVQ_SHARED_DATA`` does not have the folder.
    """
    given = os.environ.get("KVQ_SHARED_DATA")
    places = [Path(given)] if given else [parent / "shared" / "data" for parent in ROOT.parents]
    for place in places:
        if (place / "oscar_rotations" / model).is_dir():
            return place / "oscar_rotations" / model
    missing = f"no oscar_rotations/{model} in {', '.join(map(str, places))}"
    if given:
        raise FileNotFoundError(missing)
    pytest.skip(f"{missing}: set KVQ_SHARED_DATA")


def rotation(*shape: int, seed: int = 0) -> torch.Tensor:
    """Returns random orthogonal matrices, float32 ``[*shape[:-1], D, D]`` with D the last of ``shape``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*shape, shape[-1], generator=generator)).Q.contiguous()


def document(keys: Sequence[Any], *, heads: int | None = None, dim: int = 64, version: int = 1, seed: int = 0) -> dict:
    """Returns the content of a file with one layer per key, and a matrix for each of ``heads`` or one for all."""
    shape = (heads, dim) if heads else (dim,)
    layers = {key: {"layer_id": int(key), "rotation": rotation(*shape, seed=seed + 97 * int(key))} for key in keys}
    if version == 1:
        for entry in layers.values():
            entry["eigenvalues"] = torch.arange(1.0, 1 + dim).expand(*shape).clone()
    grouping = "per_kv_head" if heads else "layer"
    return {"format_version": version, "objective": "qqt_r_h_pbr", "source_grouping": grouping, "layers": layers}


def write(folder: Path, names: Sequence[str], keys: Sequence[Any], **options: Any) -> Path:
    """Writes a pair of files into ``folder``, which need not exist; ``options`` as ``document``. Returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    seed = options.pop("seed", 0)
    for part, name in enumerate(names):
        torch.save(document(keys, **options, seed=seed + part), folder / name)
    return folder
