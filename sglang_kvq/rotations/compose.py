"""From second moments to rotations: R = U H P, and why we order U differently from OSCAR.

With one scale per row of head_dim, an orthogonal R changes the quantisation error only through each row's range.
Two things shrink it. H spreads every direction over all coordinates, so no coordinate dominates. And H's
row 0 is constant: whatever direction of U meets it becomes an offset common to the row, which the
zero point of asymmetric quantisation stores exactly. OSCAR takes eigenvectors in ascending order (the least
important direction meets row 0) and then permutes columns by P, which changes no code when one group spans
head_dim. ``offset`` puts the direction that carries most energy there instead.
"""

from __future__ import annotations

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.hadamard import hadamard_matrix

#: Compositions that ``kvq calibrate --composition`` knows, the default first.
COMPOSITIONS = ("offset", "oscar")

#: The ``objective`` recorded in config.json for each; OSCAR's is the name in its published files.
OBJECTIVES = {"offset": "offset_h", "oscar": "qqt_r_h_pbr"}


def compose(composition: str, importance: torch.Tensor, energy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotations from second moments.

    Args:
        composition: one of ``COMPOSITIONS``.
        importance: float64 ``[..., D, D]``: what OSCAR diagonalises, mean QᵀQ for keys, mean Vᵀ diag(w) V for values.
        energy: float64 ``[..., D, D]``: the second moment of the rows that are quantised (KᵀK, VᵀV), weighted or not.

    Returns:
        R float32 ``[..., D, D]`` and the eigenvalues of ``importance``, float32 ``[..., D]``, ascending.

    Raises:
        KVQuantError: unknown composition.
    """
    values, vectors = torch.linalg.eigh(importance)
    h = hadamard_matrix(importance.shape[-1]).to(importance.device)
    if composition == "oscar":
        rotation = (vectors @ h)[..., oscar_permutation(len(h)).to(h.device)]
    elif composition == "offset":
        rotation = torch.linalg.eigh(energy).eigenvectors.flip(-1) @ h
    else:
        raise KVQuantError(f"--composition {composition}: unknown; choose one of {', '.join(COMPOSITIONS)}.")
    return rotation.float(), values.float()


def oscar_permutation(n: int) -> torch.Tensor:
    """OSCAR's P as column indices, int64 ``[n]``: ``perm[reverse_bits(i)] = argsort_descending[i]``.

    Eigenvalues ascend here, so the i-th largest is n - 1 - i. For n not a power of two, gaps between the reversed
    numbers are closed.
    """
    bits = max(n - 1, 1).bit_length()
    reversed_bits = torch.tensor([int(format(i, f"0{bits}b")[::-1], 2) for i in range(n)])
    perm = torch.empty(n, dtype=torch.int64)
    perm[reversed_bits.argsort().argsort()] = torch.arange(n).flip(0)
    return perm
