"""From second moments to rotations: R = U H P, why we order U differently from OSCAR, and why keys need no rotation.

With one scale per row of head_dim, an orthogonal R changes the quantization error only through each row's range.
Two things shrink it. H spreads every direction over all coordinates, so no coordinate dominates. And H's
row 0 is constant: whatever direction of U meets it becomes an offset common to the row, which the
zero point of asymmetric quantization stores exactly. OSCAR takes eigenvectors in ascending order (the least
important direction meets row 0) and then permutes columns by P, which changes no code when one group spans
head_dim. ``offset`` puts the direction that carries most energy there instead.

``balanced`` goes further for keys. Scores need q k to stay, not the lengths of keys: with any invertible A, keys k A
and queries q A^-T give the same. The error of codes is spread evenly over the coordinates of k A and proportional to
its energy, so a score's is proportional to tr(A^T K A) tr(A^-1 Q A^-T), for K and Q the second moments of keys and
queries. By Cauchy and Schwarz that is least where both have the same moment, A A^T = Q^1/2 (Q^1/2 K Q^1/2)^-1/2 Q^1/2,
the geometric mean of Q and K^-1. What keys hold much of and queries ask little for, such as Qwen2.5's biases, then
costs little. U and H follow as before, and what the zero point stores may be large at no cost: its direction is
stretched (``stretch``), so that the codes' error there counts for less in a score. Values are weighted by attention,
which no matrix of theirs changes: they are rotated as by ``offset``.

``transform`` has no Hadamard matrix and another code: its bases are ``maths.transform``'s.
"""

from __future__ import annotations

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.maths.hadamard import hadamard_matrix

#: Compositions that ``kvq calibrate --composition`` knows, the default first.
COMPOSITIONS = ("balanced", "offset", "oscar", "transform")

#: The ``objective`` recorded in config.json for each; OSCAR's is the name in its published files. Transform coding had
#: "transform" while all tokens counted alike.
OBJECTIVES = {"balanced": "balanced_h", "offset": "offset_h", "oscar": "qqt_r_h_pbr", "transform": "attended_transform"}

#: Added to both moments before they are balanced, relative to their mean eigenvalue: what a short text says of the
#: directions with least energy is noise, and keys are stored in BF16 in the basis that results.
FLOOR = 1e-4


def compose_keys(
    composition: str, queries: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Matrices of keys and queries.

    Args:
        queries, keys: float64 ``[..., D, D]``, mean QᵀQ of the queries that read a KV head, and KᵀK.

    Returns:
        R_k float32 ``[..., D, D]``; R_q likewise with R_q R_kᵀ = 1, or None where R_k is orthogonal; and the
        eigenvalues of ``queries``, float32 ``[..., D]``, ascending.

    Raises:
        KVQuantError: unknown composition.
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
    """The rotation of values from mean Vᵀ diag(w) V; results as ``compose``."""
    return compose("offset" if composition == "balanced" else composition, weighted, weighted)


def balance(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Symmetric A float64 ``[..., D, D]``: keys k A and queries q A^-1 have equal second moments, but for ``FLOOR``."""
    queries, keys = _floored(queries), _floored(keys)
    root = _power(queries, 0.5)
    return _power(root @ _power(root @ keys @ root, -0.5) @ root, 0.5)


def stretch(energy: torch.Tensor) -> torch.Tensor:
    """Eigenvectors of the balanced keys' moment C as columns, float64 ``[..., D, D]``, most energy first and stretched.

    With s the first one's factor, e its energy and m the mean of the others', the error of a score is proportional to
    (D - 1) m ((D - 1) m + e / s²): codes' steps follow from what varies, and queries meet the first direction divided
    by s. At s² = e / 4m it adds no more than four of the others. Larger factors gain little, and cost keys that are
    still BF16
    precision: all coordinates of k R are rounded to 8 bits of what they then hold in common.
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
    """A symmetric positive definite matrix to that power."""
    values, vectors = torch.linalg.eigh(matrix)
    least = values.amax(-1, keepdim=True) * 1e-14  # rounding may leave the smallest below 0
    power: torch.Tensor = (vectors * values.clamp(min=least).pow(exponent)[..., None, :]) @ vectors.mT
    return power


def compose(composition: str, importance: torch.Tensor, energy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotations from second moments.

    Args:
        composition: ``offset`` or ``oscar``.
        importance: float64 ``[..., D, D]``: what OSCAR diagonalises, mean QᵀQ for keys, mean Vᵀ diag(w) V for values.
        energy: float64 ``[..., D, D]``: the second moment of the rows that are quantized (KᵀK, VᵀV), weighted or not.

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
