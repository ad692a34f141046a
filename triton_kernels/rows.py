"""Codes of rows on the device: the arithmetic of ``formats.quantise``, bit for bit.

A tile is ``[ROWS, 4, N]``: a row's elements lie along both other axes. Per row and group, with the clip threshold (the
rank-th largest magnitude, infinite without clipping):

    minmax   low, high = clamp(min x, +-threshold), clamp(max x, +-threshold)
             scale = fp16((high - low) * factor), zero = fp16(low)
    others   from the exact sums of clamped elements as integers
    code     = #{bounds n : clamp(x, +-threshold) - zero > n scale}

The threshold is found by bisecting BF16 magnitudes, ordered like the integers of their bits, between the row's
largest and the least of its N column maxima, which at least N magnitudes reach: 8 or 9 steps on Gaussian rows
instead of 15. Values are not clamped for their codes: ``_unclamped`` moves what they are compared with instead.
"""

import triton
import triton.language as tl

from sglang_kvq.formats.quantise import FP16_MAX as _FP16_MAX
from sglang_kvq.formats.quantise import LEAST_EXPONENT as _LEAST_EXPONENT
from sglang_kvq.formats.quantise import ROUND as _ROUND
from sglang_kvq.kernels.codes import bound

FP16_MAX = tl.constexpr(_FP16_MAX)
LEAST_EXPONENT = tl.constexpr(_LEAST_EXPONENT)
ROUND = tl.constexpr(_ROUND)
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def scale_zero(x, inside, limit, CODES: tl.constexpr, ALL: tl.constexpr):
    """Scale and zero, FP16 [ROWS], of a group.

    x: float32 [ROWS, 4, N], finite outside the group too; inside: which elements belong to it, unless ALL do;
    limit: float32 [ROWS]. Without a zero the second result is meaningless.
    """
    if CODES.statistic == "minmax":
        if ALL:
            low, high = tl.min(tl.min(x, 1), 1), tl.max(tl.max(x, 1), 1)  # [ROWS]
        else:
            low = tl.min(tl.min(tl.where(inside, x, float("inf")), 1), 1)
            high = tl.max(tl.max(tl.where(inside, x, float("-inf")), 1), 1)
        if CODES.clips:
            low = tl.minimum(tl.maximum(low, -limit), limit)
            high = tl.minimum(tl.maximum(high, -limit), limit)
        scale = tl.minimum((high - low) * CODES.factor, FP16_MAX).to(tl.float16)
        zero = low
    else:
        if CODES.clips:
            x = tl.minimum(tl.maximum(x, -limit[:, None, None]), limit[:, None, None])
        if not ALL:
            x = tl.where(inside, x, 0.0)
        most = tl.max(tl.max(tl.abs(x), 1), 1)
        up, down = powers(most)
        q = integers(x, up[:, None, None])
        second = tl.sum(tl.sum(q * q, 1), 1)
        if CODES.statistic == "moments":
            first = tl.sum(tl.sum(q, 1), 1)
            wide = first.to(tl.int64)
            spread = (second.to(tl.int64) * CODES.group - wide * wide).to(tl.float32)
            scale = tl.minimum(tl.sqrt_rn(spread) * CODES.factor * down, FP16_MAX).to(tl.float16)
            zero = first.to(tl.float32) * CODES.inverse * down - CODES.middle * scale.to(tl.float32)
        else:
            scale = tl.minimum(tl.sqrt_rn(second.to(tl.float32)) * CODES.factor * down, FP16_MAX).to(tl.float16)
            zero = most
    return scale, tl.minimum(tl.maximum(zero, -FP16_MAX), FP16_MAX).to(tl.float16)


@triton.jit
def powers(most):
    """2^s and 2^-s, float32, that bring a largest magnitude into [2^10, 2^11)."""
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) >> 23, LEAST_EXPONENT)
    up = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
    return up, ((exponent - 10) << 23).to(tl.float32, bitcast=True)


@triton.jit
def integers(x, up):
    """round(x up), int32, to nearest even."""
    return (x * up + ROUND).to(tl.int32, bitcast=True) - ROUND_BITS


@triton.jit
def row_codes(x, scale, zero, limit, CODES: tl.constexpr):
    """Codes of x [ROWS, 4, N] as float32, and what is above their two low bits: (codes, high), code = 4 high + low."""
    step = scale.to(tl.float32)
    if CODES.has_zero:
        zero = zero.to(tl.float32)
        offset = x - zero[:, None, None]
    else:
        offset = x
    THRESHOLDS: tl.constexpr = CODES.thresholds
    codes = _above(offset, zero, step, limit, CODES, 0)
    high = codes  # no use of it with 2 bits
    for i in tl.static_range(1, THRESHOLDS):
        above = _above(offset, zero, step, limit, CODES, i)
        codes += above
        if i == 3:
            high = above
        elif i % 4 == 3:
            high += above
    return codes, high


@triton.jit
def _above(offset, zero, step, limit, CODES: tl.constexpr, i: tl.constexpr):
    """1.0 where the clamped element lies above the i-th threshold."""
    least = bound(CODES, i) * step
    if CODES.clips:
        least = _unclamped(least, zero, limit)
    return (offset > least[:, None, None]).to(tl.float32)


@triton.jit
def _unclamped(least, zero, limit):
    """What x - zero > it says of x without clamping x to +-limit first."""
    least = tl.where(limit - zero > least, least, float("inf"))
    return tl.where(-limit - zero > least, float("-inf"), least)


@triton.jit
def clip_threshold(x, rank, LIVE: tl.constexpr, N: tl.constexpr):
    """Each row's rank-th largest magnitude, float32 [ROWS]; x float32 [ROWS, 4, N] of BF16 values, 0 from LIVE on."""
    columns = tl.maximum(tl.abs(tl.max(x, 1)), tl.abs(tl.min(x, 1)))  # [ROWS, N]
    most = tl.max(columns, 1).to(tl.int32, bitcast=True) >> 16
    columns = tl.where((tl.arange(0, N) < LIVE)[None, :], columns, float("inf"))
    least = tl.where(rank <= LIVE, tl.min(columns, 1).to(tl.int32, bitcast=True) >> 16, 0)
    open = tl.max(most - least, 0)
    while open > 0:
        middle = (least + most + 1) >> 1
        edge = (middle << 16).to(tl.float32, bitcast=True)[:, None, None]
        count = tl.sum(tl.sum((tl.abs(x) >= edge).to(tl.float32), 1), 1)
        least = tl.where(count >= rank, middle, least)
        most = tl.where(count >= rank, most, tl.maximum(middle - 1, least))
        open = open >> 1
    return (least << 16).to(tl.float32, bitcast=True)
