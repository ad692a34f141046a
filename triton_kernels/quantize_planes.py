"""Rows of BF16 to codes of planes and gains: the arithmetic of ``formats.planes``, bit for bit.

A work item is ``quantize``'s: TOKENS tokens of a page, one KV head, keys or values; its rows in float32, a tensor for
each plane.
"""

import triton
import triton.language as tl

from sglang_kvq.formats.planes import CANDIDATES as _CANDIDATES
from sglang_kvq.formats.planes import GAIN_BIAS as _GAIN_BIAS
from sglang_kvq.formats.planes import MOST_ERROR as _MOST_ERROR
from sglang_kvq.formats.planes import UNITS as _UNITS
from sglang_kvq.kernels.common import INTERPRETED, PAGE, key_row
from sglang_kvq.kernels.int8 import MAGIC, MAGIC_BITS
from sglang_kvq.kernels.planes import (
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

_PLAIN = tl.constexpr(INTERPRETED)
_MAGIC_BITS = MAGIC_BITS.value
CANDIDATES = tl.constexpr(len(_CANDIDATES))
UNITS = tl.constexpr(_UNITS)
MOST_ERROR = tl.constexpr(_MOST_ERROR)
GAIN_BIAS = tl.constexpr(_GAIN_BIAS)


@triton.jit
def quantize_plane_keys(k, k_token, record, part, CODES: tl.constexpr, SHAPE: tl.constexpr, TOKENS: tl.constexpr):
    """TOKENS tokens of a page's keys, see ``_tokens``."""
    i, j = tl.arange(0, TOKENS), tl.arange(0, SHAPE.JP)[None, :]
    token = _tokens(i, part, CODES, TOKENS)
    codes, gains = _row_codes(k + token[:, None] * k_token, CODES, SHAPE, TOKENS)
    tl.store(record + CODES.gains + token, gains)
    for c in tl.static_range(cell_count(CODES)):
        bytes = _shared(_column_bits(codes, c, CODES), c, CODES)
        row = key_row(_tokens(tl.arange(0, TOKENS // shares_of(CODES, c)), part, CODES, TOKENS))
        out = record + start_of(CODES, c) + row[:, None] * SHAPE.D4 + j
        tl.store(out, bytes.to(tl.uint8), mask=(j < SHAPE.D4) & (row >= 0)[:, None])


@triton.jit
def quantize_plane_values(v, v_token, record, part, CODES: tl.constexpr, SHAPE: tl.constexpr, TOKENS: tl.constexpr):
    """As many tokens of a page's values, likewise; a token's column is one byte among its plane of tokens'."""
    QUARTER: tl.constexpr = PAGE // 4
    i, j = tl.arange(0, TOKENS), tl.arange(0, SHAPE.JP)[None, :]
    token = _tokens(i, part, CODES, TOKENS)
    codes, gains = _row_codes(v + token[:, None] * v_token, CODES, SHAPE, TOKENS)
    tl.store(record + CODES.gains + token, gains)
    for c in tl.static_range(cell_count(CODES)):
        bytes = _shared(_column_bits(codes, c, CODES), c, CODES)
        first = _tokens(tl.arange(0, TOKENS // shares_of(CODES, c)), part, CODES, TOKENS)
        out = record + start_of(CODES, c) + (first // QUARTER * (SHAPE.D4 * QUARTER) + first % QUARTER)[:, None]
        tl.store(out + j * QUARTER, bytes.to(tl.uint8), mask=(j < SHAPE.D4) & (first >= 0)[:, None])


@triton.jit
def _tokens(i, part, CODES: tl.constexpr, TOKENS: tl.constexpr):
    """The page's tokens that are a program's i: as many from each run of tokens that share no byte.

    There are two runs at least, four where four tokens share one; what shares a byte is TOKENS / shares apart here.
    """
    RUNS: tl.constexpr = runs_of(CODES)
    RUN: tl.constexpr = TOKENS // RUNS
    return i // RUN * (PAGE // RUNS) + part * RUN + i % RUN


@triton.jit
def _shared(bits, CELL: tl.constexpr, CODES: tl.constexpr):
    """A cell's bits of a program's tokens, int32 [TOKENS, JP], with those that share a byte put together."""
    SHARES: tl.constexpr = shares_of(CODES, CELL)
    if SHARES == 1:
        return bits
    else:
        BYTES: tl.constexpr = bits.shape[0] // SHARES
        shift = tl.arange(0, bits.shape[0]) // BYTES * bits_of(CODES, CELL)
        return tl.sum(tl.reshape(bits << shift[:, None], [SHARES, BYTES, bits.shape[1]]), 0)


@triton.jit
def _column_bits(steps, CELL: tl.constexpr, CODES: tl.constexpr):
    """A cell's bits of every column, int32, of ``_row_codes``."""
    bits = tl.zeros(steps[0].shape, tl.int32) - offset(CODES, CELL)
    for f in tl.static_range(field_count(CODES, CELL)):
        bits += steps[plane_of(CODES, CELL, f)] << shift_of(CODES, CELL, f)
    return bits


@triton.jit
def _row_codes(rows, CODES: tl.constexpr, SHAPE: tl.constexpr, TOKENS: tl.constexpr):
    """Steps of the four planes, int32 [TOKENS, JP] each, and gains' bytes, uint8 [TOKENS], of rows at [TOKENS, 1].

    A step is the bits of MAGIC + k. Codes are k and half as many as there are; a column's are put together with what
    all of them have too much, which is taken off at once.
    """
    JP: tl.constexpr = SHAPE.JP
    j = tl.arange(0, JP)[None, :]
    x = ()
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            x += (tl.load(rows + p * SHAPE.D4 + j, mask=j < SHAPE.D4, other=0.0).to(tl.float32),)
        else:
            x += (tl.zeros([TOKENS, JP], tl.float32),)
    reach = tl.zeros([TOKENS, JP], tl.float32)
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            reach = tl.maximum(reach, tl.abs(x[p]) * reach_of(CODES, p))
    reach = tl.max(reach, 1).to(tl.int32, bitcast=True)
    largest = tl.minimum(tl.maximum(((reach + 0xFFFFF) >> 20) - GAIN_BIAS, 0), 255)
    # 1 / u, exactly.
    counts = ((254 << 23) - ((largest & 0xF8) + GAIN_BIAS << 20)).to(tl.float32, bitcast=True) * UNITS
    units = ()
    for p in tl.static_range(4):
        units += (x[p] * counts[:, None] + MAGIC - MAGIC,)
    best, least = largest, tl.where(largest < 255, _error(units, largest, counts, False, CODES, SHAPE.D4), 0.0)
    for n in tl.static_range(1, CANDIDATES):
        stored = tl.maximum(largest - candidate(n), 0)
        error = _error(units, stored, counts, True, CODES, SHAPE.D4)
        best = tl.where(error < least, stored, best)
        least = tl.minimum(error, least)
    gain = _gain(best, counts)
    inverse = tl.div_rn(1.0, gain)
    steps = ()
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            step = _clipped(_steps(units[p] - gain * 0.5, inverse), p, CODES)
            steps += (step.to(tl.int32, bitcast=True),)
        else:
            steps += (tl.zeros([TOKENS, JP], tl.int32),)
    return steps, best.to(tl.uint8)


@triton.jit
def _gain(stored, counts):
    """G of gains' bytes, float32 [TOKENS, 1]."""
    return (((stored + GAIN_BIAS) << 20).to(tl.float32, bitcast=True) * counts)[:, None]


@triton.jit
def _steps(rest, inverse):
    """MAGIC + k, float32, before anything is clipped, of X - G/2 and fl(1/G)."""
    if _PLAIN:  # whose products are rounded
        k = rest.to(tl.float64) * inverse.to(tl.float64) + 1.5 * 2.0**52
        return (k - 1.5 * 2.0**52).to(tl.float32) + MAGIC
    else:
        return tl.fma(rest, inverse, MAGIC)


@triton.jit
def _clipped(steps, PLANE: tl.constexpr, CODES: tl.constexpr):
    """MAGIC + k of codes that exist."""
    return tl.minimum(tl.maximum(steps, MAGIC - half_range(CODES, PLANE)), MAGIC + (half_range(CODES, PLANE) - 1))


@triton.jit
def _error(units, stored, counts, CLIPPED: tl.constexpr, CODES: tl.constexpr, D4: tl.constexpr):
    """E of rows at these gains, float32 [TOKENS]: exact."""
    gain = _gain(stored, counts)
    inverse = tl.div_rn(1.0, gain)
    JP: tl.constexpr = units[0].shape[1]
    total = tl.zeros(units[0].shape, tl.float32)
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            rest = units[p] - gain * 0.5
            steps = _steps(rest, inverse)
            if CLIPPED:
                steps = _clipped(steps, p, CODES)
            error = rest - (steps - MAGIC) * gain
            total += error * error
    if D4 != JP:
        total = tl.where((tl.arange(0, JP) < D4)[None, :], total, 0.0)
    return tl.minimum(tl.sum(total, 1), MOST_ERROR)


@triton.constexpr_function
def offset(codes, cell):
    """What steps, put together as a cell's codes, have too much, modulo 2^32, as an int32."""
    found = sum((_MAGIC_BITS - 2 ** (f.width - 1)) << f.shift for f in codes.cells[cell].fields)
    return (found + 2**31) % 2**32 - 2**31


@triton.constexpr_function
def half_range(codes, plane):
    """Half as many as a plane has codes."""
    return float(2 ** (codes.widths[plane] - 1))


@triton.constexpr_function
def reach_of(codes, plane):
    """What an element of the plane counts towards the least gain that clips nothing."""
    return 2.0 ** (1 - codes.widths[plane])


@triton.constexpr_function
def candidate(n):
    return _CANDIDATES[n]
