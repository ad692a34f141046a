"""Computes rotations from second moments: R = U H P, or for keys any invertible matrix that leaves scores unchanged.

docs/notes/calibration.md says what ``offset`` and ``balanced`` gain over OSCAR's order. ``transform`` uses no
Hadamard matrix and another code; ``maths.transform`` computes its bases.
"""

from __future__ import annotations

import torch

from sglang_kvq.rotations.maths.fixed import hadamard_matrix

#: The ``objective`` recorded in config.json for each value of ``kvq calibrate --composition``; OSCAR's is the name in
#: its published files. Older files of transform coding have "transform", and gave all tokens equal weights.
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
    """Returns the rotation of values from mean Vᵀ diag(w) V, and its eigenvalues."""
    return compose("offset" if composition == "balanced" else composition, weighted, weighted)


def balance(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns symmetric A, float64 ``[..., D, D]``: k A and q A^-1 have equal second moments, except for ``FLOOR``."""
    queries, keys = _floored(queries), _floored(keys)
    root = _power(queries, 0.5)
    return _power(root @ _power(root @ keys @ root, -0.5) @ root, 0.5)


def stretch(energy: torch.Tensor) -> torch.Tensor:
    """Returns eigenvectors of the balanced keys' moment C as columns, float64 ``[..., D, D]``, the first stretched.

    The first column has the most energy, e; the other columns have the mean energy m. The first is stretched by s, with
    s² = e / 4m. It then adds no more to a score's error than four other columns. Larger factors cost precision in BF16.
    For keys that never change, m counts as 1e-6 e. So s is at most 500, and the inverse remains exact in float32.
    """
    values, vectors = torch.linalg.eigh(energy)
    stretched: torch.Tensor = vectors.flip(-1).clone()
    most = values[..., -1]
    others = torch.maximum(values[..., :-1].mean(-1), 1e-6 * most).clamp(min=torch.finfo(values.dtype).tiny)
    stretched[..., 0] *= (most / (4 * others)).clamp(min=1).sqrt()[..., None]
    return stretched


def _floored(moment: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    mean = torch.where(mean > 0, mean, 1.0)  # a head may be unused: all of its queries, or keys, are 0
    floor: torch.Tensor = FLOOR * mean * torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    return moment + floor


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """Raises a symmetric positive definite matrix to a power."""
    values, vectors = torch.linalg.eigh(matrix)
    least = values.amax(-1, keepdim=True) * 1e-14  # rounding may leave the smallest below 0
    power: torch.Tensor = (vectors * values.clamp(min=least).pow(exponent)[..., None, :]) @ vectors.mT
    return power


def compose(composition: str, importance: torch.Tensor, energy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns R float32 ``[..., D, D]`` for ``offset`` or ``oscar``, and the ascending eigenvalues of ``importance``.

    Args:
        importance: float64 ``[..., D, D]``, the matrix that OSCAR diagonalizes: mean QᵀQ or mean Vᵀ diag(w) V.
        energy: float64 ``[..., D, D]``: the second moment of the quantized rows (KᵀK, VᵀV), weighted or not.
    """
    values, vectors = torch.linalg.eigh(importance)
    h = hadamard_matrix(importance.shape[-1]).to(importance.device)
    if composition == "oscar":
        rotation = (vectors @ h)[..., oscar_permutation(len(h)).to(h.device)]
    else:
        rotation = torch.linalg.eigh(energy).eigenvectors.flip(-1) @ h
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
