"""Decode attention over records of planes (``formats.planes``) with INT8 products and one gain per row.

With codes c, each plane's middle m and a row's gains g,

    q k     = g_k (sum q c - sum q m)          the second sum is one number per query head
    sum p v = sum (p g_v) c - m sum (p g_v)    g_v is folded into p

Products run on INT8 tensor cores: keys as [tokens, dims of a plane], values as [dims of a plane, tokens]. A plane
without bits takes no product.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.device.codes import page_bytes
from sglang_kvq.kernels.device.common import PAGE, page_of
from sglang_kvq.kernels.device.int8 import (
    MAGIC_BITS,
    base_of,
    empty_groups,
    join_parts,
    query_plane,
    spread_sum,
    stack,
    tokens_of_tile,
    weight_operands,
)
from sglang_kvq.kernels.device.plane_codes import (
    cell_count,
    field_codes,
    field_count,
    gain_of,
    is_coded,
    key_bytes,
    middle,
    multiple,
    plane_of,
    shares_of,
    start_of,
    tile_bytes,
)
from sglang_kvq.kernels.device.softmax import NEVER, Softmax


@triton.jit
def history_planes(
    q, item, table, records, v_first, scale_log2, RECORD: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr
):
    """Attends like ``history_general``, with its tiles, tokens and arguments, for records of planes.

    Rows of the result's acc are ``plane_codes.plane_dims``. Each iteration loads gains and codes, computes scores plane
    by plane, updates the softmax and adds V's products plane by plane.
    """
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    TILE: tl.constexpr = 2 * PAGE
    HEADS: tl.constexpr = SHAPE.HEADS
    COLUMNS: tl.constexpr = 2 * HEADS
    ROWS: tl.constexpr = SHAPE.VP // 4
    PAGE_BYTES: tl.constexpr = page_bytes(RECORD, SHAPE.KV_HEADS)

    queries, start, unit = _queries(q, scale_log2, KEYS, SHAPE)
    second, _, token = tokens_of_tile()
    ones = tl.full([TILE], 1.0, tl.float32)
    # K's gains, then V's: [page, which, token].
    gains = KEYS.gains + tl.arange(0, 2)[None, :, None] * PAGE + tl.arange(0, PAGE)[None, None, :]

    accs, _ = empty_groups(4, ROWS, HEADS)
    weight = tl.zeros([8, HEADS], tl.float32)  # sum p g_v
    top = tl.full([HEADS], NEVER, tl.float32)
    total = tl.zeros([8, HEADS], tl.float32)
    page_a, page_b = item.page_a.to(tl.int64), item.page_b.to(tl.int64)
    last = item.last_page
    limit = tl.minimum(last * PAGE, item.length)
    for index in tl.range(item.first_page, last, 2):
        base_a, base_b = page_a * PAGE_BYTES, page_b * PAGE_BYTES
        page_a = page_of(table, tl.minimum(index + 2, last - 1))
        page_b = page_of(table, tl.minimum(index + 3, last - 1))
        both = records + base_of(tl.arange(0, 2) == 1, base_a, base_b)[:, None, None]  # [2, 1, 1]
        k_bytes, v_bytes = tile_bytes(tl.load(both + gains))  # [TILE] each
        g_k, g_v = gain_of(k_bytes), gain_of(v_bytes)

        products = tl.broadcast_to(start[None, :], [TILE, COLUMNS])
        for c in tl.static_range(cell_count(KEYS)):
            bytes = key_bytes(records, base_a, base_b, c, KEYS, SHAPE.INT8_JP, SHAPE)
            for f in tl.static_range(field_count(KEYS, c)):
                k = _key_codes(bytes, KEYS, c, f, PLAIN)
                products = tl.dot(k, queries[plane_of(KEYS, c, f)], products, out_dtype=tl.int32)
        x = join_parts(products, TILE, HEADS) * g_k[:, None]
        if (index + 2) * PAGE > limit:
            position = (index + second.to(tl.int32)) * PAGE + token
            x = tl.where((position < limit)[:, None], x, NEVER)

        new_top = tl.maximum(top, tl.max(x, 0) * unit)
        decay = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(x * unit[None, :] - top[None, :])
        total = total * decay[None, :] + spread_sum(p, HEADS)
        weight = weight * decay[None, :] + spread_sum(p * g_v[:, None], HEADS)
        weights, p_unit = weight_operands(p, g_v, ones, HEADS)
        sums = _value_products(both, v_first, weights, VALUES, SHAPE, PLAIN)
        old_accs = accs
        accs = ()
        for n in tl.static_range(4):
            if is_coded(VALUES, n):
                part = join_parts(sums[n], ROWS, HEADS) * (p_unit * (1 / multiple(VALUES, n)))[None, :]
                accs += (old_accs[n] * decay[None, :] + part,)
            else:
                accs += (old_accs[n],)
    weight = tl.sum(weight, 0)
    tiles = ()
    for n in tl.static_range(4):
        if is_coded(VALUES, n):
            tiles += (accs[n] - (middle(VALUES, n) * weight)[None, :],)
        else:
            tiles += (accs[n],)
    acc = stack(stack(tiles[0], tiles[1]), stack(tiles[2], tiles[3]))
    return Softmax(acc, tl.sum(total, 0), top)


@triton.jit
def _queries(q, scale_log2, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Converts a KV head's queries to operands, see ``int8.query_operands``, divided by each plane's multiple.

    Returns:
        the four planes, INT8 [INT8_JP, 2 HEADS]; the start of products, int32 [2 HEADS]; their unit, [HEADS].
    """
    n, dim = tl.arange(0, 2 * SHAPE.HEADS), tl.arange(0, SHAPE.DP)
    inside = (dim < SHAPE.D)[:, None] & (n // 2 < SHAPE.GQA_GROUP)[None, :]
    twice = tl.load(q.data + n[None, :] // 2 * q.head + dim[:, None], mask=inside, other=0.0).to(tl.float32)
    # The unit is large enough that a score of NEVER times the unit still has no weight.
    unit = tl.max(tl.abs(twice), 0) * (1 / 127) + 1e-20  # [2 HEADS]
    planes = (
        query_plane(q, unit, 0, 1 / multiple(CODES, 0), SHAPE),
        query_plane(q, unit, 1, 1 / multiple(CODES, 1), SHAPE),
        query_plane(q, unit, 2, 1 / multiple(CODES, 2), SHAPE),
        query_plane(q, unit, 3, 1 / multiple(CODES, 3), SHAPE),
    )
    unit, _ = tl.split(tl.reshape(unit, [SHAPE.HEADS, 2]))
    return planes, _start(planes, CODES, SHAPE), unit * scale_log2


@triton.jit
def _start(planes, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Returns the start of products with these operands: MAGIC_BITS minus the middles' part, int32 [2 HEADS].

    A fraction in the high part's start, times 256, is moved to the low part's.
    """
    HEADS: tl.constexpr = SHAPE.HEADS
    middles = tl.zeros([2 * HEADS], tl.float32)
    for p in tl.static_range(4):
        if is_coded(CODES, p):
            middles += tl.sum(planes[p].to(tl.float32), 0) * (middle(CODES, p) * multiple(CODES, p))
    high, low = tl.split(tl.reshape(middles, [HEADS, 2]))
    whole = tl.floor(high)
    low = tl.floor(low + (high - whole) * 256 + 0.5)
    return tl.reshape(tl.join(-whole, -low), [2 * HEADS]).to(tl.int32) + MAGIC_BITS


@triton.jit
def _key_codes(bytes, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, PLAIN: tl.constexpr):
    """Extracts a field's codes of every token from a cell's bytes: INT8 [2 PAGE, INT8_JP]."""
    x = field_codes(bytes, CODES, CELL, FIELD, 0, PLAIN)
    if shares_of(CODES, CELL) > 1:
        x = stack(x, field_codes(bytes, CODES, CELL, FIELD, 1, PLAIN))
    if shares_of(CODES, CELL) > 2:
        last = field_codes(bytes, CODES, CELL, FIELD, 3, PLAIN)
        x = stack(x, stack(field_codes(bytes, CODES, CELL, FIELD, 2, PLAIN), last))
    return x


@triton.jit
def _value_products(both, v_first, weights, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Adds the four planes' products of codes and weights to MAGIC_BITS, int32 [VP / 4, 2 HEADS].

    weights: of the four planes of tokens, INT8 [32 = (page, token), 2 HEADS] each.
    """
    ROWS: tl.constexpr = SHAPE.VP // 4
    COLUMNS: tl.constexpr = 2 * SHAPE.HEADS
    sums = ()
    for _ in tl.static_range(4):
        sums += (tl.full([ROWS, COLUMNS], MAGIC_BITS, tl.int32),)
    for c in tl.static_range(cell_count(CODES)):
        for t in tl.static_range(4 // shares_of(CODES, c)):
            bytes = _value_bytes(both, v_first, c, t, CODES, SHAPE)
            for f in tl.static_range(field_count(CODES, c)):
                for share in tl.static_range(shares_of(CODES, c)):
                    v = field_codes(bytes, CODES, c, f, share, PLAIN)
                    sums = _added(sums, plane_of(CODES, c, f), v, weights[t + share * (4 // shares_of(CODES, c))])
    return sums


@triton.jit
def _added(sums, PLANE: tl.constexpr, v, weights):
    """Adds v [VP / 4, 32] times weights to a plane's sums."""
    result = ()
    for n in tl.static_range(4):
        if n == PLANE:
            result += (tl.dot(v, weights, sums[n], out_dtype=tl.int32),)
        else:
            result += (sums[n],)
    return result


@triton.jit
def _value_bytes(both, v_first, CELL: tl.constexpr, TOKENS: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Loads one token plane of a cell of two pages' values: uint8 [VP / 4, 32 = (page, token)]."""
    ROWS: tl.constexpr = SHAPE.VP // 4
    QUARTER: tl.constexpr = PAGE // 4
    j, i = tl.arange(0, ROWS)[None, :, None], tl.arange(0, QUARTER)[None, None, :]
    first: tl.constexpr = start_of(CODES, CELL) + TOKENS * SHAPE.D4 * QUARTER
    address = both + first + (v_first // 4 + j) * QUARTER + i
    if SHAPE.DIMS == SHAPE.VP:
        bytes = tl.load(address)
    else:
        bytes = tl.load(address, mask=j < SHAPE.DIMS // 4, other=0)
    return tl.reshape(tl.permute(bytes, (1, 0, 2)), [ROWS, 2 * QUARTER])
