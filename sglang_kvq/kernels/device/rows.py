"""Codes of rows on the device: the arithmetic of ``formats.quantize``, bit for bit.

Rows of BF16 numbers come as four *planes*, words [ROWS, N]. The halves of word n are dim ``plane * D/4 + 2 n`` and the
next one (``bf16_pairs``). If statistics need float32, and for centred rows, a plane's halves are separate float32
tensors. Codes are integers in the halves of words, too.

Per row and group, with the clip threshold (the rank-th largest magnitude, infinite without clipping):

    minmax   low, high = clamp(min x, +-threshold), clamp(max x, +-threshold)
             scale = fp16((high - low) * factor), offset = fp16(low)
    others   from exact sums of the clamped elements, as integers
    code     = #{bounds n : clamp(x, +-threshold) > offset + n scale}

The threshold is found by bisecting BF16 magnitudes, ordered like the integers of their bits. The upper bound is the
row's largest magnitude. The lower bound is the least of the maxima of its D/4 columns, because at least D/4 magnitudes
reach it. This takes 8 or 9 steps on Gaussian rows instead of 15. Values are not clamped before they are compared:
``threshold`` moves the bounds instead.
"""

import triton
import triton.language as tl

from sglang_kvq.formats.quantize import FP16_MAX as _FP16_MAX
from sglang_kvq.formats.quantize import LEAST_EXPONENT as _LEAST_EXPONENT
from sglang_kvq.formats.quantize import ROUND as _ROUND
from sglang_kvq.kernels.device.bf16_pairs import (
    INFINITY,
    MINUS_INFINITY,
    above,
    at_least,
    count,
    high_half,
    integers_of,
    low_half,
    magnitudes,
    none,
    pair_max,
    pair_min,
    plus,
    row_max,
    row_min,
)
from sglang_kvq.kernels.device.codes import bound

FP16_MAX = tl.constexpr(_FP16_MAX)
LEAST_EXPONENT = tl.constexpr(_LEAST_EXPONENT)
ROUND = tl.constexpr(_ROUND)
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def scale_offset(x, means, limit, g: tl.constexpr, CODES: tl.constexpr, D4: tl.constexpr, PACKED: tl.constexpr):
    """Returns scale and offset, FP16 [ROWS], of the rows' group g. Without an offset the second result is meaningless.

    x: four planes; means: see ``halves``; limit: the clip threshold, float32 [ROWS].
    """
    FIRST: tl.constexpr = g * CODES.group // D4
    END: tl.constexpr = ((g + 1) * CODES.group - 1) // D4 + 1
    if CODES.statistic == "minmax" and not CODES.centred:
        least = _in_group(x[FIRST], FIRST, g, INFINITY, CODES.group, D4)
        most = _in_group(x[FIRST], FIRST, g, MINUS_INFINITY, CODES.group, D4)
        for p in tl.static_range(FIRST + 1, END):
            least = pair_min(least, _in_group(x[p], p, g, INFINITY, CODES.group, D4), PACKED)
            most = pair_max(most, _in_group(x[p], p, g, MINUS_INFINITY, CODES.group, D4), PACKED)
        return from_extremes(row_min(least, PACKED), row_max(most, PACKED), limit, CODES)
    elif CODES.statistic == "minmax":
        low, high = tl.full(x[0].shape, float("inf"), tl.float32), tl.full(x[0].shape, float("-inf"), tl.float32)
        for p in tl.static_range(FIRST, END):
            a, b = halves(x, means, p, CODES)
            low = tl.minimum(low, _in_group(tl.minimum(a, b), p, g, float("inf"), CODES.group, D4))
            high = tl.maximum(high, _in_group(tl.maximum(a, b), p, g, float("-inf"), CODES.group, D4))
        return from_extremes(tl.min(low, 1), tl.max(high, 1), limit, CODES)
    else:
        most = tl.zeros(x[0].shape, tl.float32)
        for p in tl.static_range(FIRST, END):
            a, b = _clamped(x, means, limit, p, g, CODES, D4)
            most = tl.maximum(most, tl.maximum(tl.abs(a), tl.abs(b)))
        up, down = powers(tl.max(most, 1))
        first, second = tl.zeros(x[0].shape, tl.int32), tl.zeros(x[0].shape, tl.int32)
        for p in tl.static_range(FIRST, END):
            a, b = _clamped(x, means, limit, p, g, CODES, D4)
            a, b = integers(a, up[:, None]), integers(b, up[:, None])
            first += a + b
            second += a * a + b * b
        return from_sums(tl.sum(first, 1), tl.sum(second, 1), down, CODES)


@triton.jit
def from_extremes(low, high, limit, CODES: tl.constexpr):
    """Returns scale and offset of ``minmax``, FP16, from the least and the largest element, float32."""
    if CODES.clips:
        low = tl.minimum(tl.maximum(low, -limit), limit)
        high = tl.minimum(tl.maximum(high, -limit), limit)
    return to_half((high - low) * CODES.factor), to_half(low)


@triton.jit
def from_sums(first, second, down, CODES: tl.constexpr):
    """Returns scale and offset of ``moments`` and ``norm``, FP16, from int32 sums of ``integers`` and their squares."""
    if CODES.statistic == "moments":
        wide = first.to(tl.int64)
        spread = (second.to(tl.int64) * CODES.group - wide * wide).to(tl.float32)
        scale = to_half(tl.sqrt_rn(spread) * CODES.factor * down)
        return scale, to_half(first.to(tl.float32) * CODES.inverse * down - CODES.middle * scale.to(tl.float32))
    else:
        scale = to_half(tl.sqrt_rn(second.to(tl.float32)) * CODES.factor * down)
        return scale, scale


@triton.jit
def to_half(x):
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX).to(tl.float16)


@triton.jit
def powers(most):
    """Returns 2^s and 2^-s, float32; 2^s brings the largest magnitude, ``most``, into [2^10, 2^11)."""
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) >> 23, LEAST_EXPONENT)
    up = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
    return up, ((exponent - 10) << 23).to(tl.float32, bitcast=True)


@triton.jit
def integers(x, up):
    """Returns round(x up), int32, to nearest even."""
    return (x * up + ROUND).to(tl.int32, bitcast=True) - ROUND_BITS


@triton.jit
def halves(x, means, p: tl.constexpr, CODES: tl.constexpr):
    """Returns a plane's lower and upper halves, float32, minus their channels' means if they are centred.

    means: of every plane's lower and upper halves, eight float32 [N]; None if they are not centred.
    """
    low, high = low_half(x[p]), high_half(x[p])
    if CODES.centred:
        return low - means[2 * p][None, :], high - means[2 * p + 1][None, :]
    else:
        return low, high


@triton.jit
def _clamped(x, means, limit, p: tl.constexpr, g: tl.constexpr, CODES: tl.constexpr, D4: tl.constexpr):
    """Returns a plane's clamped halves, 0 outside the group."""
    low, high = halves(x, means, p, CODES)
    if CODES.clips:
        low = tl.minimum(tl.maximum(low, -limit[:, None]), limit[:, None])
        high = tl.minimum(tl.maximum(high, -limit[:, None]), limit[:, None])
    return _in_group(low, p, g, 0.0, CODES.group, D4), _in_group(high, p, g, 0.0, CODES.group, D4)


@triton.jit
def _in_group(x, p: tl.constexpr, g: tl.constexpr, other, GROUP: tl.constexpr, D4: tl.constexpr):
    """Replaces a plane's dims that are not in group g by ``other``; the plane must have dims of the group."""
    if 2 * x.shape[1] == D4 and p * D4 >= g * GROUP and (p + 1) * D4 <= (g + 1) * GROUP:
        return x
    else:
        j = 2 * tl.arange(0, x.shape[1])
        return tl.where(((j < D4) & ((p * D4 + j) // GROUP == g))[None, :], x, other)


@triton.jit
def plane_codes(
    codes, x, means, scale, offset, limit, p: tl.constexpr, g: tl.constexpr,
    CODES: tl.constexpr, D4: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Computes a plane's codes of group g, integers in the halves of words; takes the other groups' from ``codes``."""
    GROUP: tl.constexpr = CODES.group
    if p * D4 >= (g + 1) * GROUP or (p + 1) * D4 <= g * GROUP:
        return codes
    step, start = scale.to(tl.float32), offset.to(tl.float32)
    THRESHOLDS: tl.constexpr = CODES.thresholds
    if CODES.centred:
        a, b = halves(x, means, p, CODES)
        low, high = tl.zeros(a.shape, tl.float32), tl.zeros(a.shape, tl.float32)
        for i in tl.static_range(THRESHOLDS):
            least = threshold(step, start, limit, i, CODES)[:, None]
            low += (a > least).to(tl.float32)
            high += (b > least).to(tl.float32)
        mine = low.to(tl.int32) | (high.to(tl.int32) << 16)
    else:
        ones = none(x[p].shape, PACKED)
        for i in tl.static_range(THRESHOLDS):
            ones = plus(ones, above(x[p], threshold(step, start, limit, i, CODES)[:, None], PACKED), PACKED)
        mine = integers_of(ones)
    return _in_group(mine, p, g, codes, GROUP, D4)


@triton.jit
def threshold(step, offset, limit, i: tl.constexpr, CODES: tl.constexpr):
    """Returns the bound that an unclamped element exceeds exactly if the clamped one exceeds the i-th threshold."""
    least = bound(CODES, i) * step
    if CODES.has_offset:
        least += offset
    if CODES.clips:
        least = tl.where(limit > least, least, float("inf"))
        least = tl.where(-limit > least, float("-inf"), least)
    return least


@triton.jit
def clip_threshold(x, rank, D4: tl.constexpr, PACKED: tl.constexpr):
    """Returns each row's rank-th largest magnitude, float32 [ROWS]; x are four planes, 0 beyond a row's end."""
    N: tl.constexpr = x[0].shape[1]
    x0, x1, x2, x3 = magnitudes(x[0]), magnitudes(x[1]), magnitudes(x[2]), magnitudes(x[3])
    columns = pair_max(pair_max(x0, x1, PACKED), pair_max(x2, x3, PACKED), PACKED)
    most = row_max(columns, PACKED).to(tl.int32, bitcast=True) >> 16
    columns = tl.where((2 * tl.arange(0, N) < D4)[None, :], columns, INFINITY)
    least = tl.where(rank <= D4, row_min(columns, PACKED).to(tl.int32, bitcast=True) >> 16, 0)
    open = tl.max(most - least, 0)
    while open > 0:
        middle = (least + most + 1) >> 1
        edge = middle[:, None]
        ones = plus(at_least(x0, edge, PACKED), at_least(x1, edge, PACKED), PACKED)
        more = plus(at_least(x2, edge, PACKED), at_least(x3, edge, PACKED), PACKED)
        enough = count(plus(ones, more, PACKED), PACKED) >= rank
        least = tl.where(enough, middle, least)
        most = tl.where(enough, most, tl.maximum(middle - 1, least))
        open = open >> 1
    return (least << 16).to(tl.float32, bitcast=True)
