"""Quantize and dequantize rows with the server's arithmetic, for measurements that need no page."""

from __future__ import annotations

import torch

from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.quantize import clip_rank, dequantize_rows, quantize_rows


def round_trip(x: torch.Tensor, bits: int, clip: float) -> torch.Tensor:
    """Rows as a reader of the cache sees them: uniform codes per token, one scale per min(head_dim, 128), clipped.

    Args:
        x: BF16 values ``[..., D]`` in any float dtype.
        bits: of a code, one of ``formats.code.BITS``.
        clip: clip quantile.

    Returns:
        float32 ``[..., D]``, rounded to BF16.
    """
    code, dim = CodeFormat(bits=bits), x.shape[-1]
    codes, scale, zero = quantize_rows(x, min(dim, 128), clip_rank(dim, clip), code)
    return dequantize_rows(codes, scale, zero, code).bfloat16().float()
