"""Decode attention over records of planes with products in FP16: what ``decode_half`` does for two bits.

A field's code, cut out of its cell by one AND for two codes, is a subnormal FP16 number, c 2^(f - 24) for a field that
lies f bits high. Queries and, at the end, sums carry the rest. As in ``decode_planes`` a row's gain is a factor of its
score, V's are folded into p, and the middles are taken off once:

    q k     = g_k (sum q c - sum q m)
    sum p v = sum (p g_v) c - m sum (p g_v)
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
    split_planes,
    subnormal,
)
from sglang_kvq.kernels.int8 import base_of, spread_sum, stack, tokens_of_tile
from sglang_kvq.kernels.planes import (
    bits_of,
    cell_count,
    field_count,
    is_coded,
    key_bytes,
    mask_of,
    middle,
    middles_of,
    plane_of,
    shares_of,
    shift_of,
    start_of,
    tile_gains,
)
from sglang_kvq.kernels.softmax import NEVER, Softmax, first_columns


@triton.jit
def history_half_planes(
    q, item, table, records, v_first, scale_log2, RECORD: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr
):
    """``decode_planes.history_planes``, one column a query head; two pages a turn."""
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    ROWS: tl.constexpr = SHAPE.VP // 4
    PAGE_BYTES: tl.constexpr = SHAPE.KV_HEADS * RECORD.bytes

    queries, unit, from_middles = _queries(q, scale_log2, KEYS, SHAPE)
    second, _, token = tokens_of_tile()
    # K's gains and V's, one behind the other: [page, which, token].
    gains = KEYS.gains + tl.arange(0, 2)[None, :, None] * PAGE + tl.arange(0, PAGE)[None, None, :]

    accs = ()
    for _ in tl.static_range(4):
        accs += (tl.zeros([ROWS, COLUMNS], tl.float32),)
    weight = tl.zeros([8, COLUMNS], tl.float32)  # sum p g_v
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

        products = _products(records, base_a, base_b, queries, KEYS, SHAPE, PLAIN)
        x = (products * unit[None, :] - from_middles[None, :]) * g_k[:, None]
        if (index + 2) * PAGE > limit:
            seen = (index + second.to(tl.int32)) * PAGE + token < limit
            x = tl.where(seen[:, None], x, NEVER)
            g_v = tl.where(seen, g_v, 0.0)  # of another's, which may be the largest

        new_top = tl.maximum(top, tl.max(x, 0))
        decay = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(x - top[None, :])
        total = total * decay[None, :] + spread_sum(p, COLUMNS)
        p *= g_v[:, None]
        weight = weight * decay[None, :] + spread_sum(p, COLUMNS)
        new_largest = tl.maximum(largest, tl.max(g_v, 0))
        decay *= largest / new_largest
        largest = new_largest
        weights = split_planes((p * (LARGEST_WEIGHT / largest)).to(tl.float16), COLUMNS)
        accs = _with_values(accs, decay, both, v_first, weights, VALUES, SHAPE, PLAIN)
    weight = tl.sum(weight, 0)
    tiles = ()
    for n in tl.static_range(4):
        if is_coded(VALUES, n):
            tiles += (accs[n] * (largest * _value_unit(VALUES, n)) - (middle(VALUES, n) * weight)[None, :],)
        else:
            tiles += (accs[n],)
    acc = stack(stack(tiles[0], tiles[1]), stack(tiles[2], tiles[3]))
    return first_columns(Softmax(acc, tl.sum(total, 0), top), COLUMNS, SHAPE.HEADS)


@triton.constexpr_function
def lies(codes, plane):
    """How many bits high a plane's codes lie in their cell; 0 if it has none."""
    return sum(field.shift for cell in codes.cells for field in cell.fields if field.plane == plane)


@triton.constexpr_function
def _value_unit(codes, plane):
    """What a product of V counts, by the largest gain."""
    return 0.5 ** lies(codes, plane) / (LARGEST_WEIGHT.value * CODE.value)


@triton.jit
def _queries(q, scale_log2, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Operands of a KV head's queries, each plane divided by how high its codes lie.

    Returns:
        the four planes, FP16 [JP, columns]; what a product counts, and what the middles add, [columns] each.
    """
    DP: tl.constexpr = SHAPE.DP
    h, dim = tl.arange(0, columns_of(SHAPE)), tl.arange(0, DP)
    inside = (dim < SHAPE.D)[:, None] & (h < SHAPE.GQA_GROUP)[None, :]
    x = tl.load(q.data + h[None, :] * q.head + dim[:, None], mask=inside, other=0.0).to(tl.float32)
    unit = tl.max(tl.abs(x), 0) * (1 / LARGEST_QUERY) + 1e-30
    middles = middles_of(dim, CODES, SHAPE)
    planes = ()
    for p in tl.static_range(4):
        planes += (_query_plane(q, 1 / unit, p, CODES, SHAPE),)
    return planes, unit * (scale_log2 / CODE), tl.sum(x * middles[:, None], 0) * scale_log2


@triton.jit
def _query_plane(q, factor, PLANE: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    h, j = tl.arange(0, columns_of(SHAPE)), tl.arange(0, SHAPE.JP)
    inside = (j < SHAPE.D4)[:, None] & (h < SHAPE.GQA_GROUP)[None, :]
    address = q.data + h[None, :] * q.head + (PLANE * SHAPE.D4 + j)[:, None]
    x = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    return (x * (factor * 0.5 ** lies(CODES, PLANE))[None, :]).to(tl.float16)


@triton.jit
def _products(records, base_a, base_b, queries, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Codes of two pages' keys times queries: FP32 [2 PAGE, columns].

    Where tokens share a byte, each share's products are computed alone and stacked. Stacked codes would be an operand
    laid out for 32 columns of K, and with JP of 16 the product be wrong (Triton 3.6, ``computeOrigBitWidth``).
    """
    products = tl.zeros([2 * PAGE, columns_of(SHAPE)], tl.float32)
    for c in tl.static_range(cell_count(CODES)):
        bytes = key_bytes(records, base_a, base_b, c, CODES, SHAPE.JP, SHAPE)
        if shares_of(CODES, c) == 1:
            products = _with_share(products, bytes, queries, c, 0, CODES, PLAIN)
        else:
            products += _stacked(bytes, queries, c, 0, shares_of(CODES, c), CODES, SHAPE, PLAIN)
    return products


@triton.jit
def _stacked(
    bytes,
    queries,
    CELL: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
    SHAPE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """A cell's products of so many shares, from the first, one below the other."""
    if COUNT == 1:
        zero = tl.zeros([bytes.shape[0], columns_of(SHAPE)], tl.float32)
        return _with_share(zero, bytes, queries, CELL, FIRST, CODES, PLAIN)
    else:
        HALF: tl.constexpr = COUNT // 2
        above = _stacked(bytes, queries, CELL, FIRST, HALF, CODES, SHAPE, PLAIN)
        return stack(above, _stacked(bytes, queries, CELL, FIRST + HALF, HALF, CODES, SHAPE, PLAIN))


@triton.jit
def _with_share(
    products, bytes, queries, CELL: tl.constexpr, SHARE: tl.constexpr, CODES: tl.constexpr, PLAIN: tl.constexpr
):
    """Products of every field of one share of a cell, added."""
    for f in tl.static_range(field_count(CODES, CELL)):
        k = _of_bytes(bytes, CODES, CELL, f, SHARE, PLAIN)
        products = half_dot(k, queries[plane_of(CODES, CELL, f)], products, PLAIN)
    return products


@triton.jit
def _of_bytes(
    bytes, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, SHARE: tl.constexpr, PLAIN: tl.constexpr
):
    """FP16 of each byte: a field's code of the token that has this share of it."""
    if PLAIN:
        return subnormal((bytes.to(tl.int16) >> (bits_of(CODES, CELL) * SHARE)) & field_mask(CODES, CELL, FIELD))
    else:
        return tl.inline_asm_elementwise(
            asm=bytes_ptx(CODES, CELL, FIELD, SHARE),
            constraints="=&r,=&r,r",
            args=[bytes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.constexpr_function
def field_mask(codes, cell, field):
    """A field's bits where they lie in their cell."""
    return mask_of(codes, cell, field) << shift_of(codes, cell, field)


@triton.constexpr_function
def bytes_ptx(codes, cell, field, share):
    """PTX of ``_of_bytes``: of four bytes $2, whichever they are, to two words. ptxas does once what fields share."""
    mask = field_mask(codes, cell, field) * 0x10001
    lines = ["{", ".reg .b32 down;", f"shr.u32 down, $2, {bits_of(codes, cell) * share};"]
    lines += ["prmt.b32 $0, down, 0, 0x4140;", "prmt.b32 $1, down, 0, 0x4342;"]  # two bytes, a zero above each
    return "\n".join([*lines, f"and.b32 $0, $0, {mask:#x};", f"and.b32 $1, $1, {mask:#x};", "}"])


@triton.jit
def _with_values(accs, decay, both, v_first, weights, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """The planes' sums [VP / 4, columns], times decay, with products of V's codes and weights added.

    weights: FP16 [16 = (page, i), columns] of even and odd tokens of each plane of tokens.
    """
    # A turn's sums begin at zero and are added in FP32. Products cut off what lies below their accumulator's last bit,
    # and over 100K tokens that would be a hundredth of what is left once the middles are taken off.
    sums = ()
    for n in tl.static_range(4):
        sums += (tl.zeros_like(accs[n]),)
    for c in tl.static_range(cell_count(CODES)):
        for t in tl.static_range(4 // shares_of(CODES, c)):
            words = _value_words(both, v_first, c, t, CODES, SHAPE)
            for f in tl.static_range(field_count(CODES, c)):
                for share in tl.static_range(shares_of(CODES, c)):
                    even, odd = _of_words(words, CODES, c, f, share, PLAIN)
                    w = weights[t + share * (4 // shares_of(CODES, c))]
                    sums = _added(sums, plane_of(CODES, c, f), even, odd, w, PLAIN)
    result = ()
    for n in tl.static_range(4):
        if is_coded(CODES, n):
            result += (accs[n] * decay[None, :] + sums[n],)
        else:
            result += (accs[n],)
    return result


@triton.jit
def _added(sums, PLANE: tl.constexpr, even, odd, w, PLAIN: tl.constexpr):
    """The sums with even [VP / 4, 16] w[0] and odd w[1] added to a plane's."""
    result = ()
    for n in tl.static_range(4):
        if n == PLANE:
            result += (half_dot(odd, w[1], half_dot(even, w[0], sums[n], PLAIN), PLAIN),)
        else:
            result += (sums[n],)
    return result


@triton.jit
def _value_words(both, v_first, CELL: tl.constexpr, TOKENS: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """A cell of two pages' values, of one of its planes of tokens: int16 [VP / 4, 16 = (page, i)], two tokens each."""
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
def _of_words(
    words, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, SHARE: tl.constexpr, PLAIN: tl.constexpr
):
    """Two FP16 tiles, of the lower and of the upper byte of each word: a field's code of one of its tokens."""
    if PLAIN:
        down = words.to(tl.int32) >> (bits_of(CODES, CELL) * SHARE)
        mask = field_mask(CODES, CELL, FIELD)
        return subnormal(down & mask), subnormal((down >> 8) & mask)
    else:
        return tl.inline_asm_elementwise(
            asm=words_ptx(CODES, CELL, FIELD, SHARE),
            constraints="=&r,=&r,r",
            args=[words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.constexpr_function
def words_ptx(codes, cell, field, share):
    """PTX of ``_of_words``: two words $2 to $0, of their lower bytes, and $1, of the upper ones."""
    mask = field_mask(codes, cell, field) * 0x10001
    lines = ["{", ".reg .b32 down;", f"shr.u32 down, $2, {bits_of(codes, cell) * share};"]
    lines += [f"and.b32 $0, down, {mask:#x};", "prmt.b32 $1, down, 0, 0x4341;", f"and.b32 $1, $1, {mask:#x};", "}"]
    return "\n".join(lines)
