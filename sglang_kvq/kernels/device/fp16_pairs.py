"""Pairs of FP16 numbers in a word, processed two at a time, and their conversion from BF16 pairs (``bf16_pairs``).

The first number in memory is in the lower half. Triton's interpreter has no assembly. There a pair is a tuple of two
float64 tensors, which hold the rounded numbers.
"""

import struct

import triton
import triton.language as tl

from sglang_kvq.kernels.device.bf16_pairs import high_half, low_half
from sglang_kvq.kernels.device.common import INTERPRETED

_PLAIN = tl.constexpr(INTERPRETED)
#: Two to the power of the difference between the exponent biases of BF16 and FP16.
_UP = tl.constexpr(2.0 ** (127 - 15))
#: Constant that, added and subtracted again, rounds a float64 to steps of 2^-21.
_ROUND = tl.constexpr(1.5 * 2.0 ** (52 - 21))


@triton.constexpr_function
def twice(x):
    """Returns a word with a number's FP16 bits in both halves."""
    return struct.Struct("<I").unpack(struct.Struct("<2e").pack(x, x))[0]


@triton.constexpr_function
def half(x):
    """Returns the number rounded to FP16."""
    return struct.Struct("<e").unpack(struct.Struct("<e").pack(x))[0]


@triton.jit
def number(X: tl.constexpr):
    """Returns a pair with one constant in both halves; it broadcasts to any shape."""
    if _PLAIN:
        return half(X), half(X)
    else:
        return tl.full([1, 1], twice(X), tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def both(x):
    """Returns pairs with a float32 number, rounded to FP16, in both halves."""
    if _PLAIN:
        return _rounded(x, x)
    else:
        return _joined(x, x)


@triton.jit
def words_of(pair):
    """Returns pairs as words, int32, with the bits of both numbers."""
    if _PLAIN:
        return _joined(pair[0], pair[1])
    else:
        return pair


@triton.jit
def either(condition, a, b):
    """Returns a where the condition holds, b elsewhere."""
    if _PLAIN:
        return tl.where(condition, a[0], b[0]), tl.where(condition, a[1], b[1])
    else:
        return tl.where(condition, a, b)


@triton.jit
def fma(a, b, c, SATURATED: tl.constexpr = False):
    """Returns a b + c, rounded once; with SATURATED, clamped to 0 .. 1, and 0 for NaN."""
    if _PLAIN:
        low, high = a[0] * b[0] + c[0], a[1] * b[1] + c[1]
        if SATURATED:
            low, high = tl.minimum(tl.maximum(low, 0.0), 1.0), tl.minimum(tl.maximum(high, 0.0), 1.0)
        return _rounded(low, high)
    elif SATURATED:
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def times(a, b):
    """Returns a b, rounded."""
    if _PLAIN:
        return _rounded(a[0] * b[0], a[1] * b[1])
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def scaled(pair, exponent, PACKED: tl.constexpr):
    """Converts BF16 pairs to FP16 pairs times 2^(exponent - 15), or 0 if exponent is 0; small values in steps of 2^-21.

    exponent: int32, from 0 to 254; results are below 2^16. Infinity and NaN become NaN if it is 0. A multiplication in
    BF16 brings exponents into FP16's range. A shift by three bits then moves exponent and significand to where FP16 has
    them. PACKED is ``common.has_pairs``.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x; abs.bf16x2 x, $1; mul.rn.bf16x2 x, x, $2; shl.b32 x, x, 3;"
            " lop3.b32 $0, x, $1, 0x80008000, 0xF8; }",  # x | ($1 & 0x80008000)
            "=r,r,r",
            [pair, (exponent << 7) * 0x10001],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        factor = (exponent << 23).to(tl.float32, bitcast=True) * _UP
        low, high = _stepped(low_half(pair) * factor), _stepped(high_half(pair) * factor)
        if _PLAIN:
            return low, high
        else:
            return _joined(low, high)


@triton.jit
def _stepped(x):
    """Rounds to steps of 2^-21, float64."""
    return (x.to(tl.float64) + _ROUND) - _ROUND


@triton.jit
def _joined(low, high):
    """Rounds two numbers to FP16 and joins them to a word."""
    low = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _rounded(low, high):
    """Rounds two numbers to FP16 values, held in float64."""
    return low.to(tl.float16).to(tl.float64), high.to(tl.float16).to(tl.float64)
