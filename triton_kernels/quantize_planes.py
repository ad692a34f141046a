"""Rows of BF16 to codes of planes and gains: the arithmetic of ``formats.planes``, bit for bit.

A work item is ``quantize``'s: TOKENS tokens of a page, one KV head, keys or values; its rows in float32, a tensor for
each plane.
"""

import triton
import triton.language as tl

from sglang_kvq.formats.planes import CANDIDATES as _CANDIDATES
from sglang_kvq.formats.planes import ERROR_SCALE as _ERROR_SCALE
from sglang_kvq.formats.planes import GAIN_BIAS as _GAIN_BIAS
from sglang_kvq.formats.planes import MOST_ERROR as _MOST_ERROR
from sglang_kvq.kernels.common import INTERPRETED, PAGE, key_row
from sglang_kvq.kernels.int8 import MAGIC
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
CANDIDATES = tl.constexpr(len(_CANDIDATES))
ERROR_SCALE = tl.constexpr(_ERROR_SCALE)
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
def _column_bits(codes, CELL: tl.constexpr, CODES: tl.constexpr):
    """A cell's bits of every column, int32."""
    bits = codes[plane_of(CODES, CELL, 0)] << shift_of(CODES, CELL, 0)
    for f in tl.static_range(1, field_count(CODES, CELL)):
        bits |= codes[plane_of(CODES, CELL, f)] << shift_of(CODES, CELL, f)
    return bits


@triton.jit
def _row_codes(rows, CODES: tl.constexpr, SHAPE: tl.constexpr, TOKENS: tl.constexpr):
    """Codes of the four planes, int32 [TOKENS, JP] each, and gains' bytes, uint8 [TOKENS], of rows at [TOKENS, 1]."""
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
    per_unit = ((254 << 23) - ((largest & 0xF8) + GAIN_BIAS << 20)).to(tl.float32, bitcast=True) * ERROR_SCALE
    best, least = largest, tl.full([TOKENS], float("inf"), tl.float32)
    for n in tl.static_range(CANDIDATES):
        stored = tl.maximum(largest - candidate(n), 0)
        error = _error(x, stored, per_unit, CODES, SHAPE.D4, TOKENS, JP)
        best = tl.where(error < least, stored, best)
        least = tl.minimum(error, least)
    gain = ((best + GAIN_BIAS) << 20).to(tl.float32, bitcast=True)[:, None]
    inverse = tl.div_rn(1.0, gain)
    codes = ()
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            codes += ((_steps(x[p], gain, inverse, p, CODES)[0] + half_range(CODES, p)).to(tl.int32),)
        else:
            codes += (tl.zeros([TOKENS, JP], tl.int32),)
    return codes, best.to(tl.uint8)


@triton.jit
def _steps(x, gain, inverse, PLANE: tl.constexpr, CODES: tl.constexpr):
    """k and x - g/2, float32, of rows x at gains [TOKENS, 1]."""
    rest = x - gain * 0.5
    if _PLAIN:  # whose products are rounded
        k = rest.to(tl.float64) * inverse.to(tl.float64) + 1.5 * 2.0**52
        k = (k - 1.5 * 2.0**52).to(tl.float32)
    else:
        k = tl.fma(rest, inverse, MAGIC) - MAGIC
    return tl.minimum(tl.maximum(k, -half_range(CODES, PLANE)), half_range(CODES, PLANE) - 1), rest


@triton.jit
def _error(
    x, stored, per_unit, CODES: tl.constexpr, D4: tl.constexpr, TOKENS: tl.constexpr, JP: tl.constexpr
):  # fmt: skip
    """E of rows at these gains, float32 [TOKENS]: exact."""
    gain = ((stored + GAIN_BIAS) << 20).to(tl.float32, bitcast=True)[:, None]
    inverse = tl.div_rn(1.0, gain)
    total = tl.zeros([TOKENS, JP], tl.float32)
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            k, rest = _steps(x[p], gain, inverse, p, CODES)
            counted = tl.minimum(tl.abs(rest - k * gain) * per_unit[:, None], MOST_ERROR)
            counted = (counted + MAGIC) - MAGIC
            total += counted * counted
    if D4 != JP:
        total = tl.where((tl.arange(0, JP) < D4)[None, :], total, 0.0)
    return tl.sum(total, 1)


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
