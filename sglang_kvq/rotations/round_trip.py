"""Quantise and dequantise rows with the server's arithmetic, for measurements that need no page."""

from __future__ import annotations

import torch

from sglang_kvq.formats.quantise import FP16_MAX, clip_rank, clip_rows, dequantise_rows, quantise_rows


def round_trip(x: torch.Tensor, bits: int, clip: float) -> torch.Tensor:
    """Rows as a reader of the cache sees them: uniform codes, one scale per min(head_dim, 128), clipped.

    Args:
        x: BF16 values ``[..., D]`` in any float dtype.
        bits: 2 or 4.
        clip: clip quantile.

    Returns:
        float32 ``[..., D]``, rounded to BF16.
    """
    group, rank = min(x.shape[-1], 128), clip_rank(x.shape[-1], clip)
    if bits == 2:
        back = dequantise_rows(*quantise_rows(x, group, rank))
    else:
        back = _uniform(clip_rows(x.float(), rank).unflatten(-1, (-1, group)), bits).flatten(-2)
    return back.bfloat16().float()


def _uniform(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Asymmetric min-max quantisation of groups ``[..., group]`` with FP16 scale and zero."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    steps = 2**bits - 1
    scale = ((high - low) / steps).clamp(max=FP16_MAX).half().float()
    zero = low.clamp(-FP16_MAX, FP16_MAX).half().float()
    codes = ((x - zero) / scale.clamp(min=1e-20)).round().clamp(0, steps)
    return codes * scale + zero
