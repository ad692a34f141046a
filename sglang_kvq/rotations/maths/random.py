"""Random rotations, one per layer and KV head: what TurboQuant needs instead of calibration."""

from __future__ import annotations

import torch

from sglang_kvq.rotations.base import RotationMeta, Rotations


def random_rotations(layers: int, kv_heads: int, head_dim: int, seed: int = 0) -> Rotations:
    """Orthogonal matrices uniform over the orthogonal group (Haar), keys' and values' independent.

    Q of the QR decomposition of a Gaussian matrix, its columns' signs those of R's diagonal (Mezzadri, arXiv
    math-ph/0609050). The same in every process: each head's matrix depends on the seed, its layer and its index in the
    whole model, so tensor-parallel ranks draw all and keep theirs.

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
