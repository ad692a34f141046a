"""A tile of query rows over records of planes (``formats.planes``): what ``extend_history`` does for two bits.

Tiles of K and V are c - m, codes less their plane's middle, without gains. As bits of FP16, a code at bit f is a number
too small to be normal, which one instruction turns into that for two codes, after one that masks them:

    (c 2^(f - 24)) 2^(15 - f) - m 2^-9 = (c - m) 2^-9        exact

K's gains are factors of a score's column. V's are folded into p, which FP16 does not hold whatever they are: they are
added to scores as logarithms, so that the softmax's ``top`` bounds p g_v and not p, which its total sums:

    y = g_k x + log2 g_v        p g_v = 2^(y - top) <= 1        p = p g_v / g_v

Gains and what is made of them may span 2^32: float32 holds p, and what of a row's p g_v FP16 loses is below 2^-29 of
its largest.

A plane without bits is zeros, and where the last two have none they are no part of a tile: products are half as long.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.common import PAGE, dot, key_row, page_of
from sglang_kvq.kernels.extend_history import join_planes, planes_last, queries_by_plane
from sglang_kvq.kernels.planes import (
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
from sglang_kvq.kernels.softmax import NEVER, Softmax, no_keys, scores

#: Queries are scaled to at most 2^12, p to 2^15, as in ``extend_history``; tiles hold 2^-9 of their levels.
_Q_SCALE = tl.constexpr(2.0**11)
_P_SHIFT = tl.constexpr(15.0)
_LEVEL = tl.constexpr(2.0**-9)
_LEVEL_LOG2 = tl.constexpr(-9.0)


@triton.jit
def history_planes(
    tile, pages, records, v_first, scale_log2,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """``extend_history.history_two_bits`` of records of planes; columns of acc are ``planes.plane_dims``."""
    PAGE_BYTES: tl.constexpr = SHAPE.KV_HEADS * RECORD.bytes
    V_PLANES: tl.constexpr = tile_planes(RECORD.v)
    x = queries_by_plane(tile, SHAPE, tile_planes(RECORD.k)).to(tl.float32)
    peak = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-30)
    unit = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # a power of two
    queries = (x * (_Q_SCALE / unit)).to(tl.float16)  # [ROWS, K's planes * JP]
    factor = unit * (scale_log2 / (_Q_SCALE * _LEVEL))

    state = no_keys(ROWS, V_PLANES * (SHAPE.VP // 4))
    first, last = pages.history, pages.history_end
    whole = tl.maximum(tl.minimum(last, pages.tokens // PAGE), first)
    for _ in tl.range(0, tl.minimum(last - first, 1)):  # once, see ``history_two_bits``
        next_page = page_of(pages.table, first)
        for index in tl.range(first, whole):
            page = next_page
            next_page = page_of(pages.table, tl.minimum(index + 1, last - 1))
            record = records + page * PAGE_BYTES
            state = _page(state, queries, factor, record, PAGE, v_first, RECORD, SHAPE, ROWS, False, PLAIN)
        if whole < last:  # one page, which is half stored
            record = records + page_of(pages.table, whole) * PAGE_BYTES
            count = pages.tokens - whole * PAGE
            state = _page(state, queries, factor, record, count, v_first, RECORD, SHAPE, ROWS, True, PLAIN)
        queries = tl.zeros(queries.shape, queries.dtype)
    acc = state.acc
    if V_PLANES == 2:  # behind the first two planes' dims those of the others, which are zero
        acc = join_planes((acc, tl.zeros(acc.shape, tl.float32)), ROWS, SHAPE.VP // 2)
    return Softmax(acc, state.total * _LEVEL, state.top - (_P_SHIFT + _LEVEL_LOG2))


@triton.jit
def _page(
    state, queries, factor, record, count, v_first,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Online softmax over the first ``count`` tokens of a page; over all, unless MASKED.

    Make K's tile; make V's; scores; gains, which are fewer registers to hold when they come late; attend.
    """
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    k = _key_tile(record, KEYS, SHAPE, PLAIN)
    v = _value_tile(record, v_first, VALUES, SHAPE, PLAIN)
    x = scores(queries, k, ROWS, PAGE)
    g_k, log_g, inverse = _gains(record, factor, RECORD, PLAIN)
    x = x * g_k[None, :] + log_g[None, :]
    if MASKED:
        x = tl.where((tl.arange(0, PAGE) < count)[None, :], x, NEVER)
    top = tl.maximum(state.top, tl.max(x, 1))
    decay = tl.exp2(state.top - top)
    p = tl.exp2(x + (-top + _P_SHIFT)[:, None])
    total = state.total * decay + tl.sum(p * inverse[None, :], 1)
    return Softmax(dot(p.to(tl.float16), tl.trans(v), state.acc * decay[:, None]), total, top)


@triton.jit
def _gains(record, factor, RECORD: tl.constexpr, PLAIN: tl.constexpr):
    """Of a page's tokens, float32 [PAGE] each: K's gains times factor; of V's the logarithms and the inverses.

    A thread does this of one gain, and fetches its columns'. Without a gather the compiler would have every thread do
    it of all its columns.
    """
    x = tl.arange(0, 2 * PAGE)  # K's gains and V's: as many as threads
    words = (record + RECORD.k.gains).to(tl.pointer_type(tl.int32))
    gains = gain_of((tl.load(words + x // 4) >> (x % 4 * 8)) & 0xFF)
    if PLAIN:
        logarithms, inverses = tl.log2(gains), 1 / gains
    else:
        logarithms, inverses = tl.inline_asm_elementwise(
            asm="lg2.approx.ftz.f32 $0, $2; rcp.approx.ftz.f32 $1, $2;",
            constraints="=&f,=f,f",
            args=[gains],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    used = tl.where(x < PAGE, gains * factor, logarithms)
    both = tl.reshape(tl.join(used, inverses), [4 * PAGE])
    x = tl.arange(0, 4 * PAGE)
    own = tl.gather(both, x // 4 * 2 + x // 2 % 2 * (2 * PAGE) + x % 2, 0)  # of a token: two of K, then two of V
    first, second = tl.split(tl.reshape(own, [PAGE, 2, 2]))
    g_k, log_g = tl.split(first)
    _, inverse = tl.split(second)
    return g_k, log_g, inverse


@triton.jit
def _key_tile(record, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """FP16 [PAGE, planes * JP]: ``tile_planes`` side by side."""
    D4: tl.constexpr = SHAPE.D4
    JP: tl.constexpr = SHAPE.JP
    PLANES: tl.constexpr = tile_planes(CODES)
    n, j = tl.arange(0, PAGE), tl.arange(0, JP)[None, :]
    token = n // 8 * 8 + n % 2 * 4 + n // 2 % 4  # because of banks, see ``extend_history._page``
    planes = _no_planes(PLANES, PAGE, JP)
    for c in tl.static_range(cell_count(CODES)):
        rows = PAGE // shares_of(CODES, c)
        row, shift = key_row(token) % rows, token // rows * bits_of(CODES, c)
        address = record + start_of(CODES, c) + row[:, None] * D4 + j
        bytes = tl.load(address) if D4 == JP else tl.load(address, mask=j < D4, other=0)
        for f in tl.static_range(field_count(CODES, c)):
            planes = _set(planes, plane_of(CODES, c, f), _levels(bytes, shift[:, None], CODES, c, f, PLAIN))
    k = tl.reshape(join_planes(planes, PAGE, JP), [PAGE // 8, 2, 2, 2, PLANES * JP])
    return tl.reshape(tl.permute(k, (0, 3, 1, 2, 4)), [PAGE, PLANES * JP])


@triton.jit
def _value_tile(record, v_first, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """FP16 [planes * VP / 4, PAGE]: rows are the first of ``planes.plane_dims``, of ``tile_planes``."""
    QUARTER: tl.constexpr = PAGE // 4
    ROWS: tl.constexpr = SHAPE.VP // 4
    PLANES: tl.constexpr = tile_planes(CODES)
    token, j = tl.arange(0, PAGE)[None, :], tl.arange(0, ROWS)[:, None]
    planes = _no_planes(PLANES, ROWS, PAGE)
    for c in tl.static_range(cell_count(CODES)):
        # In this order the compiler sees which bytes are neighbours; else it would load them one by one.
        quarter = token // QUARTER % (4 // shares_of(CODES, c))
        shift = token // (PAGE // shares_of(CODES, c)) * bits_of(CODES, c)
        columns = quarter * (SHAPE.D4 * QUARTER) + (v_first // 4 + j) * QUARTER
        address = record + start_of(CODES, c) + columns + token % QUARTER
        if SHAPE.DIMS == SHAPE.VP:
            bytes = tl.load(address)
        else:
            bytes = tl.load(address, mask=j < SHAPE.DIMS // 4, other=0)
        for f in tl.static_range(field_count(CODES, c)):
            planes = _set(planes, plane_of(CODES, c, f), _levels(bytes, shift, CODES, c, f, PLAIN))
    # Tokens are joined last: otherwise the compiler takes planes for what a thread holds side by side, and stores the
    # tile token by token.
    even, odd = (), ()
    for n in tl.static_range(PLANES):
        x, y = tl.split(tl.reshape(planes[n], [ROWS, PAGE // 2, 2]))
        even += (x,)
        odd += (y,)
    return tl.reshape(tl.join(_stacked(even, ROWS), _stacked(odd, ROWS)), [PLANES * ROWS, PAGE])


@triton.jit
def _stacked(x, ROWS: tl.constexpr):
    """Two or four tiles [ROWS, PAGE / 2] to one, one above the other."""
    return tl.reshape(tl.permute(planes_last(x, ROWS, PAGE // 2), (2, 0, 1)), [len(x) * ROWS, PAGE // 2])


@triton.jit
def _no_planes(PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    planes = ()
    for _ in tl.static_range(PLANES):
        planes += (tl.zeros([ROWS, COLUMNS], tl.float16),)
    return planes


@triton.jit
def _set(planes, PLANE: tl.constexpr, tile):
    """The planes with one replaced."""
    result = ()
    for n in tl.static_range(len(planes)):
        if n == PLANE:
            result += (tile,)
        else:
            result += (planes[n],)
    return result


@triton.jit
def _levels(bytes, shift, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, PLAIN: tl.constexpr):
    """A field's levels times 2^-9, FP16, of bytes; shift: where a token's cell begins in its byte."""
    if PLAIN:
        code = (bytes.to(tl.int32) >> (shift + shift_of(CODES, CELL, FIELD))) & mask_of(CODES, CELL, FIELD)
        return ((code.to(tl.float32) - middle(CODES, plane_of(CODES, CELL, FIELD))) * _LEVEL).to(tl.float16)
    elif shares_of(CODES, CELL) == 1:
        return tl.inline_asm_elementwise(
            _levels_ptx(CODES, CELL, FIELD), "=&r,=&r,r", [bytes], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            asm=_levels_ptx(CODES, CELL, FIELD),
            constraints="=&r,=&r,r,r,r,r,r",
            args=[bytes, shift],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.constexpr_function
def _levels_ptx(codes, cell, field):
    """PTX of ``_levels``: $0 and $1 are the levels of $2's four bytes; $3 to $6 the shifts of those that are shared.

    Which bytes a word has is the compiler's choice. Where they are neighbours their shifts are one register, and ptxas
    keeps one of the four instructions.
    """
    found = codes.cells[cell].fields[field]
    width = found.width
    mask = ((1 << width) - 1) << found.shift
    factor = (30 - found.shift) << 10  # 2^(15 - shift)
    less = 0x8000 | (width + 4) << 10 | ((1 << (width - 1)) - 1) << (11 - width)  # (2^width - 1) / 2 * 2^-9
    lines, cells = ["{", ".reg .b32 factor, less, byte0, byte1, byte2, byte3;"], ["$2"] * 4
    lines += [f"mov.b32 factor, {factor * 0x10001:#x};", f"mov.b32 less, {less * 0x10001:#x};"]
    if codes.cells[cell].shares > 1:
        cells = [f"byte{n}" for n in range(4)]
        lines += [f"shr.u32 {x}, $2, ${3 + n};" for n, x in enumerate(cells)]
    # A byte in each half of a word; the mask takes off what comes above it.
    lines += [f"prmt.b32 $0, {cells[0]}, {cells[1]}, 0x5500;", f"prmt.b32 $1, {cells[2]}, {cells[3]}, 0x7722;"]
    for n in range(2):
        lines.append(f"and.b32 ${n}, ${n}, {mask * 0x10001:#x};")
        lines.append(f"fma.rn.f16x2 ${n}, ${n}, factor, less;")
    return "\n".join([*lines, "}"])
