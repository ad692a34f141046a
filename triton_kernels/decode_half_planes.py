"""``decode_half`` for records of planes (``formats.planes``): products in FP16, one column a query head.

With codes c, each plane's middle m and a row's gains g, as ``decode_planes`` has it; codes are cut out of words where
they lie, two by one AND, as subnormal FP16 numbers, and what that multiplies them by is taken off queries and sums.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.common import PAGE, page_of
from sglang_kvq.kernels.decode_half import (
    CODE,
    LARGEST_QUERY,
    LARGEST_WEIGHT,
    columns_of,
    half_dot,
    has_words,
    quad_order,
    subnormal,
    token_tiles,
)
from sglang_kvq.kernels.int8 import base_of, spread_sum, stack, tokens_of_tile
from sglang_kvq.kernels.planes import (
    cell_count,
    field_count,
    is_byte,
    is_coded,
    mask_of,
    middle,
    plane_of,
    shift_of,
    start_of,
    tile_gains,
    token_planes_of,
)
from sglang_kvq.kernels.softmax import NEVER, Softmax, first_columns


@triton.jit
def history_half_planes(
    q, item, table, records, v_first, scale_log2, RECORD: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr
):
    """What ``decode_planes.history_planes`` does, of heads of at most 128; two pages a turn."""
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    TILE: tl.constexpr = 2 * PAGE
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    ROWS: tl.constexpr = SHAPE.VP // 4
    PAGE_BYTES: tl.constexpr = SHAPE.KV_HEADS * RECORD.bytes

    queries, unit, from_middles = _queries(q, KEYS, SHAPE)
    unit = unit * scale_log2
    second, _, token = tokens_of_tile()
    # K's gains and V's, one behind the other: [page, which, token].
    gains = KEYS.gains + tl.arange(0, 2)[None, :, None] * PAGE + tl.arange(0, PAGE)[None, None, :]

    accs = ()
    for _ in tl.static_range(4):
        accs += (tl.zeros([ROWS, COLUMNS], tl.float32),)
    weight = tl.zeros([8, COLUMNS], tl.float32)  # sum p g_v, in what weights count
    top = tl.full([COLUMNS], NEVER, tl.float32)
    total = tl.zeros([8, COLUMNS], tl.float32)
    largest = 1e-30  # g_v so far
    page_a, page_b = item.page_a.to(tl.int64), item.page_b.to(tl.int64)
    last = item.last_page
    limit = tl.minimum(last * PAGE, item.length)
    for index in tl.range(item.first_page, last, 2):
        base_a, base_b = page_a * PAGE_BYTES, page_b * PAGE_BYTES
        page_a = page_of(table, tl.minimum(index + 2, last - 1))
        page_b = page_of(table, tl.minimum(index + 3, last - 1))
        both = records + base_of(tl.arange(0, 2) == 1, base_a, base_b)[:, None, None]  # [2, 1, 1]
        g_k, g_v = tile_gains(tl.load(both + gains))  # [TILE] each

        products = tl.zeros([TILE, COLUMNS], tl.float32) - from_middles[None, :]
        for c in tl.static_range(cell_count(KEYS)):
            cell = _load_keys(records, base_a, base_b, c, KEYS, SHAPE, PLAIN)
            for f in tl.static_range(field_count(KEYS, c)):
                k = _fields(cell, KEYS, c, f, 0, PLAIN)
                if not is_byte(KEYS, c):
                    upper = _fields(cell, KEYS, c, f, 1, PLAIN)
                    if has_words(SHAPE):
                        k = (stack(k[0], upper[0]), stack(k[1], upper[1]))
                    else:
                        k = (stack(k[0], upper[0]),)
                for half in tl.static_range(len(k)):
                    products = half_dot(k[half], queries[plane_of(KEYS, c, f)][half], products, PLAIN)
        x = products * g_k[:, None]
        if (index + 2) * PAGE > limit:
            position = (index + second.to(tl.int32)) * PAGE + token
            x = tl.where((position < limit)[:, None], x, NEVER)

        new_top = tl.maximum(top, tl.max(x, 0) * unit)
        decay = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(x * unit[None, :] - top[None, :])
        total = total * decay[None, :] + spread_sum(p, COLUMNS)
        new_largest = tl.maximum(largest, tl.max(g_v, 0))
        decay *= largest / new_largest
        largest = new_largest
        p = p * (g_v * (LARGEST_WEIGHT / largest))[:, None]
        weight = weight * decay[None, :] + spread_sum(p, COLUMNS)
        w = token_tiles(p, COLUMNS)
        old_accs = accs
        accs = ()
        for n in tl.static_range(4):
            accs += (old_accs[n] * decay[None, :],)
        for c in tl.static_range(cell_count(VALUES)):
            for t in tl.static_range(token_planes_of(VALUES, c)):
                cell = _load_values(both, v_first, c, t, VALUES, SHAPE)
                for f in tl.static_range(field_count(VALUES, c)):
                    v = _fields(cell, VALUES, c, f, 0, PLAIN)
                    accs = _added(accs, plane_of(VALUES, c, f), v, w[t], PLAIN)
                    if not is_byte(VALUES, c):
                        v = _fields(cell, VALUES, c, f, 1, PLAIN)
                        accs = _added(accs, plane_of(VALUES, c, f), v, w[t + 2], PLAIN)
    largest *= 1 / LARGEST_WEIGHT
    weight = tl.sum(weight, 0) * largest
    tiles = ()
    for n in tl.static_range(4):
        if is_coded(VALUES, n):
            tiles += (accs[n] * (largest / (CODE * _multiple(VALUES, n))) - (middle(VALUES, n) * weight)[None, :],)
        else:
            tiles += (accs[n],)
    acc = stack(stack(tiles[0], tiles[1]), stack(tiles[2], tiles[3]))
    return first_columns(Softmax(acc, tl.sum(total, 0), top), COLUMNS, SHAPE.HEADS)


@triton.constexpr_function
def _multiple(codes, plane):
    """What a plane's codes are multiplied by where they lie in a byte, or in a nibble brought to the lower half."""
    for cell in codes.cells:
        for field in cell.fields:
            if field.plane == plane:
                return 2.0**field.shift
    return 1.0


@triton.jit
def _queries(q, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Operands of a KV head's queries.

    Returns:
        of each plane, FP16 tiles [dims, columns] for those of ``_fields``; what a product counts, and what the middles
        add in that unit, [columns] each.
    """
    DP: tl.constexpr = SHAPE.DP
    h, dim = tl.arange(0, columns_of(SHAPE)), tl.arange(0, DP)
    inside = (dim < SHAPE.D)[:, None] & (h < SHAPE.GQA_GROUP)[None, :]
    x = tl.load(q.data + h[None, :] * q.head + dim[:, None], mask=inside, other=0.0).to(tl.float32)
    unit = tl.max(tl.abs(x), 0) * (1 / LARGEST_QUERY) + 1e-30
    middles = tl.zeros([DP], tl.float32)
    planes = ()
    for n in tl.static_range(4):
        middles = tl.where(dim // SHAPE.D4 == n, middle(CODES, n), middles)
        factor = 1 / (unit * _multiple(CODES, n))
        if has_words(SHAPE):
            planes += ((_query_tile(q, factor, n, 0, SHAPE), _query_tile(q, factor, n, 1, SHAPE)),)
        else:
            planes += ((_query_tile(q, factor, n, 0, SHAPE),),)
    return planes, unit * (1 / CODE), tl.sum(x * middles[:, None], 0) / unit * CODE


@triton.jit
def _query_tile(q, factor, plane: tl.constexpr, half: tl.constexpr, SHAPE: tl.constexpr):
    """Dims of a plane times factor; in words, of every two bytes the one that ``half`` says."""
    h = tl.arange(0, columns_of(SHAPE))
    if has_words(SHAPE):
        j = tl.arange(0, SHAPE.JP // 2) * 2 + half
    else:
        j = quad_order(tl.arange(0, SHAPE.JP))
    inside = (j < SHAPE.D4)[:, None] & (h < SHAPE.GQA_GROUP)[None, :]
    address = q.data + h[None, :] * q.head + plane * SHAPE.D4 + j[:, None]
    return (tl.load(address, mask=inside, other=0.0).to(tl.float32) * factor[None, :]).to(tl.float16)


@triton.jit
def _load_keys(
    records, base_a, base_b, CELL: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr
):
    """A cell of two pages' keys in the tile's order, of a nibble half the tile: words or bytes, see ``has_words``."""
    D4: tl.constexpr = SHAPE.D4
    QUARTER: tl.constexpr = PAGE // 4
    row = tl.arange(0, 2 * PAGE if is_byte(CODES, CELL) else PAGE)
    base = records + base_of(row // QUARTER % 2 == 1, base_a, base_b)
    start = start_of(CODES, CELL) + (row // (2 * QUARTER) * QUARTER + row % QUARTER) * D4
    if has_words(SHAPE):
        j = tl.arange(0, SHAPE.JP // 2)
        address = (base + start).to(tl.pointer_type(tl.int16))[:, None] + j[None, :]
        if SHAPE.JP == D4:
            return tl.load(address)
        else:
            return tl.load(address, mask=(j < D4 // 2)[None, :], other=0)
    else:
        j = tl.arange(0, SHAPE.JP)
        if PLAIN:
            j = quad_order(j)
        return tl.load((base + start)[:, None] + j[None, :])


@triton.jit
def _load_values(both, v_first, CELL: tl.constexpr, TOKENS: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """A cell of two pages' values, of one of its planes of tokens: int16 [VP / 4, 16 = (page, word)]."""
    ROWS: tl.constexpr = SHAPE.VP // 4
    QUARTER: tl.constexpr = PAGE // 4
    j, i = tl.arange(0, ROWS)[None, :, None], tl.arange(0, QUARTER // 2)[None, None, :]
    first: tl.constexpr = start_of(CODES, CELL) + TOKENS * SHAPE.D4 * QUARTER
    address = (both + first + (v_first // 4 + j) * QUARTER).to(tl.pointer_type(tl.int16)) + i
    if SHAPE.DIMS == SHAPE.VP:
        words = tl.load(address)
    else:
        words = tl.load(address, mask=j < SHAPE.DIMS // 4, other=0)
    return tl.reshape(tl.permute(words, (1, 0, 2)), [ROWS, QUARTER])


@triton.jit
def _added(accs, PLANE: tl.constexpr, v, w, PLAIN: tl.constexpr):
    """The sums with v w added to a plane's; v, w: tiles of the words' first bytes and of their second ones."""
    result = ()
    for n in tl.static_range(4):
        if n == PLANE:
            result += (half_dot(v[1], w[1], half_dot(v[0], w[0], accs[n], PLAIN), PLAIN),)
        else:
            result += (accs[n],)
    return result


@triton.constexpr_function
def _field_mask(codes, cell, field):
    return mask_of(codes, cell, field) << shift_of(codes, cell, field)


@triton.constexpr_function
def _ptx(codes, cell, field, upper):
    """Of two words or four bytes: first the first and third byte's codes, then the second and fourth one's."""
    mask = f"{_field_mask(codes, cell, field) * 0x00010001:#010x}"
    lines = ["{ .reg .b32 low, high;", "prmt.b32 high, $2, 0, 0x4341;"]
    low = "$2"
    if upper:
        lines += ["shr.u32 low, $2, 4;", "shr.u32 high, high, 4;"]
        low = "low"
    return "\n".join([*lines, f"and.b32 $0, {low}, {mask};", f"and.b32 $1, high, {mask}; }}"])


@triton.jit
def _fields(
    cell, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, UPPER: tl.constexpr, PLAIN: tl.constexpr
):
    """FP16 tiles of a plane's codes, times ``_multiple`` and ``CODE``, of a cell (UPPER: of its upper nibbles).

    Of words two tiles, of their first and their second bytes; of bytes one, of every four bytes in ``quad_order``.
    """
    MASK: tl.constexpr = _field_mask(CODES, CELL, FIELD)
    WORDS: tl.constexpr = cell.dtype == tl.int16
    if PLAIN and WORDS:
        return subnormal((cell >> (4 * UPPER)) & MASK), subnormal((cell >> (8 + 4 * UPPER)) & MASK)
    elif PLAIN:
        return (subnormal((cell >> (4 * UPPER)) & MASK),)
    elif WORDS:
        return tl.inline_asm_elementwise(
            asm=_ptx(CODES, CELL, FIELD, UPPER),
            constraints="=r,=r,r",
            args=[cell],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            tl.inline_asm_elementwise(
                asm=_ptx(CODES, CELL, FIELD, UPPER),
                constraints="=r,=r,r",
                args=[cell],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            ),
        )
