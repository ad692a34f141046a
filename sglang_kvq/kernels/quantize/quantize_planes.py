"""Quantization of BF16 rows to codes of planes and gains: the arithmetic of ``formats.planes``, bit for bit.

As in ``quantize_pages``, a work item is TOKENS tokens of a page, one KV head, keys or values. A plane's rows are words
[TOKENS, WORDS] of two adjacent elements: first the BF16 input (``bf16_pairs``), then FP16 (``fp16_pairs``). An
instruction processes two such numbers. Codes and the bits of columns are in the halves of words, too.
"""

import triton
import triton.language as tl

from sglang_kvq.formats.planes import BELOW as _BELOW
from sglang_kvq.formats.planes import ERRORS as _ERRORS
from sglang_kvq.formats.planes import GAIN_BIAS as _GAIN_BIAS
from sglang_kvq.formats.planes import MAGIC as _MAGIC
from sglang_kvq.formats.planes import TOO_LARGE as _TOO_LARGE
from sglang_kvq.formats.planes import UNITS as _UNITS
from sglang_kvq.kernels.device.bf16_pairs import magnitudes, row_largest
from sglang_kvq.kernels.device.common import PAGE, key_row
from sglang_kvq.kernels.device.fp16_pairs import both, either, fma, number, scaled, times, twice, words_of
from sglang_kvq.kernels.device.plane_codes import (
    bits_of,
    cell_count,
    field_count,
    is_coded,
    plane_of,
    runs_of,
    shares_of,
    shift_of,
    start_of,
)

BELOW = tl.constexpr(_BELOW)
GAIN_BIAS = tl.constexpr(_GAIN_BIAS)
TOO_LARGE = tl.constexpr(_TOO_LARGE)
#: Bits of infinity in float32; those of a NaN are larger.
INFINITY = tl.constexpr(0x7F800000)
#: Exponent of the float32 number UNITS, in the units of a gain's byte (see ``GAIN_BIAS``).
_UNITS_BIAS = tl.constexpr(int(_UNITS).bit_length() - 1 + 127 << 3)
#: Constant that rounds FP16 codes, when added, to integers in the last bits; then its bits, twice in a word.
MAGIC = tl.constexpr(_MAGIC)
_MAGIC_BITS = twice(_MAGIC)
#: The same constant and bits for errors, which become integers from 0 to ERRORS.
ERRORS = tl.constexpr(_ERRORS)
ERROR_BITS = tl.constexpr(twice(_ERRORS))


@triton.jit
def quantize_plane_keys(
    k, k_token, record, part, CODES: tl.constexpr, SHAPE: tl.constexpr, TOKENS: tl.constexpr, PACKED: tl.constexpr
):
    """Quantizes TOKENS tokens of a page's keys, see ``_tokens``."""
    i, n = tl.arange(0, TOKENS), tl.arange(0, SHAPE.WORDS)[None, :]
    token = _tokens(i, part, CODES, TOKENS)
    codes, gains = _row_codes(k + token[:, None] * k_token, CODES, SHAPE, TOKENS, PACKED)
    tl.store(record + CODES.gains + token, gains)
    pairs = record.to(tl.pointer_type(tl.uint16))  # of bytes
    for c in tl.static_range(cell_count(CODES)):
        bytes = _shared(_column_bits(codes, c, CODES), c, CODES)
        row = key_row(_tokens(tl.arange(0, TOKENS // shares_of(CODES, c)), part, CODES, TOKENS))
        out = pairs + start_of(CODES, c) // 2 + row[:, None] * (SHAPE.D4 // 2) + n
        tl.store(out, (bytes | (bytes >> 8)).to(tl.uint16), mask=(n < SHAPE.D4 // 2) & (row >= 0)[:, None])


@triton.jit
def quantize_plane_values(
    v, v_token, record, part, CODES: tl.constexpr, SHAPE: tl.constexpr, TOKENS: tl.constexpr, PACKED: tl.constexpr
):
    """Quantizes TOKENS tokens of a page's values; a cell is stored by quarter of the page, column and token."""
    QUARTER: tl.constexpr = PAGE // 4
    i, half = tl.arange(0, TOKENS), tl.arange(0, 2)[None, None, :]
    j = 2 * tl.arange(0, SHAPE.WORDS)[None, :, None] + half
    token = _tokens(i, part, CODES, TOKENS)
    codes, gains = _row_codes(v + token[:, None] * v_token, CODES, SHAPE, TOKENS, PACKED)
    tl.store(record + CODES.gains + token, gains)
    for c in tl.static_range(cell_count(CODES)):
        bytes = _shared(_column_bits(codes, c, CODES), c, CODES)
        bytes = (bytes[:, :, None] >> (half * 16)).to(tl.uint8)
        first = _tokens(tl.arange(0, TOKENS // shares_of(CODES, c)), part, CODES, TOKENS)
        out = record + start_of(CODES, c) + (first // QUARTER * (SHAPE.D4 * QUARTER) + first % QUARTER)[:, None, None]
        tl.store(out + j * QUARTER, bytes, mask=(j < SHAPE.D4) & (first >= 0)[:, None, None])


@triton.jit
def _tokens(i, part, CODES: tl.constexpr, TOKENS: tl.constexpr):
    """Returns the tokens of the page that a program processes: equally many from each of ``runs_of`` runs.

    No tokens of a run share a byte. There are two runs, or four if four tokens share a byte. Indices i of tokens that
    share a byte are TOKENS / shares apart.
    """
    RUNS: tl.constexpr = runs_of(CODES)
    RUN: tl.constexpr = TOKENS // RUNS
    return i // RUN * (PAGE // RUNS) + part * RUN + i % RUN


@triton.jit
def _shared(bits, CELL: tl.constexpr, CODES: tl.constexpr):
    """Joins the bits of tokens that share a byte of the cell; bits: int32 [TOKENS, WORDS]."""
    SHARES: tl.constexpr = shares_of(CODES, CELL)
    if SHARES == 1:
        return bits
    else:
        BYTES: tl.constexpr = bits.shape[0] // SHARES
        shift = tl.arange(0, bits.shape[0]) // BYTES * bits_of(CODES, CELL)
        return tl.sum(tl.reshape(bits << shift[:, None], [SHARES, BYTES, bits.shape[1]]), 0)


@triton.jit
def _column_bits(codes, CELL: tl.constexpr, CODES: tl.constexpr):
    """Joins every column's codes from ``_row_codes`` to the bits of a cell, in the halves of words."""
    bits = tl.zeros(codes[0].shape, tl.int32) - offset(CODES, CELL)
    for f in tl.static_range(field_count(CODES, CELL)):
        bits += codes[plane_of(CODES, CELL, f)] << shift_of(CODES, CELL, f)
    return bits


@triton.jit
def _row_codes(rows, CODES: tl.constexpr, SHAPE: tl.constexpr, TOKENS: tl.constexpr, PACKED: tl.constexpr):
    """Returns MAGIC plus the four planes' codes, FP16 pairs, and gains' bytes, uint8 [TOKENS]; rows: [TOKENS, 1].

    Callers first join a column's codes and then subtract what MAGIC added (``offset``), for all codes at once.
    """
    x = ()
    for p in tl.static_range(4):
        x += (_load_plane(rows, p, CODES, SHAPE, TOKENS),)
    least = _least_gain(x, CODES, PACKED)
    exponent = (TOO_LARGE >> 3) - (least >> 3)  # of UNITS / u, and 0 for rows stored as zeros
    least = tl.where(least < TOO_LARGE, least, 0)
    units = ()
    for p in tl.static_range(4):
        units += (scaled(x[p], exponent[:, None], PACKED),)
    first = tl.minimum(least, 255)
    second = tl.maximum(first - BELOW, 0)
    gain, other = _gain(first, least), _gain(second, least)
    inverse, finer = both(1.0 / gain[:, None]), both(1.0 / other[:, None])
    error = _error(units, inverse, False, CODES, SHAPE) * (gain * gain)
    better = _error(units, finer, True, CODES, SHAPE) * (other * other) < error
    inverse = either(better[:, None], finer, inverse)
    codes = ()
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            inside = fma(units[p], _step(inverse, p, CODES), number(0.5), True)
            codes += (words_of(fma(inside, number(most(CODES, p)), number(MAGIC))),)
        else:
            codes += (x[p],)
    return codes, tl.where(better, second, first).to(tl.uint8)


@triton.jit
def _load_plane(rows, p: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr, TOKENS: tl.constexpr):
    """Loads a plane of rows at [TOKENS, 1], BF16 pairs; 0 beyond its end, and if the plane has no codes."""
    N: tl.constexpr = SHAPE.WORDS
    n = tl.arange(0, N)[None, :]
    words = (rows + p * SHAPE.D4).to(tl.pointer_type(tl.int32)) + n
    if not is_coded(CODES, p):
        return tl.zeros([TOKENS, N], tl.int32)
    elif 2 * N == SHAPE.D4:
        return tl.load(words)
    else:
        return tl.load(words, mask=2 * n < SHAPE.D4, other=0)


@triton.jit
def _least_gain(x, CODES: tl.constexpr, PACKED: tl.constexpr):
    """Returns the byte of the least gain that clips nothing, int32 [TOKENS]; it may exceed 255, up to TOO_LARGE.

    Magnitudes order like their bits, with infinity and NaN above all numbers.
    """
    reach = 0
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            largest = row_largest(magnitudes(x[p]), PACKED).to(tl.float32, bitcast=True) * reach_of(CODES, p)
            reach = tl.maximum(reach, largest.to(tl.int32, bitcast=True))
    reach = tl.minimum(reach, INFINITY)
    return tl.minimum(tl.maximum(((reach + 0xFFFFF) >> 20) - GAIN_BIAS, 0), TOO_LARGE)


@triton.jit
def _gain(stored, least):
    """Returns G (``formats.planes``) of gains' bytes, float32."""
    return ((stored - (least & ~7) + _UNITS_BIAS) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _step(inverse, p: tl.constexpr, CODES: tl.constexpr):
    """Returns a_p of ``formats.planes``, given fp16(1/G)."""
    if most(CODES, p) == 1.0:
        return inverse
    else:
        return times(inverse, number(1 / most(CODES, p)))


@triton.jit
def _error(units, inverse, CLIPS: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Returns E / G^2 of rows, float32 [TOKENS]: exact, because it is a sum of integers."""
    total = number(0.0)
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            step = _step(inverse, p, CODES)
            wanted = fma(units[p], step, number(0.5))
            inside = fma(units[p], step, number(0.5), True) if CLIPS else wanted
            code = fma(inside, number(most(CODES, p)), number(MAGIC))
            minus = fma(code, number(-1 / cap(CODES)), number(MAGIC / cap(CODES)))
            error = fma(wanted, number(most(CODES, p) / cap(CODES)), minus)
            total = fma(error, error, total, is_last(CODES, p))
    total = words_of(fma(total, number(ERRORS), number(ERRORS))) - ERROR_BITS
    if 2 * SHAPE.WORDS != SHAPE.D4:
        total = tl.where((2 * tl.arange(0, SHAPE.WORDS) < SHAPE.D4)[None, :], total, 0)
    total = tl.sum(total, 1)
    return ((total & 0xFFFF) + (total >> 16)).to(tl.float32)


@triton.constexpr_function
def offset(codes, cell):
    """Returns what MAGIC adds to a cell's joined bits, modulo 2^32, as an int32."""
    found = sum(_MAGIC_BITS << f.shift for f in codes.cells[cell].fields)
    return (found + 2**31) % 2**32 - 2**31


@triton.constexpr_function
def most(codes, plane):
    """Returns a plane's largest code."""
    return float(2 ** codes.widths[plane] - 1)


@triton.constexpr_function
def cap(codes):
    """Returns ``PlaneCode.cap``."""
    return codes.cap


@triton.constexpr_function
def is_last(codes, plane):
    """Tells if no plane after this one has codes."""
    return not any(codes.widths[plane + 1 :])


@triton.constexpr_function
def reach_of(codes, plane):
    """Returns the least gain that does not clip an element of magnitude 1 in this plane."""
    return 2.0 ** (1 - codes.widths[plane])
