"""Rotations that need no calibration: Hadamard matrices, and random ones per layer and KV head."""

from __future__ import annotations

from math import sqrt

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import RotationMeta, Rotations

#: Paley's first construction gives orders that are not powers of two: order = prime + 1, prime = 3 mod 4.
_PALEY_PRIMES = {12: 11, 20: 19}


def hadamard_matrix(n: int) -> torch.Tensor:
    """Returns a Hadamard matrix of order n divided by sqrt(n), float64 ``[n, n]``.

    Row 0 is constant: ``x @ H`` turns a row's component along axis 0 into a constant over the row, which asymmetric
    quantization stores in the zero point at no cost. Powers of two give Sylvester's matrix; 96 gives Paley's matrix of
    order 12, doubled three times.

    Raises:
        KVQuantError: n is not 1, 12 or 20 times a power of two.
    """
    core, doublings = n, 0
    while core not in (1, *_PALEY_PRIMES) and core > 1 and core % 2 == 0:
        core, doublings = core // 2, doublings + 1
    if core not in (1, *_PALEY_PRIMES):
        raise KVQuantError(
            f"head_dim {n} has no Hadamard matrix here (it must be 1, 12 or 20 times a power of two). "
            "Use --kv-quant int2."
        )
    matrix = torch.ones(1, 1, dtype=torch.float64) if core == 1 else _paley(_PALEY_PRIMES[core])
    for _ in range(doublings):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / sqrt(n)


def hadamard_rotations(layers: int, head_dim: int) -> Rotations:
    """Returns the fixed rotation of ``--kv-quant hadamard``: one matrix for keys and values of every layer."""
    shared = hadamard_matrix(head_dim).float().expand(layers, 1, head_dim, head_dim)
    return Rotations(k=shared, v=shared, meta=RotationMeta(objective="hadamard", source="fixed"))


def _paley(prime: int) -> torch.Tensor:
    """Returns Paley's matrix I: order prime + 1, ones in row and column 0.

    Source: https://en.wikipedia.org/wiki/Paley_construction
    """
    i = torch.arange(prime)
    residues = torch.isin((i - i[:, None]) % prime, (i[1:] ** 2) % prime)
    h = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    h[1:, 1:] = residues.double() * 2 - 1
    return h


def random_rotations(layers: int, kv_heads: int, head_dim: int, seed: int = 0) -> Rotations:
    """Draws orthogonal matrices uniformly (Haar measure), one per layer and KV head, for keys and values.

    Each is Q of the QR decomposition of a Gaussian matrix, with column signs from R's diagonal (Mezzadri, arXiv
    math-ph/0609050). All processes draw the same matrices; tensor-parallel ranks draw all heads and keep their own.
    """
    generator = torch.Generator().manual_seed(seed)
    gauss = torch.randn(2, layers, kv_heads, head_dim, head_dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gauss)
    q = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).float()
    return Rotations(
        q[0].contiguous(), q[1].contiguous(), RotationMeta(objective="random", source=f"random, seed {seed}")
    )
