"""Pairs of BF16 numbers in a word, processed two at a time: a comparison costs half an instruction.

A comparison returns *ones*, words whose halves are 0 or 1, which are then added up. PACKED says that the device has
instructions for pairs (``common.has_pairs``). If so, ones and their sums are BF16 numbers, added in pairs too. If not,
they are integers, and the halves are compared one by one as float32, which is exact.
"""

import triton
import triton.language as tl

#: Pairs of infinity and of minus infinity.
INFINITY = tl.constexpr(0x7F807F80)
MINUS_INFINITY = tl.constexpr(0xFF80FF80 - 2**32)
#: Pair of 128: the sum of 128 and a whole number below 128 has that number in its last bits.
_WHOLE = tl.constexpr(0x43004300)
_LOW = tl.constexpr(0xFFFF)
_HIGH = tl.constexpr(-0x10000)


@triton.jit
def low_half(pair):
    """Returns the number in the lower half, the first in memory, as float32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(pair):
    return (pair & _HIGH).to(tl.float32, bitcast=True)


@triton.jit
def magnitudes(pair):
    return pair & 0x7FFF7FFF


@triton.jit
def pair_max(a, b, PACKED: tl.constexpr):
    if PACKED:
        return _max(a, b)
    else:
        return _join(tl.maximum(low_half(a), low_half(b)), tl.maximum(high_half(a), high_half(b)))


@triton.jit
def pair_min(a, b, PACKED: tl.constexpr):
    if PACKED:
        return _min(a, b)
    else:
        return _join(tl.minimum(low_half(a), low_half(b)), tl.minimum(high_half(a), high_half(b)))


@triton.jit
def row_max(pairs, PACKED: tl.constexpr):
    """Returns the largest number of a row: float32 [ROWS]."""
    if PACKED:
        both = tl.reduce(pairs, 1, _max)
        return tl.maximum(low_half(both), high_half(both))
    else:
        return tl.max(tl.maximum(low_half(pairs), high_half(pairs)), 1)


@triton.jit
def row_largest(sizes, PACKED: tl.constexpr):
    """Returns the largest of a row's magnitudes, as bits of a float32: int32 [ROWS]. NaN is larger than any number."""
    if PACKED:
        both = tl.reduce(sizes, 1, _max_or_nan)
        return tl.maximum(both << 16, both & _HIGH)
    else:
        return tl.max(tl.maximum(sizes & _LOW, sizes >> 16), 1) << 16


@triton.jit
def row_min(pairs, PACKED: tl.constexpr):
    if PACKED:
        both = tl.reduce(pairs, 1, _min)
        return tl.minimum(low_half(both), high_half(both))
    else:
        return tl.min(tl.minimum(low_half(pairs), high_half(pairs)), 1)


@triton.jit
def above(pair, bound, PACKED: tl.constexpr):
    """Returns ones where a number is above ``bound``, any float32."""
    if PACKED:
        return _instruction("set.gt.bf16x2.bf16x2 $0, $1, $2;", pair, round_down(bound))
    else:
        return (low_half(pair) > bound).to(tl.int32) + ((high_half(pair) > bound).to(tl.int32) << 16)


@triton.jit
def round_down(bound):
    """Rounds ``bound`` down to BF16 and returns it in both halves; BF16 numbers above it are above ``bound``."""
    bits = bound.to(tl.int32, bitcast=True)
    bits += (bits >> 31) & _LOW  # magnitudes of negative numbers are rounded up
    return (bits & _HIGH) | ((bits >> 16) & _LOW)


@triton.jit
def at_least(size, edge, PACKED: tl.constexpr):
    """Returns ones where a magnitude is at least ``edge``, a BF16 number's bits, int32; bits order like magnitudes."""
    if PACKED:
        return _instruction("set.ge.bf16x2.bf16x2 $0, $1, $2;", size, edge * 0x10001)
    else:
        return ((size & _LOW) >= edge).to(tl.int32) + (((size >> 16) >= edge).to(tl.int32) << 16)


@triton.jit
def plus(a, b, PACKED: tl.constexpr):
    """Adds two sums of ones; a half can hold at most 256."""
    if PACKED:
        return _add(a, b)
    else:
        return a + b


@triton.jit
def count(ones, PACKED: tl.constexpr):
    """Counts the ones of a row: float32 [ROWS]."""
    if PACKED:
        both = tl.reduce(ones, 1, _add)
        return low_half(both) + high_half(both)
    else:
        both = tl.sum(ones, 1)
        return ((both & _LOW) + (both >> 16)).to(tl.float32)


@triton.jit
def none(SHAPE: tl.constexpr, PACKED: tl.constexpr):
    """Returns the value at which a sum of up to 15 ones starts, if ``integers_of`` is to read the sum."""
    return tl.full(SHAPE, _WHOLE if PACKED else 0, tl.int32)


@triton.jit
def integers_of(ones):
    """Converts a sum of ones that started at ``none`` to integers in the halves of a word."""
    return ones & 0xF000F


@triton.jit
def _join(low, high):
    """Joins two float32 numbers, exact in BF16, to a pair."""
    return ((low.to(tl.int32, bitcast=True) >> 16) & _LOW) | (high.to(tl.int32, bitcast=True) & _HIGH)


@triton.jit
def _max(a, b):
    return _instruction("max.bf16x2 $0, $1, $2;", a, b)


@triton.jit
def _max_or_nan(a, b):
    return _instruction("max.NaN.bf16x2 $0, $1, $2;", a, b)


@triton.jit
def _min(a, b):
    return _instruction("min.bf16x2 $0, $1, $2;", a, b)


@triton.jit
def _add(a, b):
    return _instruction("add.rn.bf16x2 $0, $1, $2;", a, b)


@triton.jit
def _instruction(asm: tl.constexpr, a, b):
    return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
