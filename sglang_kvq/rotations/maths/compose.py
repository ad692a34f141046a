"""Rotations from second moments: R = U H P. Explains our order of U, unlike OSCAR's, and non-orthogonal keys.

With one scale per row of head_dim, an orthogonal R changes the quantization error only through each row's range. Two
things shrink the range. First, H spreads every direction over all coordinates, so no coordinate dominates. Second, H's
row 0 is constant: the direction of U that meets it becomes an offset common to the row. The zero point of asymmetric
quantization stores this offset exactly. OSCAR sorts eigenvectors in ascending order, so the least important direction
meets row 0. It then permutes columns by P, which changes no code when one group spans head_dim. ``offset`` puts the
direction of most energy at row 0 instead.

``balanced`` goes further for keys. Attention needs the scores q k unchanged, not the lengths of keys. With any
invertible A, keys k A and queries q A^-T give the same scores. The error of codes is spread evenly over the coordinates
of k A and is proportional to its energy. A score's error is therefore proportional to tr(A^T K A) tr(A^-1 Q A^-T),
for K and Q the second moments of keys and queries. By Cauchy-Schwarz this is least if both products have the same
moment: A A^T = Q^1/2 (Q^1/2 K Q^1/2)^-1/2 Q^1/2, the geometric mean of Q and K^-1. Directions that are large in keys
and small in queries, such as Qwen2.5's biases, then cost little. U and H follow as before. The direction that the zero
point stores may be large at no cost, so it is stretched (``stretch``). Codes' errors along it then count less in a
score. Values are weighted by attention, which their own matrices do not change. They are rotated as by ``offset``.

``transform`` has no Hadamard matrix and another code; ``maths.transform`` computes its bases.
"""

from __future__ import annotations

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.maths.fixed import hadamard_matrix

#: Values of ``kvq calibrate --composition``, the default first.
COMPOSITIONS = ("balanced", "offset", "oscar", "transform")

#: The ``objective`` recorded in config.json for each; OSCAR's is the name in its published files. "transform" without
#: a prefix is the older objective of transform coding, with equal weights for all tokens.
OBJECTIVES = {"balanced": "balanced_h", "offset": "offset_h", "oscar": "qqt_r_h_pbr", "transform": "attended_transform"}

#: Added to both moments before balancing, relative to their mean eigenvalue. A short text gives only noise about the
#: directions of least energy, and keys are stored in BF16 in the resulting basis.
FLOOR = 1e-4


def compose_keys(
    composition: str, queries: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Returns the matrices of keys and queries.

    Args:
        queries, keys: float64 ``[..., D, D]``, mean QᵀQ of the queries that read a KV head, and KᵀK.

    Returns:
        R_k float32 ``[..., D, D]``; R_q of equal shape with R_q R_kᵀ = 1, or None if R_k is orthogonal; and the
        eigenvalues of ``queries``, float32 ``[..., D]``, ascending.

    Raises:
        KVQuantError: the composition is unknown.
    """
    if composition != "balanced":
        rotation, values = compose(composition, queries, keys)
        return rotation, None, values
    a = balance(queries, keys)
    energy = a.mT @ keys @ a
    a = a @ stretch(energy)
    h = hadamard_matrix(keys.shape[-1]).to(keys.device)
    r_k = a @ h
    return r_k.float(), torch.linalg.inv(r_k).mT.float(), torch.linalg.eigvalsh(queries).float()


def compose_values(composition: str, weighted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rotation of values from mean Vᵀ diag(w) V; results as ``compose``."""
    return compose("offset" if composition == "balanced" else composition, weighted, weighted)


def balance(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns symmetric A float64 ``[..., D, D]``: k A and q A^-1 have equal second moments, up to ``FLOOR``."""
    queries, keys = _floored(queries), _floored(keys)
    root = _power(queries, 0.5)
    return _power(root @ _power(root @ keys @ root, -0.5) @ root, 0.5)


def stretch(energy: torch.Tensor) -> torch.Tensor:
    """Returns eigenvectors of the balanced keys' moment C as columns, float64 ``[..., D, D]``, the first stretched.

    The first column has most energy. Let s be its factor, e its energy and m the mean of the others' energies. The
    error of a score is proportional to (D - 1) m ((D - 1) m + e / s²): the varying directions determine codes' steps,
    and queries meet the first direction divided by s. At s² = e / 4m it adds no more than four of the others. Larger
    factors gain little and cost precision: BF16 rounds all coordinates of k R to 8 bits of their common part.
    """
    values, vectors = torch.linalg.eigh(energy)
    stretched: torch.Tensor = vectors.flip(-1).clone()
    others = values[..., :-1].mean(-1)
    stretched[..., 0] *= (values[..., -1] / (4 * others)).clamp(min=1).sqrt()[..., None]
    return stretched


def _floored(moment: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    floor: torch.Tensor = FLOOR * mean * torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    return moment + floor


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """Raises a symmetric positive definite matrix to a power."""
    values, vectors = torch.linalg.eigh(matrix)
    least = values.amax(-1, keepdim=True) * 1e-14  # rounding may leave the smallest below 0
    power: torch.Tensor = (vectors * values.clamp(min=least).pow(exponent)[..., None, :]) @ vectors.mT
    return power


def compose(composition: str, importance: torch.Tensor, energy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rotations from second moments.

    Args:
        composition: ``offset`` or ``oscar``.
        importance: float64 ``[..., D, D]``, the matrix that OSCAR diagonalizes: mean QᵀQ for keys, mean Vᵀ diag(w) V
            for values.
        energy: float64 ``[..., D, D]``: the second moment of the quantized rows (KᵀK, VᵀV), weighted or not.

    Returns:
        R float32 ``[..., D, D]`` and the eigenvalues of ``importance``, float32 ``[..., D]``, ascending.

    Raises:
        KVQuantError: the composition is unknown.
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
    """Returns OSCAR's P as column indices, int64 ``[n]``: ``perm[reverse_bits(i)] = argsort_descending[i]``.

    Eigenvalues ascend here, so the i-th largest is n - 1 - i. If n is not a power of two, gaps between the reversed
    numbers are closed.
    """
    bits = max(n - 1, 1).bit_length()
    reversed_bits = torch.tensor([int(format(i, f"0{bits}b")[::-1], 2) for i in range(n)])
    perm = torch.empty(n, dtype=torch.int64)
    perm[reversed_bits.argsort().argsort()] = torch.arange(n).flip(0)
    return perm
