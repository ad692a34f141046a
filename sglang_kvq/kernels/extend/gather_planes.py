"""Dequantization of a record of planes to BF16, as fast as that of a 2-bit record (``gather_two_bits``).

A code c of w bits is moved to bit s of a BF16 number's significand, between the leading one and another one bit. The
result x is the code plus a constant. One more instruction completes two values:

    x     = 2^(7 - s) + c + 1/2
    value = x g - (2^(7 - s) + 2^(w - 1)) g = (c - (2^w - 1) / 2) g        rounded once

The subtrahend is exact, because s + w >= 4 and g has four bits. A code already in a usable position is not shifted.

A byte permutation brings two columns' cells into one word. Each thread makes 16 bytes of a row of k or v at a time.
Nothing goes through shared memory and no thread waits for another.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.device.common import INTERPRETED, PAGE, key_row, to_bf16
from sglang_kvq.kernels.device.plane_codes import (
    GAIN_BIAS,
    bits_of,
    cell_count,
    field_count,
    is_coded,
    mask_of,
    middle,
    plane_of,
    shares_of,
    shift_of,
    start_of,
)

_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def from_planes(k, v, count, kv_heads, record, RECORD: tl.constexpr, SHAPE: tl.constexpr, VALUES: tl.constexpr):
    """Dequantizes one record to the first ``count`` of PAGE rows of k and v, with ``gather_two_bits.warps_for`` warps.

    k, v: BF16 ``[PAGE, kv_heads, D]``, at this head. Keys first, then values, if VALUES.
    """
    K_CODES: tl.constexpr = RECORD.k
    V_CODES: tl.constexpr = RECORD.v
    row_words = kv_heads * (SHAPE.D // 2)
    words = record.to(tl.pointer_type(tl.int32))
    _keys(k.to(tl.pointer_type(tl.int32)), count, row_words, record, words, K_CODES, SHAPE)
    if VALUES:
        _values(v.to(tl.pointer_type(tl.int32)), count, row_words, words, V_CODES, SHAPE)


@triton.jit
def _keys(out, count, row_words, record, words, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Dequantizes keys; a thread has eight columns of a token."""
    D4: tl.constexpr = SHAPE.D4
    M: tl.constexpr = SHAPE.DP // 32
    x = tl.arange(0, M * PAGE)
    token, m = x // M, x % M
    inside = m < D4 // 8
    gain = _twice(tl.load(record + CODES.gains + token).to(tl.int32))
    out = (out + token * row_words + 4 * m)[:, None] + tl.arange(0, 4)[None, :]
    wanted = (inside & (token < count))[:, None]
    for c in tl.static_range(cell_count(CODES)):
        rows = PAGE // shares_of(CODES, c)
        at = words + start_of(CODES, c) // 4 + key_row(token) % rows * (D4 // 4) + 2 * m
        a, b = tl.load(at, mask=inside, other=0), tl.load(at + 1, mask=inside, other=0)
        if shares_of(CODES, c) > 1:
            a, b = a >> token // rows * bits_of(CODES, c), b >> token // rows * bits_of(CODES, c)
        halves = (_halves(a, a, 0, 1), _halves(a, a, 2, 3), _halves(b, b, 0, 1), _halves(b, b, 2, 3))
        for f in tl.static_range(field_count(CODES, c)):
            tl.store(out + plane_of(CODES, c, f) * (D4 // 2), _expand(halves, gain, CODES, c, f), mask=wanted)
    for plane in tl.static_range(4):
        if not is_coded(CODES, plane):
            tl.store(out + plane * (D4 // 2), tl.zeros(out.shape, tl.int32), mask=wanted)


@triton.jit
def _values(out, count, row_words, words, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Dequantizes values; a thread has eight columns of four tokens."""
    D4: tl.constexpr = SHAPE.D4
    M: tl.constexpr = SHAPE.DP // 32
    x = tl.arange(0, 16 * M)
    i, g, t = x % 4, x // 4 % M, x // (4 * M)  # which four of a quarter's tokens; which eight of a plane; quarter
    inside = g < D4 // 8
    first = t * (PAGE // 4) + 4 * i
    gains = tl.load(words + (CODES.gains + first) // 4)
    out = (out + first * row_words + 4 * g)[:, None] + tl.arange(0, 4)[None, :]
    for c in tl.static_range(cell_count(CODES)):
        columns = ()
        for n in tl.static_range(8):  # a column has four words of a quarter's tokens
            at = words + start_of(CODES, c) // 4 + g * 32 + 4 * n + i
            quarters = 4 // shares_of(CODES, c)
            column = tl.load(at + t % quarters * (4 * D4), mask=inside, other=0)
            columns += (column >> t // quarters * bits_of(CODES, c),)
        for n in tl.static_range(4):
            gain = _twice((gains >> (8 * n)) & 0xFF)
            halves = (
                _halves(columns[0], columns[1], n, n),
                _halves(columns[2], columns[3], n, n),
                _halves(columns[4], columns[5], n, n),
                _halves(columns[6], columns[7], n, n),
            )
            wanted = (inside & (first + n < count))[:, None]
            at = out + n * row_words
            for f in tl.static_range(field_count(CODES, c)):
                tl.store(at + plane_of(CODES, c, f) * (D4 // 2), _expand(halves, gain, CODES, c, f), mask=wanted)
    for plane in tl.static_range(4):
        if not is_coded(CODES, plane):
            for n in tl.static_range(4):
                at = out + n * row_words + plane * (D4 // 2)
                tl.store(at, tl.zeros(out.shape, tl.int32), mask=(inside & (first + n < count))[:, None])


@triton.jit
def _twice(byte):
    """Converts a gain's byte to BF16 in both halves of an int32 word."""
    return (byte + GAIN_BIAS) * 0x00100010


@triton.jit
def _halves(a, b, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Moves byte LOW of words a to the lower half, byte HIGH of b to the upper one; bits above each are undefined."""
    if _PLAIN:
        return ((a >> (8 * LOW)) & 0xFF) | (((b >> (8 * HIGH)) & 0xFF) << 16)
    else:
        return tl.inline_asm_elementwise(_halves_ptx(LOW, HIGH), "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.constexpr_function
def _halves_ptx(low, high):
    return f"prmt.b32 $0, $1, $2, {(4 + high) * 0x1100 + low * 0x11:#06x};"


@triton.jit
def _expand(halves, gain, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr):
    """Expands eight columns' cells, two to each of four words, to a field's values: four words in a last axis."""
    if _PLAIN:
        x0, x1 = _plain(halves[0], gain, CODES, CELL, FIELD), _plain(halves[1], gain, CODES, CELL, FIELD)
        x2, x3 = _plain(halves[2], gain, CODES, CELL, FIELD), _plain(halves[3], gain, CODES, CELL, FIELD)
    else:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            asm=_expand_ptx(CODES, CELL, FIELD),
            constraints="=&r,=&r,=&r,=&r,r,r,r,r,r",
            args=[halves[0], halves[1], halves[2], halves[3], gain],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    x = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.reshape(x, [x.shape[0], 4])


@triton.jit
def _plain(words, gain, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr):
    factor = (gain << 16).to(tl.float32, bitcast=True)
    low = (_code(words, CODES, CELL, FIELD) - middle(CODES, plane_of(CODES, CELL, FIELD))) * factor
    high = (_code(words >> 16, CODES, CELL, FIELD) - middle(CODES, plane_of(CODES, CELL, FIELD))) * factor
    low, high = to_bf16(low).to(tl.uint16, bitcast=True), to_bf16(high).to(tl.uint16, bitcast=True)
    return low.to(tl.int32) | (high.to(tl.int32) << 16)


@triton.jit
def _code(x, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr):
    return ((x >> shift_of(CODES, CELL, FIELD)) & mask_of(CODES, CELL, FIELD)).to(tl.float32)


@triton.constexpr_function
def _expand_ptx(codes, cell, field):
    """Returns the PTX of ``_expand``: $0 to $3 are the values, $4 to $7 the cells, $8 is the gain."""
    found = codes.cells[cell].fields[field]
    width, lies = found.width, found.shift
    bit = min(max(lies, 1, 4 - width), 7 - width)
    one = (127 + 7 - bit) << 7  # 2^(7 - bit)
    base, mask = one | 1 << (bit - 1), ((1 << width) - 1) << bit
    less = 0x8000 | one | 1 << (bit + width - 1)  # -(2^(7 - bit) + 2^(width - 1))
    lines = ["{", ".reg .b32 base, factor, zero, less;"]
    lines += [f"mov.b32 base, {base * 0x10001:#x};", f"mov.b32 factor, {less * 0x10001:#x};"]
    lines += ["mov.b32 zero, 0x80008000;", "fma.rn.bf16x2 less, factor, $8, zero;"]
    for n in range(4):
        cells = f"${4 + n}"
        if bit != lies:
            lines.append(f"{'shl.b32' if bit > lies else 'shr.u32'} ${n}, {cells}, {abs(bit - lies)};")
            cells = f"${n}"
        lines.append(f"lop3.b32 ${n}, {cells}, {mask * 0x10001:#x}, base, 0xea;")  # (a & b) | c
        lines.append(f"fma.rn.bf16x2 ${n}, ${n}, $8, less;")
    return "\n".join([*lines, "}"])
