"""Clipping and asymmetric min-max quantisation of head rows: the arithmetic every path shares.

Only additions, comparisons, multiplications by constants and roundings to FP16 are used, and none
in an order that a fused multiply-add could change, so that torch on any device and the Triton
kernels give the same codes bit for bit.
"""

from __future__ import annotations

import torch

#: float32 nearest to 1/3: a multiplication, because GPU division is not always correctly rounded.
THIRD = 0.3333333432674408
FP16_MAX = 65504.0


def clip_rank(head_dim: int, ratio: float) -> int:
    """How many of a row's largest magnitudes lie at or above the clip threshold (0: no clipping).

    OSCAR (arXiv 2605.17757) clips at ``sort(|x|)[int(ratio * head_dim)]``; counted from the top
    that is the ``head_dim - int(ratio * head_dim)``-th largest magnitude.
    """
    return head_dim - min(int(ratio * head_dim), head_dim)


def clip_rows(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Clamp each row to its ``rank``-th largest magnitude. Shape ``[..., head_dim]``, kept."""
    if rank == 0:
        return x
    threshold = x.abs().topk(rank, dim=-1).values[..., -1:]
    return torch.minimum(torch.maximum(x, -threshold), threshold)


def quantise_rows(x: torch.Tensor, group: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise head rows to codes 0..3.

    Args:
        x: ``[..., head_dim]``, BF16 values (any float dtype holding them exactly).
        group: elements along head_dim per scale and zero; divides head_dim.
        rank: from ``clip_rank``.

    Returns:
        codes uint8 ``[..., head_dim]``, scale FP16 and zero FP16 ``[..., head_dim // group]``;
        the value of a code is ``code * scale + zero``.
    """
    x = clip_rows(x.float(), rank).unflatten(-1, (-1, group))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) * THIRD).clamp(max=FP16_MAX).half()
    zero = low.clamp(-FP16_MAX, FP16_MAX).half()
    offset, step = x - zero.float(), scale.float()
    # Products of a half with 0.5, 1.5 and 2.5 are exact in float32: comparisons cannot differ.
    codes = (offset > 0.5 * step).to(torch.uint8)
    codes += (offset > 1.5 * step).to(torch.uint8)
    codes += (offset > 2.5 * step).to(torch.uint8)
    return codes.flatten(-2), scale.squeeze(-1), zero.squeeze(-1)


def dequantise_rows(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Values of ``quantise_rows``'s codes, float32 ``[..., head_dim]``."""
    group = codes.shape[-1] // scale.shape[-1]
    values = codes.float().unflatten(-1, (-1, group)) * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
    return values.flatten(-2)
