"""Random rotations, one per layer and KV head; TurboQuant uses them instead of calibration."""

from __future__ import annotations

import torch

from sglang_kvq.rotations.base import RotationMeta, Rotations


def random_rotations(layers: int, kv_heads: int, head_dim: int, seed: int = 0) -> Rotations:
    """Draws orthogonal matrices uniformly (Haar measure), independently for keys and values.

    Each is Q of the QR decomposition of a Gaussian matrix, with column signs from R's diagonal (Mezzadri, arXiv
    math-ph/0609050). All processes draw the same: a head's matrix depends on the seed, its layer and its index in the
    whole model. Tensor-parallel ranks draw all heads and keep their own.

    Args:
        seed: at least 0.

    Returns:
        float32 ``[layers, kv_heads, head_dim, head_dim]`` for keys and values.
    """
    generator = torch.Generator().manual_seed(seed)
    gauss = torch.randn(2, layers, kv_heads, head_dim, head_dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gauss)
    q = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).float()
    return Rotations(
        q[0].contiguous(), q[1].contiguous(), RotationMeta(objective="random", source=f"random, seed {seed}")
    )
