"""Decode attention over records of planes with FP16 products; the counterpart of ``history_fp16`` for two bits.

One AND cuts two codes of a field out of a cell. Each is a subnormal FP16 number, c 2^(f - 24) for a field from bit f.
Queries and, at the end, sums carry the remaining factor. As in ``history_planes_int8``, a row's gain is a factor of its
score, V's gains are folded into p, and the middles are subtracted once:

    q k     = g_k (sum q c - sum q m)          products begin at minus the middles' part
    sum p v = sum (p g_v) c - m sum (p g_v)

A byte's last field needs no AND: the whole byte is used for it (``is_whole``). What the byte's other fields add is
subtracted from their queries, or from sums. If a plane's dims fill an INT8 product, K's products are in INT8
(``key_planes_int8``).

Scores are relative to the maximum at the last rescaling of sums. The first iteration rescales. Others do so at a tile's
end, if a p would exceed the range of FP16 (``softmax.have_risen``), or if a g_v has the largest exponent so far. One
power of two for all heads, that of the largest g_v so far, keeps weights p g_v in range. This power and the unit of
queries become part of the gains by an addition to the gain's byte.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.decode.history_fp16 import (
    CODE,
    LARGEST_QUERY,
    bases,
    columns_of,
    half_dot,
    has_int8_keys,
    power_of_two,
    split_planes,
    subnormal,
)
from sglang_kvq.kernels.decode.key_planes_int8 import int8_products, int8_queries
from sglang_kvq.kernels.device.codes import page_bytes
from sglang_kvq.kernels.device.common import PAGE, page_of, quad_order
from sglang_kvq.kernels.device.int8 import base_of, joined, stack, tokens_of_tile
from sglang_kvq.kernels.device.plane_codes import (
    GAIN_BIAS,
    bits_of,
    cell_count,
    cut_of,
    field_count,
    gain_of,
    is_coded,
    key_address,
    middle,
    operand_of,
    plane_of,
    shares_of,
    start_of,
    tile_bytes,
)
from sglang_kvq.kernels.device.softmax import NEVER, Softmax, first_columns, have_risen, raised
from sglang_kvq.kernels.device.unpack import own_tiles

#: True if an operand of joined tiles has two neighbors in each lane, not four: since Triton 3.8.
_PAIRS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8))
#: Exponent bits of a gain's byte.
_EXPONENT = tl.constexpr(0xF8)


@triton.jit
def history_half_planes(
    q, item, table, records, v_first, scale_log2, RECORD: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr,
    SHARED_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Attends like ``history_planes_int8.history_planes``, one column per query head; two pages per iteration.

    Weights become operands through shared memory, or lanes exchange them. With eight columns both take equally many
    instructions; with sixteen, exchange takes fifty more. Triton chooses by the narrowest load that an operand comes
    from: that of gains' bytes, unless a branch may replace them.
    """
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    ROWS: tl.constexpr = SHAPE.VP // 4
    PAGE_BYTES: tl.constexpr = page_bytes(RECORD, SHAPE.KV_HEADS)

    if _has_int8_keys(SHAPE):
        queries, start, unit = int8_queries(q, scale_log2, KEYS, SHAPE)
        less = (127 << 3) - GAIN_BIAS
    else:
        queries, start, less = _queries(q, scale_log2, KEYS, SHAPE)
    second, _, token = tokens_of_tile()
    # K's gains, then V's: [page, which, token].
    gains = KEYS.gains + tl.arange(0, 2)[None, :, None] * PAGE + tl.arange(0, PAGE)[None, None, :]

    accs = ()
    for _ in tl.static_range(4):
        accs += (tl.zeros([ROWS, COLUMNS], tl.float32),)
    weight = tl.zeros([8, COLUMNS], tl.float32)  # sum p g_v, the same in each row
    top = tl.zeros([COLUMNS], tl.float32)
    total = tl.zeros([16, COLUMNS], tl.float32)
    largest = 0  # byte of a gain: the power of two in the largest g_v so far
    page_a, page_b = item.page_a.to(tl.int64), item.page_b.to(tl.int64)
    last = item.last_page
    limit = tl.minimum(last * PAGE, item.length)
    for index in tl.range(item.first_page, last, 2):
        base_a, base_b = page_a * PAGE_BYTES, page_b * PAGE_BYTES
        page_a = page_of(table, tl.minimum(index + 2, last - 1))
        page_b = page_of(table, tl.minimum(index + 3, last - 1))
        both = bases(records, second, base_a, base_b, 2)[1]
        k_bytes, v_bytes = tile_bytes(tl.load(both + gains))  # [TILE] each

        begins, ends = index == item.first_page, (index + 2) * PAGE > limit
        most = tl.max(v_bytes, 0) & _EXPONENT
        if _has_int8_keys(SHAPE):
            x = int8_products(records, base_a, base_b, queries, start, unit, KEYS, SHAPE, PLAIN)
        else:
            x = _products(records, base_a, base_b, queries, start, KEYS, SHAPE, PLAIN)
        x = x * _power(k_bytes, less)[:, None] - top[None, :]
        if have_risen(x, begins | ends | (most > largest)):
            seen = (index + second.to(tl.int32)) * PAGE + token < limit
            x = tl.where(seen[:, None], x, NEVER)
            own = tl.where(seen, v_bytes, 0)  # an unseen token's gain must not count as the largest
            if not SHARED_WEIGHTS:
                v_bytes = own
            rise = raised(x, begins, 0)
            x -= rise[None, :]
            top += rise
            decay = tl.exp2(tl.minimum(-rise, 0.0))
            total *= decay[None, :]
            new_largest = tl.maximum(largest, tl.max(own, 0) & _EXPONENT)
            decay *= _power(largest, new_largest)
            weight *= decay[None, :]
            accs = _scaled(accs, decay, VALUES)
            largest = new_largest

        p = split_planes(tl.exp2(x), COLUMNS)
        g = split_planes(_power(v_bytes, largest)[:, None], 1)
        weights = ()
        for n in tl.static_range(4):
            total += p[n][0] + p[n][1]
            weights += (((p[n][0] * g[n][0]).to(tl.float16), (p[n][1] * g[n][1]).to(tl.float16)),)
        weight += _sum(weights, COLUMNS, PLAIN)
        pages = records + base_of(tl.arange(0, 2 * ROWS) >= ROWS, base_a, base_b)
        accs = _with_values(accs, pages, v_first, weights, VALUES, SHAPE, PLAIN)
    one = gain_of(largest)  # unit of a weight
    tiles = _values(accs, tl.max(weight, 0) * one, one, VALUES)
    acc = stack(stack(tiles[0], tiles[1]), stack(tiles[2], tiles[3]))
    return first_columns(Softmax(acc, tl.sum(total, 0), top), COLUMNS, SHAPE.HEADS)


@triton.constexpr_function
def _has_int8_keys(shape):
    """Tells if products of K are in INT8. With more than eight heads, INT8 products take too many registers."""
    return has_int8_keys(shape) and shape.HEADS <= 8


@triton.constexpr_function
def has_words(shape):
    """Tells if a plane of K has enough bytes per token to fill a product when they are read two at a time."""
    return shape.JP >= 32


@triton.constexpr_function
def lies(codes, plane):
    """Returns the bit at which a plane's codes begin in their cell; 0 if the plane has no codes."""
    return sum(field.shift for cell in codes.cells for field in cell.fields if field.plane == plane)


@triton.constexpr_function
def is_whole(codes, cell, field):
    """Tells if the whole byte is used for a field: the last of several, in a byte that one token owns."""
    return codes.cells[cell].bits == 8 and field > 0 and field == len(codes.cells[cell].fields) - 1


@triton.constexpr_function
def whole_of(codes, plane):
    """Returns the other plane for which a whole byte with this plane's codes is used; -1 if there is none."""
    for n, cell in enumerate(codes.cells):
        last = cell.fields[-1].plane
        if is_whole(codes, n, len(cell.fields) - 1) and last != plane and plane in [x.plane for x in cell.fields]:
            return last
    return -1


@triton.constexpr_function
def _cut(codes, cell, field, share):
    """Returns the mask of a byte's bits that represent the field of a share's token."""
    if is_whole(codes, cell, field):
        return 0xFF
    return cut_of(codes, cell, field, share)


@triton.jit
def _power(byte, less):
    """Returns 2^((byte - less) / 8) for multiples of 8, float32; other bytes give gains' values in between.

    Bytes are shifted one by one: with the same ``less`` for all, that is one instruction per byte.
    """
    return ((byte << 20) + (((127 << 3) - less) << 20)).to(tl.float32, bitcast=True)


@triton.jit
def _queries(q, scale_log2, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Converts a KV head's queries to operands.

    Returns:
        the operands for every field, see ``_query_tiles``, by cell and share (``operand_of``); the start of products,
        [columns]; their unit, as ``less`` of ``_power``.
    """
    DP: tl.constexpr = SHAPE.DP
    h, dim = tl.arange(0, columns_of(SHAPE)), tl.arange(0, DP)
    inside = (dim < SHAPE.D)[:, None] & (h < SHAPE.GQA_GROUP)[None, :]
    x = tl.load(q.data + h[None, :] * q.head + dim[:, None], mask=inside, other=0.0).to(tl.float32)
    unit = power_of_two(tl.max(tl.abs(x)) * (scale_log2 / LARGEST_QUERY) + 1e-20)
    tiles = ()
    middles = tl.zeros([columns_of(SHAPE)], tl.float32)
    for c in tl.static_range(cell_count(CODES)):
        for share in tl.static_range(shares_of(CODES, c)):
            for f in tl.static_range(field_count(CODES, c)):
                operands = _query_tiles(q, scale_log2 / unit, c, share, f, CODES, SHAPE)
                tiles += (operands,)
                if share == 0:  # from FP16 values of queries, so that only a code's distance from its middle matters
                    for n in tl.static_range(len(operands)):
                        middles += tl.sum(operands[n].to(tl.float32), 0) * _cut_middle(CODES, c, f)
    unit *= 1 / CODE
    return tiles, middles * -CODE, 2 * (127 << 3) - GAIN_BIAS - (unit.to(tl.int32, bitcast=True) >> 20)


@triton.constexpr_function
def _cut_middle(codes, cell, field):
    """Returns the middle of the bits cut out for a field of the first share."""
    fields = codes.cells[cell].fields
    return sum(
        middle(codes, x.plane) * 2**x.shift for x in (fields if is_whole(codes, cell, field) else [fields[field]])
    )


@triton.jit
def _query_tiles(
    q, factor, CELL: tl.constexpr, SHARE: tl.constexpr, FIELD: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr
):
    """Returns the operands for a field's ``_key_tiles``, FP16 [a tile's columns, columns] each."""
    if has_words(SHAPE):
        j = tl.arange(0, SHAPE.JP // 2) * 2
        lower = _query_tile(q, factor, j, CELL, SHARE, FIELD, CODES, SHAPE)
        return lower, _query_tile(q, factor, j + 1, CELL, SHARE, FIELD, CODES, SHAPE)
    else:
        return (_query_tile(q, factor, _byte_order(SHAPE.JP), CELL, SHARE, FIELD, CODES, SHAPE),)


@triton.jit
def _byte_order(JP: tl.constexpr):
    """Returns the order of a row's bytes in the tile of ``_key_tiles`` that joins two bytes' codes."""
    k = tl.arange(0, JP)
    if _PAIRS:
        return k % (JP // 2) * 2 + k // (JP // 2)
    else:
        return quad_order(k)


@triton.jit
def _query_tile(
    q,
    factor,
    j,
    CELL: tl.constexpr,
    SHARE: tl.constexpr,
    FIELD: tl.constexpr,
    CODES: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Multiplies elements j of the field's plane by ``factor``, divided by the weight of the codes' lowest bit."""
    PLANE: tl.constexpr = plane_of(CODES, CELL, FIELD)
    x = _query_plane(q, j, PLANE, SHAPE) * 0.5 ** lies(CODES, PLANE)
    if whole_of(CODES, PLANE) >= 0:
        x -= _query_plane(q, j, whole_of(CODES, PLANE), SHAPE) * 0.5 ** lies(CODES, whole_of(CODES, PLANE))
    return (x * (factor * 0.5 ** (bits_of(CODES, CELL) * SHARE))).to(tl.float16)


@triton.jit
def _query_plane(q, j, plane: tl.constexpr, SHAPE: tl.constexpr):
    h = tl.arange(0, columns_of(SHAPE))
    inside = (j < SHAPE.D4)[:, None] & (h < SHAPE.GQA_GROUP)[None, :]
    address = q.data + h[None, :] * q.head + (plane * SHAPE.D4 + j)[:, None]
    return tl.load(address, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _products(records, base_a, base_b, queries, start, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Adds products of two pages' key codes and queries to start: FP32 [2 PAGE, columns].

    Each share's tokens are separate rows. Cells that most tokens share come first. The next cells' products start at
    the sums of these, stacked one below the other.
    """
    LAST: tl.constexpr = cell_count(CODES) - 1
    ROWS: tl.constexpr = 2 * PAGE // shares_of(CODES, LAST)
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    parts = ()
    for _ in tl.static_range(shares_of(CODES, LAST)):
        parts += (tl.broadcast_to(start[None, :], [ROWS, COLUMNS]),)
    for n in tl.static_range(cell_count(CODES)):
        parts = joined(parts, shares_of(CODES, LAST - n))
        words = _key_words(records, base_a, base_b, LAST - n, CODES, SHAPE)
        parts = _with_cell(parts, words, queries, LAST - n, CODES, PLAIN)
    return joined(parts, 1)[0]


@triton.jit
def _key_words(records, base_a, base_b, CELL: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Loads a cell of two pages' keys: int16 [2 PAGE / shares, JP / 2], two bytes each."""
    address = key_address(records, base_a, base_b, CELL, CODES, SHAPE).to(tl.pointer_type(tl.int16))
    j = tl.arange(0, SHAPE.JP // 2)[None, :]
    if SHAPE.D4 == SHAPE.JP:
        return tl.load(address[:, None] + j)
    else:
        inside = (j < SHAPE.D4 // 2) & (tl.arange(0, address.shape[0]) >= 0)[:, None]
        return tl.load(address[:, None] + j, mask=inside, other=0)


@triton.jit
def _with_cell(parts, words, queries, CELL: tl.constexpr, CODES: tl.constexpr, PLAIN: tl.constexpr):
    """Adds a cell's products to the parts of its shares."""
    result = ()
    for share in tl.static_range(shares_of(CODES, CELL)):
        part = parts[share]
        for f in tl.static_range(field_count(CODES, CELL)):
            tiles = _key_tiles(words, CODES, CELL, f, share, PLAIN)
            operands = queries[operand_of(CODES, CELL, share, f)]
            for n in tl.static_range(len(tiles)):
                part = half_dot(tiles[n], operands[n], part, PLAIN)
        result += (part,)
    return result


@triton.jit
def _key_tiles(
    words, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, SHARE: tl.constexpr, PLAIN: tl.constexpr
):
    """Extracts FP16 tiles of a field's codes of one share, K's bytes in the order of ``_query_tiles``.

    Bytes stay in the lanes that have their words; a lane has two or four adjacent columns, depending on Triton's
    release.
    """
    lower, upper = _of_words(words, CODES, CELL, FIELD, SHARE, PLAIN)
    if words.shape[1] >= 16:
        return lower, upper
    else:
        ROWS: tl.constexpr = words.shape[0]
        WORDS: tl.constexpr = words.shape[1]
        x = tl.join(lower, upper)  # [ROWS, WORDS, byte]
        if _PAIRS:
            return (tl.reshape(tl.permute(x, (0, 2, 1)), [ROWS, 2 * WORDS]),)
        else:
            x = tl.reshape(x, [ROWS, WORDS // 2, 2, 2])
            return (tl.reshape(tl.permute(x, (0, 1, 3, 2)), [ROWS, 2 * WORDS]),)


@triton.jit
def _scaled(accs, factor, CODES: tl.constexpr):
    """Multiplies the planes' sums by each column's factor."""
    result = ()
    for n in tl.static_range(4):
        if is_coded(CODES, n):
            result += (accs[n] * factor[None, :],)
        else:
            result += (accs[n],)
    return result


@triton.jit
def _with_values(accs, pages, v_first, weights, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Adds products of V's codes and weights to the planes' sums [VP / 4, columns].

    pages: pointers to records, [2 VP / 4 = (page, j)]; weights: FP16 [16 = (page, i), columns] of even and odd tokens
    of each plane of tokens.
    """
    # An iteration's sums begin at zero and are added in FP32. Products truncate below their accumulator's last bit.
    # Over 100K tokens that would be a hundredth of the result after the middles are subtracted.
    sums = ()
    for n in tl.static_range(4):
        sums += (tl.zeros_like(accs[n]),)
    for c in tl.static_range(cell_count(CODES)):
        for t in tl.static_range(4 // shares_of(CODES, c)):
            words = _value_words(pages, v_first, c, t, CODES, SHAPE)
            for f in tl.static_range(field_count(CODES, c)):
                for share in tl.static_range(shares_of(CODES, c)):
                    even, odd = _of_words(words, CODES, c, f, share, PLAIN)
                    w = _divided(weights[t + share * (4 // shares_of(CODES, c))], bits_of(CODES, c) * share)
                    sums = _added(sums, plane_of(CODES, c, f), even, odd, w, PLAIN)
    result = ()
    for n in tl.static_range(4):
        if is_coded(CODES, n):
            result += (accs[n] + sums[n],)
        else:
            result += (accs[n],)
    return result


@triton.jit
def _divided(w, bits: tl.constexpr):
    """Divides even and odd tokens' weights, for codes that are ``bits`` bits higher."""
    if bits == 0:
        return w
    else:
        return (w[0] * 0.5**bits).to(tl.float16), (w[1] * 0.5**bits).to(tl.float16)


@triton.jit
def _sum(weights, COLUMNS: tl.constexpr, PLAIN: tl.constexpr):
    """Sums weights over all tokens into each of 8 rows, by products with ones, so that V's middles cancel exactly."""
    total = tl.zeros([16, COLUMNS], tl.float32)
    ones = tl.full([16, 16], 1.0, tl.float16)
    for n in tl.static_range(4):
        total = half_dot(ones, weights[n][1], half_dot(ones, weights[n][0], total, PLAIN), PLAIN)
    first, _ = tl.split(tl.permute(tl.reshape(total, [2, 8, COLUMNS]), (1, 2, 0)))
    return first


@triton.jit
def _values(accs, weight, one, CODES: tl.constexpr):
    """Returns the planes' sums of values, [VP / 4, columns] each.

    weight: sum p g_v, [columns]; one: the unit of a weight.
    """
    sums = ()
    for n in tl.static_range(4):
        sums += (accs[n] * (one * (0.5 ** lies(CODES, n) / CODE)),)
    tiles = ()
    for n in tl.static_range(4):
        x = sums[n]
        for other in tl.static_range(4):
            if whole_of(CODES, other) == n:
                x -= sums[other] * 2.0 ** (lies(CODES, other) - lies(CODES, n))
        if is_coded(CODES, n):
            x -= (middle(CODES, n) * weight)[None, :]
        tiles += (x,)
    return tiles


@triton.jit
def _added(sums, PLANE: tl.constexpr, even, odd, w, PLAIN: tl.constexpr):
    """Adds even [VP / 4, 16] w[0] and odd w[1] to a plane's sums."""
    result = ()
    for n in tl.static_range(4):
        if n == PLANE:
            result += (half_dot(odd, w[1], half_dot(even, w[0], sums[n], PLAIN), PLAIN),)
        else:
            result += (sums[n],)
    return result


@triton.jit
def _value_words(pages, v_first, CELL: tl.constexpr, TOKENS: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Loads one token plane of a cell of two pages' values: int16 [VP / 4, 16 = (page, i)], two tokens each.

    The tile has one axis for pages and rows, so that rows of a page stay adjacent in shared memory. With an axis for
    pages, Triton 3.8 puts the two pages' rows alternately. Then, loops over five such tiles took 1.3 times as long.
    """
    ROWS: tl.constexpr = SHAPE.VP // 4
    QUARTER: tl.constexpr = PAGE // 4
    row, i = tl.arange(0, 2 * ROWS), tl.arange(0, QUARTER // 2)[None, :]
    j = row % ROWS
    first: tl.constexpr = start_of(CODES, CELL) + TOKENS * SHAPE.D4 * QUARTER
    address = (pages + first + (v_first // 4 + j) * QUARTER).to(tl.pointer_type(tl.int16))[:, None] + i
    if SHAPE.DIMS == SHAPE.VP:
        words = tl.load(address)
    else:
        words = tl.load(address, mask=(j < SHAPE.DIMS // 4)[:, None] & (i >= 0), other=0)
    words = tl.reshape(words, [2, ROWS, QUARTER // 2])
    return tl.reshape(tl.permute(words, (1, 0, 2)), [ROWS, QUARTER])


@triton.jit
def _of_words(
    words, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, SHARE: tl.constexpr, PLAIN: tl.constexpr
):
    """Extracts a field's code of one token as two FP16 tiles, from the lower and the upper byte of each word."""
    if PLAIN:
        cut = _cut(CODES, CELL, FIELD, SHARE)
        return subnormal(words & cut), subnormal((words.to(tl.int32) >> 8) & cut)
    else:
        tiles = tl.inline_asm_elementwise(
            asm=words_ptx(CODES, CELL, FIELD, SHARE),
            constraints="=&r,=&r,r",
            args=[words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        return own_tiles(tiles, 0)


@triton.constexpr_function
def words_ptx(codes, cell, field, share):
    """Returns the PTX of ``_of_words`` for two words, $2: $0 has their lower bytes, $1 the upper ones.

    ptxas merges the instructions that fields and shares have in common.
    """
    cut = _cut(codes, cell, field, share)
    lines = ["{", f"and.b32 $0, $2, {cut * 0x10001:#x};", "prmt.b32 $1, $2, 0, 0x4341;"]
    if cut != 0xFF:
        lines.append(f"and.b32 $1, $1, {cut * 0x10001:#x};")
    return "\n".join([*lines, "}"])
