"""Attention of a tile of query rows over records of planes (``formats.planes``), the counterpart of ``extend.history``.

Tiles hold keys and values as FP16, times 2^-5 so that the largest, 31.5 times the largest gain, is in range. The
smallest is exact too, except for gains below 2^-15, whose elements may lose their last bit. As in ``extend.history``, a
code is moved into the mantissa of 1024. For a code of w bits that begins at bit f of its byte, with the middle m:

    c - m       = (1024 + 2^f c) 2^-f - (1024 2^-f + m)
    c - m - 1/2 = (1024 + c) - (1024 + 2^(w - 1))               where f is 0: FP16 has no bit left for the half
    k           = (c - m) g  or  (c - m - 1/2) g + g / 2        all exact

Gains have more exponents than FP16's normal numbers: they become float32 numbers, and pairs of these become FP16. A
thread needs few gains: its part of the tile has one of K's tokens and eight of V's. So it decodes them itself, and no
thread waits for another.

Words of four bytes are split in place: bytes 0 and 2, each in a half of the word, then 1 and 3. Products take a plane's
elements of queries and keys, and tokens of weights and values, in that order (``common.quad_order``).

p is not multiplied by gains: FP16 keeps all bits of p down to 2^-29 of the row's largest, some down to 2^-39. So a row
of p g_v loses at most 2^-40 of its largest, times the ratio of the largest to the least gain, at most 2^32.

A plane without bits is zeros in the tile. If the last two planes have no bits, tiles leave them out, and products are
half as long.
"""

import triton
import triton.language as tl

from sglang_kvq.formats.planes import GAIN_BIAS as _GAIN_BIAS
from sglang_kvq.kernels.device.codes import page_bytes
from sglang_kvq.kernels.device.common import PAGE, dot, key_row, page_of
from sglang_kvq.kernels.device.fp16_pairs import twice
from sglang_kvq.kernels.device.plane_codes import (
    bits_of,
    cell_count,
    field_count,
    gain_of,
    mask_of,
    middle,
    plane_of,
    shares_of,
    shift_of,
    start_of,
    tile_planes,
)
from sglang_kvq.kernels.device.softmax import Softmax, no_keys, scores
from sglang_kvq.kernels.extend.history import (
    fp16_high,
    fp16_low,
    join_planes,
    planes_last,
    queries_by_plane,
    split2,
    split4,
)

#: Queries are scaled to at most 2^12, p to 2^15, as in ``extend.history``; tiles hold 2^-5 of keys and values.
_Q_SCALE = tl.constexpr(2.0**11)
_P_SHIFT = tl.constexpr(15.0)
_UNIT = tl.constexpr(2.0**-5)
_UNIT_LOG2 = tl.constexpr(-5.0)


@triton.jit
def history_planes(
    tile, pages, records, v_first, scale_log2,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Attends like ``history.history_two_bits``, for records of planes; columns of acc are ``plane_dims``."""
    PAGE_BYTES: tl.constexpr = page_bytes(RECORD, SHAPE.KV_HEADS)
    V_PLANES: tl.constexpr = tile_planes(RECORD.v)
    x = _queries(tile, SHAPE, ROWS, tile_planes(RECORD.k)).to(tl.float32)
    peak = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-30)
    unit = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # a power of two
    queries = (x * (_Q_SCALE / unit)).to(tl.float16)  # [ROWS, K's planes * JP]
    factor = unit * (scale_log2 / (_Q_SCALE * _UNIT))

    state = no_keys(ROWS, V_PLANES * (SHAPE.VP // 4))
    first, last = pages.history, pages.history_end
    for _ in tl.range(0, tl.minimum(last - first, 1)):  # once, see ``history_two_bits``
        next_page = page_of(pages.table, first)
        for index in tl.range(first, last):
            page = next_page
            next_page = page_of(pages.table, tl.minimum(index + 1, last - 1))
            state = _page(state, queries, factor, records + page * PAGE_BYTES, v_first, RECORD, SHAPE, ROWS, PLAIN)
        queries = tl.zeros(queries.shape, queries.dtype)
    acc = state.acc
    if V_PLANES == 2:  # after the first two planes' dims, the others' are zero
        acc = join_planes((acc, tl.zeros(acc.shape, tl.float32)), ROWS, SHAPE.VP // 2)
    return Softmax(acc, state.total * _UNIT, state.top - (_P_SHIFT + _UNIT_LOG2))


@triton.jit
def _queries(tile, SHAPE: tl.constexpr, ROWS: tl.constexpr, PLANES: tl.constexpr):
    """Returns ``history.queries_by_plane`` with each plane's dims in ``quad_order``, reordered after loading."""
    COLUMNS: tl.constexpr = PLANES * SHAPE.JP
    x = tl.reshape(queries_by_plane(tile, SHAPE, PLANES), [ROWS, COLUMNS // 4, 2, 2])
    return tl.reshape(tl.permute(x, (0, 1, 3, 2)), [ROWS, COLUMNS])


@triton.jit
def _page(
    state, queries, factor, record, v_first,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Runs online softmax over a page: a record holds 64 tokens, and a history is whole pages.

    Loads gains, makes K's tile and V's, and attends.
    """
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    words = record.to(tl.pointer_type(tl.int32))
    k_gains, v_gains = _gains(words + KEYS.gains // 4, SHAPE)
    k = _key_tile(words, k_gains, KEYS, SHAPE, PLAIN)
    v = _value_tile(words, v_gains, v_first, VALUES, SHAPE, PLAIN)

    x = scores(queries, k, ROWS, PAGE)
    top = tl.maximum(state.top, tl.max(x, 1) * factor)
    decay = tl.exp2(state.top - top)
    p = tl.exp2(x * factor - (top - _P_SHIFT)[:, None])
    total = state.total * decay + tl.sum(p, 1)
    return Softmax(dot(p.to(tl.float16), tl.trans(v), state.acc * decay[:, None]), total, top)


@triton.jit
def _gains(words, SHAPE: tl.constexpr):
    """Returns words of four gains: K's [PAGE], in row n the word with the gain of ``_token_of_row``; V's [PAGE / 4]."""
    # There are as many loads as threads, see ``history._page``; with eight warps, everything is loaded twice.
    x = tl.arange(0, 4 * PAGE if SHAPE.D > 128 else 2 * PAGE)
    of_key = _token_of_row(x % PAGE) // 4
    loaded = tl.load(words + tl.where(x % (2 * PAGE) < PAGE, of_key, PAGE // 4 + x % (PAGE // 4)))
    if SHAPE.D > 128:
        loaded, _ = split2(loaded, 2 * PAGE)
    k, v = split2(loaded, PAGE)
    v, _, _, _ = split4(v, PAGE // 4)
    return k, v


@triton.jit
def _token_of_row(n):
    """Returns the token of the n-th loaded row of K; this order avoids bank conflicts, see ``history._page``.

    The n-th of eight loaded rows becomes the tile's row n // 2 + n % 2 * 4, which is this token in ``quad_order``.
    """
    return n // 8 * 8 + n % 2 * 4 + n // 2 % 2 * 2 + n // 4 % 2


@triton.jit
def _key_tile(record, gains, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Returns FP16 [PAGE, planes * JP]: ``tile_planes`` side by side, tokens and elements in ``quad_order``.

    record: pointer to words; gains: see ``_gains``.
    """
    JP: tl.constexpr = SHAPE.JP
    ROW: tl.constexpr = SHAPE.D4 // 4
    PLANES: tl.constexpr = tile_planes(CODES)
    j, token = tl.arange(0, JP // 4)[None, :], _token_of_row(tl.arange(0, PAGE))
    gain = _twice(gains, token % 4, PLAIN)[:, None]
    planes = _no_planes(PLANES, PAGE, JP // 4)
    for c in tl.static_range(cell_count(CODES)):
        rows = PAGE // shares_of(CODES, c)
        row, shift = key_row(token) % rows, token // rows * bits_of(CODES, c)
        address = record + (start_of(CODES, c) // 4 + row[:, None] * ROW + j)
        words = tl.load(address) if ROW == JP // 4 else tl.load(address, mask=j < ROW, other=0)
        for f in tl.static_range(field_count(CODES, c)):
            bytes = _elements(words, gain, gain, shift[:, None], CODES, c, f, PLAIN)
            planes = _set(planes, plane_of(CODES, c, f), bytes)
    tiles = ()
    for n in tl.static_range(PLANES):
        tiles += (tl.reshape(planes_last(planes[n], PAGE, JP // 4), [PAGE, JP]),)
    k = tl.reshape(join_planes(tiles, PAGE, JP), [PAGE // 8, 2, 2, 2, PLANES * JP])
    return tl.reshape(tl.permute(k, (0, 3, 1, 2, 4)), [PAGE, PLANES * JP])


@triton.jit
def _value_tile(record, gains, v_first, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Returns FP16 [planes * VP / 4, PAGE]: rows are the dims of ``plane_dims`` in the first ``tile_planes`` planes.

    Tokens are in ``quad_order``. record: pointer to words; gains: see ``_gains``.
    """
    WORDS: tl.constexpr = PAGE // 4
    QUARTER: tl.constexpr = WORDS // 4
    ROWS: tl.constexpr = SHAPE.VP // 4
    PLANES: tl.constexpr = tile_planes(CODES)
    word, j = tl.arange(0, WORDS)[None, :], tl.arange(0, ROWS)[:, None]
    even, odd = _pairs(gains, PLAIN)
    planes = _no_planes(PLANES, ROWS, WORDS)
    for c in tl.static_range(cell_count(CODES)):
        # With the terms in this order the compiler sees which words are neighbors; otherwise it would load them one by
        # one. With two words per thread instead of four, a thread decodes the gains of only eight tokens.
        quarter = word // QUARTER % (4 // shares_of(CODES, c))
        shift = word // (WORDS // shares_of(CODES, c)) * bits_of(CODES, c)
        columns = quarter * (SHAPE.D4 * QUARTER) + (v_first // 4 + j) * QUARTER + word % QUARTER
        address = tl.max_contiguous(record + (start_of(CODES, c) // 4 + columns), [1, 2])
        if SHAPE.DIMS == SHAPE.VP:
            words = tl.load(address)
        else:
            words = tl.load(address, mask=j < SHAPE.DIMS // 4, other=0)
        for f in tl.static_range(field_count(CODES, c)):
            bytes = _elements(words, even[None, :], odd[None, :], shift, CODES, c, f, PLAIN)
            planes = _set(planes, plane_of(CODES, c, f), bytes)
    # Tokens are joined last. Otherwise the compiler assumes that a thread holds planes side by side, and stores the
    # tile token by token.
    tokens = ()
    for n in tl.static_range(4):
        tokens += (_stacked(_nth(planes, n), ROWS),)
    return tl.reshape(planes_last(tokens, PLANES * ROWS, WORDS), [PLANES * ROWS, PAGE])


@triton.jit
def _nth(x, N: tl.constexpr):
    """Returns the N-th element of each tuple."""
    result = ()
    for n in tl.static_range(len(x)):
        result += (x[n][N],)
    return result


@triton.jit
def _stacked(x, ROWS: tl.constexpr):
    """Stacks two or four tiles [ROWS, PAGE / 4] to one, one above the other."""
    return tl.reshape(tl.permute(planes_last(x, ROWS, PAGE // 4), (2, 0, 1)), [len(x) * ROWS, PAGE // 4])


@triton.jit
def _no_planes(PLANES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Returns four tiles of zeros [ROWS, WORDS] for each plane, one per byte of a word."""
    zero = tl.zeros([ROWS, WORDS], tl.float16)
    planes = ()
    for _ in tl.static_range(PLANES):
        planes += ((zero, zero, zero, zero),)
    return planes


@triton.jit
def _set(planes, PLANE: tl.constexpr, bytes):
    """Returns the planes with one replaced."""
    result = ()
    for n in tl.static_range(len(planes)):
        if n == PLANE:
            result += (bytes,)
        else:
            result += (planes[n],)
    return result


@triton.jit
def _gain_bits(words, n):
    """Returns the n-th of a word's four gains, times 2^-5, as FP16, in the lower half of a word."""
    gain = gain_of((words >> (8 * n)) & 0xFF) * _UNIT
    return gain.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def _twice(words, n, PLAIN: tl.constexpr):
    """Returns words whose halves are both the n-th of a word's four gains, see ``_gain_bits``."""
    if PLAIN:
        half = _gain_bits(words, n)
        return half | (half << 16)
    else:
        return tl.inline_asm_elementwise(
            TWICE_PTX, "=r,r,r", [words, _SELECTOR + n * 0x100], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _pairs(words, PLAIN: tl.constexpr):
    """Returns words whose halves are two of a word's four gains, see ``_gain_bits``: 0 and 2, and 1 and 3."""
    if PLAIN:
        even = _gain_bits(words, 0) | (_gain_bits(words, 2) << 16)
        return even, _gain_bits(words, 1) | (_gain_bits(words, 3) << 16)
    else:
        return tl.inline_asm_elementwise(
            PAIRS_PTX, "=&r,=&r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )


#: Selector of PTX's prmt.b32, with zero as its second word: moves the lowest byte up by 16 bits and clears the others.
_SELECTOR = tl.constexpr(0x4044)


def _gain_ptx(target: str, word: str, selector: str) -> list[str]:
    """Returns PTX that converts the byte picked by ``selector`` to a gain times 2^-5 in float32."""
    bias = (_GAIN_BIAS + 8 * int(_UNIT_LOG2.value)) << 20
    return [f"prmt.b32 {target}, {word}, 0, {selector};", f"mad.lo.u32 {target}, {target}, 16, {bias:#x};"]


def _pairs_ptx() -> str:
    lines = [".reg .b32 g0, g1, g2, g3;"]
    for n in range(4):
        lines += _gain_ptx(f"g{n}", "$2", f"{_SELECTOR.value + n * 0x100:#x}")
    return "\n".join(["{", *lines, "cvt.rn.f16x2.f32 $0, g2, g0;", "cvt.rn.f16x2.f32 $1, g3, g1;", "}"])


PAIRS_PTX = tl.constexpr(_pairs_ptx())
TWICE_PTX = tl.constexpr(
    "\n".join(["{", ".reg .b32 gain;", *_gain_ptx("gain", "$1", "$2"), "cvt.rn.f16x2.f32 $0, gain, gain;", "}"])
)


@triton.jit
def _elements(
    words, even, odd, shift, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, PLAIN: tl.constexpr
):
    """Returns a field's elements times 2^-5 as four FP16 tiles: from bytes 0, 2, 1 and 3 of the words.

    even, odd: gains of bytes 0 and 2, and of 1 and 3, see ``_pairs``; shift: bit where tokens' cells begin in their
    bytes.
    """
    if PLAIN:
        return (
            _element(words, 0, shift, fp16_low(even), CODES, CELL, FIELD),
            _element(words, 2, shift, fp16_high(even), CODES, CELL, FIELD),
            _element(words, 1, shift, fp16_low(odd), CODES, CELL, FIELD),
            _element(words, 3, shift, fp16_high(odd), CODES, CELL, FIELD),
        )
    else:
        return tl.inline_asm_elementwise(
            asm=elements_ptx(CODES, CELL, FIELD),
            constraints="=&h,=&h,=&h,=&h,r,r,r,r",
            args=[words, even, odd, shift],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _element(words, byte, shift, gain, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr):
    code = (words >> (8 * byte + shift + shift_of(CODES, CELL, FIELD))) & mask_of(CODES, CELL, FIELD)
    level = code.to(tl.float32) - middle(CODES, plane_of(CODES, CELL, FIELD))
    return (level * gain.to(tl.float32)).to(tl.float16)


@triton.constexpr_function
def elements_ptx(codes, cell, field):
    """Returns the PTX of ``_elements``: $0 to $3, from the word $4, gains $5 and $6, and the shift $7.

    The halves of a register are stored together again, so ptxas moves nothing.
    """
    found = codes.cells[cell].fields[field]
    lowest = found.shift == 0  # no bit is left for the half
    less = 1024 / 2**found.shift + ((1 << found.width) - (0 if lowest else 1)) / 2
    lines = ["{", ".reg .b32 base, unit, less, half, rest, even, odd;", f"mov.b32 base, {twice(1024):#x};"]
    lines += [f"mov.b32 unit, {twice(0.5**found.shift):#x};", f"mov.b32 less, {twice(-less):#x};"]
    lines.append(f"mov.b32 half, {twice(0.5):#x};")
    if codes.cells[cell].shares == 1:
        lines.append("mov.b32 even, $4;")
    else:
        lines.append("shr.u32 even, $4, $7;")
    lines.append("shr.u32 odd, even, 8;")
    mask = (((1 << found.width) - 1) << found.shift) * 0x10001
    for n, x in enumerate(("even", "odd")):
        gain = f"${5 + n}"
        lines.append(f"lop3.b32 {x}, {x}, {mask:#x}, base, 0xea;")  # (a & b) | c
        if lowest:
            lines += [f"add.rn.f16x2 {x}, {x}, less;", f"mul.rn.f16x2 rest, {gain}, half;"]
            lines.append(f"fma.rn.f16x2 {x}, {x}, {gain}, rest;")
        else:
            lines += [f"fma.rn.f16x2 {x}, {x}, unit, less;", f"mul.rn.f16x2 {x}, {x}, {gain};"]
        lines.append(f"mov.b32 {{${2 * n}, ${2 * n + 1}}}, {x};")
    return "\n".join([*lines, "}"])
