"""Decode attention over records of any format but planes.

Levels of every table are small integers, so products run on INT8 tensor cores, as in ``decode_attention``. With
levels w about a centre c,

    q k     = s_k (q w_k) + (z_k + c s_k) sum(q)                 a scale per token
            = sum((q s_k) w_k) + sum(q (z_k + c s_k))            a scale per channel: each page splits q s_k again
    sum p v = sum (p s_v) w_v + sum p (z_v + c s_v)

where z = -middle s for codes without an offset. Centred keys add q mean, one number per page.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.device.codes import page_bytes
from sglang_kvq.kernels.device.common import PAGE, page_of
from sglang_kvq.kernels.device.int8 import (
    MAGIC_BITS,
    base_of,
    empty_groups,
    group_product,
    group_scales,
    int8_columns,
    join_parts,
    load_plane,
    query_operands,
    spread_sum,
    stack,
    stack_groups,
    tile_scales,
    tokens_of_tile,
    weight_operands,
)
from sglang_kvq.kernels.device.softmax import NEVER, Softmax
from sglang_kvq.kernels.device.unpack import centre, in_steps, multiple, own_tiles, step, unpack, unpack_odd


@triton.jit
def history_general(
    q, item, table, records, v_first, scale_log2, RECORD: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr
):
    """Attends to records of the item's pages; returns a ``Softmax`` whose columns are heads: acc [VP, HEADS].

    q: ``View`` that starts at the KV head's first query; records: the KV head's record of page 0; rows of acc are dims
    v_first .. v_first + DIMS.

    A tile is two pages, 128 tokens. Its row n = (plane, page, half, i) is token plane * 16 + 2 i + half of that page:
    the order of K's stored codes. Tokens whose codes share a byte plane of V are 32 consecutive rows. Rows n and n + 8,
    which one thread holds, are neighboring tokens, whose scales the thread reads at once.

    Each iteration loads K's codes and all scales, computes scores (``_channel_scores`` or ``_token_scores``), updates
    the softmax and adds V's product, group by group.
    """
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    TILE: tl.constexpr = 2 * PAGE
    D: tl.constexpr = SHAPE.D
    HEADS: tl.constexpr = SHAPE.HEADS
    COLUMNS: tl.constexpr = 2 * HEADS
    PAGE_BYTES: tl.constexpr = page_bytes(RECORD, SHAPE.KV_HEADS)
    OWN: tl.constexpr = VALUES.group if VALUES.group < SHAPE.DIMS else SHAPE.DIMS  # dims of V that share a scale
    GROUPS: tl.constexpr = SHAPE.DIMS // OWN
    ROWS: tl.constexpr = SHAPE.VP if GROUPS == 1 else OWN

    operands = ()
    if not KEYS.channel:
        planes, q_all, unit = query_operands(q, 1 / multiple(KEYS, 1), SHAPE)
        operands = (planes, q_all, unit * (scale_log2 * _share(KEYS)))
    second, plane, token = tokens_of_tile()
    fraction = tl.where(plane % 2 == 1, 1 / multiple(VALUES, 1), 1.0)
    first_scales = _scale_addresses(v_first, RECORD, PAGE)  # [1, 4, PAGE]

    accs, offsets = empty_groups(GROUPS, ROWS, HEADS)
    top = tl.full([HEADS], NEVER, tl.float32)
    total = tl.zeros([8, HEADS], tl.float32)
    page_a, page_b = item.page_a.to(tl.int64), item.page_b.to(tl.int64)
    last = item.last_page
    for index in tl.range(item.first_page, last, 2):
        base_a, base_b = page_a * PAGE_BYTES, page_b * PAGE_BYTES
        page_a = page_of(table, tl.minimum(index + 2, last - 1))
        page_b = page_of(table, tl.minimum(index + 3, last - 1))
        both = records + base_of(tl.arange(0, 2) == 1, base_a, base_b)[:, None, None]  # [2, 1, 1]
        k = _keys(records, base_a, base_b, KEYS, SHAPE, PLAIN)
        scales = both.to(tl.pointer_type(tl.float16))
        s_k, z_k, s_v, z_v = tile_scales(tl.load(scales + first_scales))  # [TILE] each
        page_records = (records + base_a, records + base_b)
        if KEYS.channel:
            x = _channel_scores(k, q, page_records, second, token, scale_log2, KEYS, SHAPE, PLAIN)
        else:
            x = _token_scores(k, operands, (s_k, z_k), scales, page_records, second, scale_log2, KEYS, SHAPE, PLAIN)
        position = (index + second.to(tl.int32)) * PAGE + token
        x = tl.where((position < tl.minimum(last * PAGE, item.length))[:, None], x, NEVER)

        new_top = tl.maximum(top, tl.max(x, 0))
        decay = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(x - top[None, :])
        total = total * decay[None, :] + spread_sum(p, HEADS)
        old_accs, old_offsets = accs, offsets
        accs, offsets = (), ()
        for g in tl.static_range(GROUPS):
            if g > 0:
                first_scale = VALUES.scale // 2 + g * PAGE + v_first // VALUES.group * PAGE
                s_v, z_v = group_scales(scales + first_scale, _offset_step(VALUES))
            if _needs_offset(VALUES):
                from_offsets = spread_sum(p * _offset(s_v, z_v, VALUES)[:, None], HEADS)
                offsets += (old_offsets[g] * decay[None, :] + from_offsets,)
            else:
                offsets += (old_offsets[g],)
            weights, p_unit = weight_operands(p, s_v, fraction, HEADS)
            v = _values(both, v_first + g * OWN, VALUES, D, OWN, ROWS, PLAIN)
            products = _products(v, weights, VALUES, ROWS, COLUMNS, 0, TILE, TILE // 4)
            part = join_parts(products, ROWS, HEADS) * (p_unit * _share(VALUES))[None, :]
            accs += (old_accs[g] * decay[None, :] + part,)
    return Softmax(stack_groups(accs, offsets), tl.sum(total, 0), top)


@triton.jit
def _token_scores(
    k,
    operands,
    first_scales,
    scales,
    page_records,
    second,
    scale_log2,
    CODES: tl.constexpr,
    SHAPE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Computes q k of a tile, float32 [2 PAGE, HEADS], for keys with a scale per token and group.

    operands: from ``query_operands``; first_scales: the first group's scales and offsets; scales: pointers to the
    two pages' records, FP16; page_records: pointers to the bytes of each record.
    """
    TILE: tl.constexpr = 2 * PAGE
    HEADS: tl.constexpr = SHAPE.HEADS
    queries, q_all, unit = operands
    s_k, z_k = first_scales
    dim = tl.arange(0, SHAPE.DP)
    x = tl.zeros([TILE, HEADS], tl.float32)
    GROUP: tl.constexpr = CODES.group
    if CODES.centred:
        mean_a = _mean_product(q_all, page_records[0], CODES, SHAPE)
        mean_b = _mean_product(q_all, page_records[1], CODES, SHAPE)
        x += tl.where(second[:, None], mean_b[None, :], mean_a[None, :]) * scale_log2
    for g in tl.static_range(SHAPE.D // GROUP):
        if g > 0:
            s_k, z_k = group_scales(scales + (CODES.scale // 2 + g * PAGE), _offset_step(CODES))
        codes = k  # if groups divide a plane, each has a product with all of its codes
        if GROUP % SHAPE.D4 != 0 and not PLAIN:
            codes = own_tiles(k[0], g), own_tiles(k[1], g)
        products = _products(codes, queries, CODES, TILE, 2 * HEADS, g, GROUP, SHAPE.D4)
        x += join_parts(products, TILE, HEADS) * s_k[:, None] * unit[None, :]
        if _needs_offset(CODES):
            q_sum = tl.sum(tl.where((dim // GROUP == g)[:, None], q_all, 0.0), 0) * scale_log2
            x += _offset(s_k, z_k, CODES)[:, None] * q_sum[None, :]
    return x


@triton.jit
def _mean_product(q_all, record, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Multiplies queries [DP, HEADS] by the page's mean key: float32 [HEADS]."""
    dim = tl.arange(0, SHAPE.DP)
    halves = record.to(tl.pointer_type(tl.float16)) + CODES.mean // 2 + dim
    mean = _load(halves, dim < SHAPE.D, SHAPE.D == SHAPE.DP).to(tl.float32)
    return tl.sum(q_all * mean[:, None], 0)


@triton.constexpr_function
def _share(codes):
    """Returns the factor that converts products to those of levels."""
    return 0.5 if in_steps(codes) else 1.0


@triton.jit
def _keys(records, base_a, base_b, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Loads two pages' K codes as INT8 tiles [2 PAGE, INT8_JP] of the four planes."""
    D4: tl.constexpr = SHAPE.D4
    JP: tl.constexpr = SHAPE.INT8_JP
    ROWS: tl.constexpr = PAGE if CODES.bits == 3 else 2 * PAGE
    QUARTER: tl.constexpr = PAGE // 4
    row, j = tl.arange(0, ROWS), tl.arange(0, JP)[None, :]
    base = records + base_of(row // QUARTER % 2 == 1, base_a, base_b)[:, None]
    # ``common.key_row`` of each row's token, times the bytes of a row.
    address = base + (row // (2 * QUARTER) * QUARTER + row % QUARTER)[:, None] * D4 + j  # [ROWS, JP]
    inside = (j < D4) & (row >= 0)[:, None]
    low = _load(address + CODES.low, inside, D4 == JP)
    high = low
    if CODES.bits > 2:
        high = _load(address + CODES.high, inside, D4 == JP)
    if CODES.bits == 3:  # planes 2 and 3 keep their third bit next to that of planes 0 and 1
        low_b = _load(address + CODES.low + (PAGE // 2 * D4), inside, D4 == JP)
        planes = _both_halves(low, low_b, high, CODES, PLAIN)
    else:
        planes = unpack(low, high, 0, CODES, 0, PLAIN)
    odd = planes
    if in_steps(CODES):
        odd = unpack_odd(low, CODES, PLAIN)
    return planes, odd


@triton.jit
def _values(
    both, v_first, CODES: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, VP: tl.constexpr, PLAIN: tl.constexpr
):
    """Loads two pages' V codes of dims v_first .. v_first + DIMS, like ``_keys``: INT8 tiles [VP, PAGE / 2].

    Pages are loaded one by one, so that neighboring lanes read neighboring bytes.
    """
    HALVES: tl.constexpr = CODES.bits == 3 and DIMS == D and VP == D
    ROWS: tl.constexpr = VP // 2 if HALVES else VP
    QUARTER: tl.constexpr = PAGE // 4
    row = tl.arange(0, ROWS)
    address = both + tl.arange(0, QUARTER)[None, None, :]  # [2, 1, QUARTER]
    inside = (row < DIMS)[None, :, None]
    low = _load(address + CODES.low + ((v_first + row) * QUARTER)[None, :, None], inside, DIMS == VP)
    low = _side_by_side(low, ROWS)
    high = low
    if CODES.bits == 4:
        high = _load(address + CODES.high + ((v_first + row) * QUARTER)[None, :, None], inside, DIMS == VP)
        high = _side_by_side(high, ROWS)
    elif CODES.bits == 3:  # dims of the second half keep their third bit next to that of the first
        high_row = (v_first + row) % (D // 2)
        high = _load(address + CODES.high + (high_row * QUARTER)[None, :, None], inside, DIMS == VP)
        high = _side_by_side(high, ROWS)
    if HALVES:
        low_b = _load(address + CODES.low + ((ROWS + row) * QUARTER)[None, :, None], inside, True)
        planes = _both_halves(low, _side_by_side(low_b, ROWS), high, CODES, PLAIN)
    elif CODES.bits == 3:
        shift = tl.zeros([VP, 2 * QUARTER], tl.int32) + v_first // (D // 2) * 4
        if D // 2 % DIMS != 0:
            shift = tl.broadcast_to((v_first + row)[:, None] // (D // 2) * 4, [VP, 2 * QUARTER])
        planes = unpack(low, high, shift, CODES, None, PLAIN)
    else:
        planes = unpack(low, high, 0, CODES, 0, PLAIN)
    odd = planes
    if in_steps(CODES):
        odd = unpack_odd(low, CODES, PLAIN)
    return planes, odd


@triton.jit
def _load(address, inside, ALL: tl.constexpr):
    if ALL:
        return tl.load(address)
    else:
        return tl.load(address, mask=inside, other=0)


@triton.jit
def _side_by_side(x, ROWS: tl.constexpr):
    """Reshapes [2, ROWS, PAGE/4] to [ROWS, PAGE/2]."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), [ROWS, PAGE // 2])


@triton.jit
def _both_halves(low_a, low_b, high, CODES: tl.constexpr, PLAIN: tl.constexpr):
    """Joins 3-bit codes of rows whose third bits are in the same bytes, one above the other."""
    a = unpack(low_a, high, 0, CODES, 0, PLAIN)
    b = unpack(low_b, high, 4, CODES, 4, PLAIN)
    return stack(a[0], b[0]), stack(a[1], b[1]), stack(a[2], b[2]), stack(a[3], b[3])


@triton.jit
def _products(
    codes, y, CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    g: tl.constexpr, GROUP: tl.constexpr, D4: tl.constexpr,
):  # fmt: skip
    """Adds products of levels, divided by ``_share``, to MAGIC_BITS, int32 [ROWS, COLUMNS], over the dims of group g.

    codes: from ``_keys`` or ``_values``; y: four planes, INT8 [JP, COLUMNS].
    """
    planes, odd = codes
    products = tl.zeros([ROWS, COLUMNS], tl.int32)
    if in_steps(CODES):
        products = _sum_planes(planes, y, products, g, GROUP, D4) * step(CODES) + MAGIC_BITS
        return _sum_planes(odd, y, products, g, GROUP, D4)
    else:
        return _sum_planes(planes, y, products + MAGIC_BITS, g, GROUP, D4)


@triton.jit
def _sum_planes(x, y, products, g: tl.constexpr, GROUP: tl.constexpr, D4: tl.constexpr):
    """Adds the four planes' products over the dims of group g."""
    for n in tl.static_range(4):
        products = group_product(x[n], y[n], products, n, g, D4, GROUP)
    return products


@triton.jit
def _scale_addresses(v_first, RECORD: tl.constexpr, TOKENS: tl.constexpr):
    """Returns FP16 addresses in a record, [1, 4, TOKENS]: K's scales and offsets (first group) and V's (dim v_first).

    For quantities that are not stored per token, these are addresses of V's scales.
    """
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    which = tl.arange(0, 4)[None, :, None]
    v_group = v_first // VALUES.group * TOKENS
    address = tl.zeros([1, 4, 1], tl.int32) + (VALUES.scale // 2 + v_group)
    if VALUES.has_offset:
        address = tl.where(which == 3, VALUES.offset // 2 + v_group, address)
    if not KEYS.channel:
        address = tl.where(which == 0, KEYS.scale // 2, address)
        if KEYS.has_offset:
            address = tl.where(which == 1, KEYS.offset // 2, address)
    return tl.multiple_of(address, [1, 1, 8]) + tl.arange(0, TOKENS)[None, None, :]  # 16 bytes, see ``int8.base_of``


@triton.constexpr_function
def _offset_step(codes):
    """Returns the FP16 elements from a scale to its offset; 0 without offsets, so that scales are loaded instead."""
    return (codes.offset - codes.scale) // 2 if codes.has_offset else 0


@triton.constexpr_function
def _needs_offset(codes):
    """Tells if a row has a term in addition to scale times product."""
    return codes.has_offset or centre(codes) != codes.middle


@triton.jit
def _offset(scale, offset, CODES: tl.constexpr):
    """Returns the dequantized value of the level ``centre``."""
    SHIFT: tl.constexpr = centre(CODES) - CODES.shift
    if CODES.has_offset and SHIFT == 0:
        return offset
    elif CODES.has_offset:
        return offset + SHIFT * scale
    else:
        return SHIFT * scale


@triton.jit
def _channel_scores(
    k, q, page_records, second, token, scale_log2, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr
):
    """Computes q k of a tile, float32 [2 PAGE, HEADS], for keys with a scale per channel and run of tokens."""
    TILE: tl.constexpr = 2 * PAGE
    RUN: tl.constexpr = CODES.group
    RUNS: tl.constexpr = CODES.runs
    HEADS: tl.constexpr = SHAPE.HEADS
    x = tl.zeros([TILE, HEADS], tl.float32)
    for r in tl.static_range(2 * RUNS):
        page = page_records[r // RUNS]
        codes = k if PLAIN else (own_tiles(k[0], r), own_tiles(k[1], r))
        part = _run_scores(codes, q, page.to(tl.pointer_type(tl.float16)) + r % RUNS * SHAPE.D, CODES, SHAPE)
        mine = (second == (r >= RUNS)) & (token // RUN == r % RUNS)
        x = tl.where(mine[:, None], part * scale_log2, x)
    return x


@triton.jit
def _run_scores(k, q, halves, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Computes q k of the tile's rows as if all had this run's scales; halves: pointer to the run's start."""
    TILE: tl.constexpr = 2 * PAGE
    HEADS: tl.constexpr = SHAPE.HEADS
    COLUMNS: tl.constexpr = 2 * HEADS
    q0, z0 = _channel_plane(q, halves, 0, CODES, SHAPE)
    q1, z1 = _channel_plane(q, halves, 1, CODES, SHAPE)
    q2, z2 = _channel_plane(q, halves, 2, CODES, SHAPE)
    q3, z3 = _channel_plane(q, halves, 3, CODES, SHAPE)
    most = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
    unit = tl.max(most, 0) * (1 / 127) + 1e-30  # [COLUMNS]
    q0, q1 = int8_columns(q0, 1.0 / unit, COLUMNS), int8_columns(q1, 1.0 / unit, COLUMNS)
    q2, q3 = int8_columns(q2, 1.0 / unit, COLUMNS), int8_columns(q3, 1.0 / unit, COLUMNS)
    products = _products(k, (q0, q1, q2, q3), CODES, TILE, COLUMNS, 0, SHAPE.D, SHAPE.D4)
    unit = tl.max(tl.reshape(unit, [HEADS, 2]), 1) * _share(CODES)
    from_offsets = tl.max(tl.reshape(z0 + z1 + z2 + z3, [HEADS, 2]), 1)
    return join_parts(products, TILE, HEADS) * unit[None, :] + from_offsets[None, :]


@triton.jit
def _channel_plane(q, halves, plane: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Multiplies queries of a plane by their scales, [INT8_JP, COLUMNS]; sums queries times offsets, [COLUMNS]."""
    x = load_plane(q, plane, SHAPE)
    j = tl.arange(0, SHAPE.INT8_JP)
    dim, inside = plane * SHAPE.D4 + j, j < SHAPE.D4
    scale = tl.load(halves + CODES.scale // 2 + dim, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(halves + CODES.offset // 2 + dim, mask=inside, other=0.0).to(tl.float32)
    from_offsets = tl.sum(x * _offset(scale, offset, CODES)[:, None], 0)
    return x * (scale * (1 / multiple(CODES, plane)))[:, None], from_offsets
