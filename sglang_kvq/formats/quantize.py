"""Clipping and quantization of head rows: the arithmetic that every path shares.

Torch on any device and the Triton kernels (``enable_fp_fusion=False``, ``tl.sqrt_rn``) give the same codes bit for bit.
The formulas use only additions, comparisons, multiplications, correctly rounded square roots, sums of integers and
roundings to FP16. Each operation is rounded by itself, and results do not depend on the order of a sum. Per group of n
elements x (after clipping):

    minmax   scale = fp16((max x - min x) * f32(1 / top)),              offset = fp16(min x)
    moments  scale = fp16(2^-s * (sqrt(n S2 - S1^2) * f32(unit / n))),  offset = fp16(2^-s * (S1 * f32(1 / n))
                                                                          - middle * scale)
    norm     scale = fp16(2^-s * (sqrt(S2) * f32(unit / sqrt(n)))),     no offset: the levels are centred on 0
    code     = #{t in thresholds : x > offset + t * scale},               norm: #{t : x > (t - middle) * scale}
    mean     = fp16(2^-s * (S1 * f32(1 / n)))                           for centred codes, over a channel's
                                                                        n tokens of a page;
                                                                        x above is then f32(x - mean)

S1 and S2 are the exact sums of q and q^2. Here q = round(2^s x), to nearest even, with the power of two that brings the
largest |q| into [2^10, 2^11]. q and both sums fit int32 for n <= 256; n S2 - S1^2 fits int64. ``level_table`` gives
levels, thresholds, top, middle and unit. FP16 results are clamped to +-65504.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sglang_kvq.formats.code import INT2, CodeFormat
from sglang_kvq.formats.levels import LevelTable

FP16_MAX = 65504.0
#: Adding and subtracting it rounds a float32 below 2^22 to the nearest integer, ties to even.
ROUND = 12582912.0
#: Exponent that bounds the scaling of tiny rows: below 2^-40 in magnitude their FP16 scale is 0 anyway.
LEAST_EXPONENT = 127 - 40


def clip_rank(head_dim: int, ratio: float) -> int:
    """Returns how many of a row's largest magnitudes lie at or above the clip threshold (0: no clipping).

    OSCAR (arXiv 2605.17757) clips at ``sort(|x|)[int(ratio * head_dim)]``. Counted from the top, this is the
    ``head_dim - int(ratio * head_dim)``-th largest magnitude.
    """
    return head_dim - min(int(ratio * head_dim), head_dim)


def clip_rows(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Clamps each row ``[..., head_dim]`` to its ``rank``-th largest magnitude."""
    if rank == 0:
        return x
    threshold = x.abs().topk(rank, dim=-1).values[..., -1:]
    return torch.minimum(torch.maximum(x, -threshold), threshold)


def quantize_rows(
    x: torch.Tensor, group: int, rank: int, code: CodeFormat = INT2, head_dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantizes rows to codes 0 .. 2^bits - 1.

    Args:
        x: ``[..., n]``, values that float32 holds exactly: heads' rows (minus the channels' means if centred), or one
            channel's tokens for ``axis="channel"``.
        group: elements along the row per scale and offset; divides n. ``norm`` takes n.
        rank: from ``clip_rank``; whole rows are clipped.
        code: levels and statistic; the caller handles the code's axis.
        head_dim: D of a ``sphere`` table; None means n.

    Returns:
        codes uint8 ``[..., n]``, scale FP16 and offset FP16 ``[..., n // group]`` (offset is None for ``norm``);
        ``dequantize_rows`` gives the values.
    """
    table = code.table(head_dim or x.shape[-1])
    x = clip_rows(x.float(), rank).unflatten(-1, (-1, group))
    scale, offset = _STATISTICS[code.statistic](x, table)
    start, shift = (0.0, table.middle) if offset is None else (offset.float(), 0.0)
    step = scale.float()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for threshold in table.thresholds:
        # An FP16 number times a small multiple of 0.5 is exact in float32: only the sum is rounded.
        codes += x > (threshold - shift) * step + start
    return codes.flatten(-2), scale.squeeze(-1), None if offset is None else offset.squeeze(-1)


def dequantize_rows(
    codes: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    code: CodeFormat = INT2,
    head_dim: int | None = None,
) -> torch.Tensor:
    """Returns values of ``quantize_rows``'s codes, float32 ``[..., n]``: ``level * scale + offset``, rounded once."""
    table = code.table(head_dim or codes.shape[-1])
    group = codes.shape[-1] // scale.shape[-1]
    shift = 0.0 if code.has_offset else table.middle
    levels = torch.tensor(table.levels, dtype=torch.float32, device=codes.device) - shift
    chosen = levels.index_select(0, codes.flatten().int()).view(codes.shape)  # in a third of the time of levels[codes]
    values: torch.Tensor = chosen.unflatten(-1, (-1, group)) * scale.float().unsqueeze(-1)
    if offset is not None:
        values += offset.float().unsqueeze(-1)
    return values.flatten(-2)


def channel_means(x: torch.Tensor) -> torch.Tensor:
    """Averages each channel over a page's tokens ``[..., P, D]``: FP16 ``[..., D]``, independent of token order."""
    q, down = _integers(x.float().transpose(-1, -2))
    return _half(_mean(q.sum(-1, keepdim=True), x.shape[-2], down)).squeeze(-1)


def _minmax(x: torch.Tensor, table: LevelTable) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return _half((high - low) * _f32(1 / table.top)), _half(low)


def _moments(x: torch.Tensor, table: LevelTable) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.shape[-1]
    q, down = _integers(x)
    first, second = q.sum(-1, keepdim=True), (q * q).sum(-1, keepdim=True)  # int64
    deviation = _sqrt(n * second - first * first) * _f32(table.unit / n)
    scale = _half(deviation * down)
    return scale, _half(_mean(first, n, down) - table.middle * scale.float())


def _norm(x: torch.Tensor, table: LevelTable) -> tuple[torch.Tensor, None]:
    q, down = _integers(x)
    norm = _sqrt((q * q).sum(-1, keepdim=True)) * _f32(table.unit / math.sqrt(x.shape[-1]))
    return _half(norm * down), None


def _mean(first: torch.Tensor, n: int, down: torch.Tensor) -> torch.Tensor:
    return first.float() * _f32(1 / n) * down


_STATISTICS: dict[str, Callable[[torch.Tensor, LevelTable], tuple[torch.Tensor, torch.Tensor | None]]] = {
    "minmax": _minmax,
    "moments": _moments,
    "norm": _norm,
}


def _integers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q = round(2^s x) as int32, and 2^-s as float32 ``[..., 1]``, with max |q| in [2^10, 2^11]."""
    exponent = (x.abs().amax(-1, keepdim=True).view(torch.int32) >> 23).clamp(min=LEAST_EXPONENT)
    up = (264 - exponent << 23).view(torch.float32)  # 2^(10 - e), e = exponent - 127
    down = (exponent - 10 << 23).view(torch.float32)
    return (x * up + ROUND - ROUND).int(), down


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """Returns the correctly rounded square root of float32(x).

    On a CPU, torch's float32 root is MKL's, which is not correctly rounded. A float64 root within an ulp cannot round
    to the wrong float32: no float32 has a root that close to a midpoint.
    """
    return x.float().double().sqrt().float()


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP16_MAX, FP16_MAX).half()


def _f32(x: float) -> float:
    """Rounds a constant to float32, as both torch and Triton do."""
    return torch.tensor(x, dtype=torch.float32).item()
