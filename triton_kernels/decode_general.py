"""Decode attention over records of any format: what ``decode`` does for two bits, with more to unpack.

Levels of every table are small integers, so products run on INT8 tensor cores as there. With levels w about a centre c,

    q k     = s_k (q w_k) + (z_k + c s_k) sum(q)                 a scale per token
            = sum((q s_k) w_k) + sum(q (z_k + c s_k))            a scale per channel: q s_k is split anew for each page
    sum p v = sum (p s_v) w_v + sum p (z_v + c s_v)

where z = -middle s of codes without an offset. Centred keys add q mean, one number per page.
"""

# ruff: noqa: RET505  (Triton compiles what follows a branch that returns; in an else it does not)

import triton
import triton.language as tl

from sglang_kvq.kernels.common import PAGE, page_of
from sglang_kvq.kernels.int8 import (
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
from sglang_kvq.kernels.unpack import centre, in_steps, multiple, step, unpack, unpack_odd

NEVER = tl.constexpr(-1e30)


@triton.jit
def history_general(
    q, q_head, page_a, page_b, table, first, last, length, records, head, v_first, scale_log2,
    RECORD: tl.constexpr, KV_HEADS: tl.constexpr, GQA_GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, JP: tl.constexpr, DIMS: tl.constexpr, VP: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Records of pages first .. last: (acc [VP, HEADS], denominator [HEADS], maximum [HEADS]), base 2.

    page_a and page_b are the ids of the first two; acc are dims v_first .. v_first + DIMS. Tiles and rows are those of
    ``decode._history``.
    """
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    TILE: tl.constexpr = 2 * PAGE
    COLUMNS: tl.constexpr = 2 * HEADS
    D4: tl.constexpr = D // 4
    OWN: tl.constexpr = VALUES.group if VALUES.group < DIMS else DIMS  # dims of V that share a scale
    GROUPS: tl.constexpr = DIMS // OWN
    ROWS: tl.constexpr = VP if GROUPS == 1 else OWN

    dim = tl.arange(0, DP)
    if not KEYS.channel:
        q0, q1, q2, q3, q_all, unit = query_operands(q, q_head, 1 / multiple(KEYS, 1), GQA_GROUP, HEADS, D, DP, JP)
        unit = unit * (scale_log2 * _share(KEYS))
    second, plane, token = tokens_of_tile()
    fraction = tl.where(plane % 2 == 1, 1 / multiple(VALUES, 1), 1.0)
    records += head * RECORD.bytes
    scale_place = _scale_places(v_first, RECORD, PAGE)  # [1, 4, PAGE]

    accs, offsets = empty_groups(GROUPS, ROWS, HEADS)
    top = tl.full([HEADS], NEVER, tl.float32)
    total = tl.zeros([8, HEADS], tl.float32)
    for index in tl.range(first, last, 2):
        base_a, base_b = page_a * (KV_HEADS * RECORD.bytes), page_b * (KV_HEADS * RECORD.bytes)
        page_a = page_of(table, tl.minimum(index + 2, last - 1))
        page_b = page_of(table, tl.minimum(index + 3, last - 1))
        both = records + base_of(tl.arange(0, 2) == 1, base_a, base_b)[:, None, None]  # [2, 1, 1]
        k0, k1, k2, k3, odd0, odd1, odd2, odd3 = _keys(records, base_a, base_b, KEYS, D4, JP, PLAIN)
        scales = both.to(tl.pointer_type(tl.float16))
        s_k, z_k, s_v, z_v = tile_scales(tl.load(scales + scale_place))  # [TILE] each
        x = tl.zeros([TILE, HEADS], tl.float32)
        if KEYS.channel:
            RUN: tl.constexpr = KEYS.group
            RUNS: tl.constexpr = KEYS.runs
            for r in tl.static_range(2 * RUNS):
                page = records + (base_b if r >= RUNS else base_a)
                halves = page.to(tl.pointer_type(tl.float16)) + r % RUNS * D
                part = _channel_product(
                    k0, k1, k2, k3, odd0, odd1, odd2, odd3, q, q_head, halves, KEYS, TILE, GQA_GROUP, HEADS, D4, JP
                )
                mine = (second == (r >= RUNS)) & (token // RUN == r % RUNS)
                x = tl.where(mine[:, None], part * scale_log2, x)
        else:
            GROUP: tl.constexpr = KEYS.group
            if KEYS.centred:
                mean_a = _mean_product(q_all, records + base_a, KEYS, D, DP)
                mean_b = _mean_product(q_all, records + base_b, KEYS, D, DP)
                x += tl.where(second[:, None], mean_b[None, :], mean_a[None, :]) * scale_log2
            for g in tl.static_range(D // GROUP):
                if g > 0:
                    s_k, z_k = group_scales(scales + (KEYS.scale // 2 + g * PAGE), _offset_step(KEYS))
                products = _products(
                    k0, k1, k2, k3, odd0, odd1, odd2, odd3, q0, q1, q2, q3, KEYS, TILE, COLUMNS, g, GROUP, D4, JP
                )
                x += join_parts(products, TILE, HEADS) * s_k[:, None] * unit[None, :]
                if _needs_offset(KEYS):
                    q_sum = tl.sum(tl.where((dim // GROUP == g)[:, None], q_all, 0.0), 0) * scale_log2
                    x += _offset(s_k, z_k, KEYS)[:, None] * q_sum[None, :]
        position = (index + second.to(tl.int32)) * PAGE + token
        x = tl.where((position < tl.minimum(last * PAGE, length))[:, None], x, NEVER)

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
            p0, p1, p2, p3, p_unit = weight_operands(p, s_v, fraction, HEADS)
            v0, v1, v2, v3, odd0, odd1, odd2, odd3 = _values(both, v_first + g * OWN, VALUES, D, OWN, ROWS, PLAIN)
            products = _products(
                v0, v1, v2, v3, odd0, odd1, odd2, odd3, p0, p1, p2, p3, VALUES,
                ROWS, COLUMNS, 0, TILE, TILE // 4, TILE // 4,
            )  # fmt: skip
            part = join_parts(products, ROWS, HEADS) * (p_unit * _share(VALUES))[None, :]
            accs += (old_accs[g] * decay[None, :] + part,)
    return stack_groups(accs, offsets), tl.sum(total, 0), top


@triton.jit
def _mean_product(q_all, record, CODES: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Queries [DP, HEADS] times the page's mean key: float32 [HEADS]."""
    dim = tl.arange(0, DP)
    mean = _load(record.to(tl.pointer_type(tl.float16)) + CODES.mean // 2 + dim, dim < D, D == DP).to(tl.float32)
    return tl.sum(q_all * mean[:, None], 0)


@triton.constexpr_function
def _share(codes):
    """What products are multiplied by to be those of levels."""
    return 0.5 if in_steps(codes) else 1.0


@triton.jit
def _keys(records, base_a, base_b, CODES: tl.constexpr, D4: tl.constexpr, JP: tl.constexpr, PLAIN: tl.constexpr):
    """Two pages' K codes as eight INT8 tiles [2 PAGE, JP]: ``unpack``'s, then ``unpack_odd``'s or any."""
    ROWS: tl.constexpr = PAGE if CODES.bits == 3 else 2 * PAGE
    QUARTER: tl.constexpr = PAGE // 4
    row, j = tl.arange(0, ROWS), tl.arange(0, JP)[None, :]
    base = records + base_of(row // QUARTER % 2 == 1, base_a, base_b)[:, None]
    # ``common.key_row`` of the row's token, times the row's bytes.
    place = base + (row // (2 * QUARTER) * QUARTER + row % QUARTER)[:, None] * D4 + j  # [ROWS, JP]
    inside = (j < D4) & (row >= 0)[:, None]
    low = _load(place + CODES.low, inside, D4 == JP)
    high = low
    if CODES.bits > 2:
        high = _load(place + CODES.high, inside, D4 == JP)
    if CODES.bits == 3:  # tokens of planes 2 and 3 have their third bit beside those of planes 0 and 1
        low_b = _load(place + CODES.low + (PAGE // 2 * D4), inside, D4 == JP)
        k0, k1, k2, k3 = _both_halves(low, low_b, high, CODES, PLAIN)
    else:
        k0, k1, k2, k3 = unpack(low, high, 0, CODES, 0, PLAIN)
    if in_steps(CODES):
        odd0, odd1, odd2, odd3 = unpack_odd(low, CODES, PLAIN)
    else:
        odd0, odd1, odd2, odd3 = k0, k1, k2, k3
    return k0, k1, k2, k3, odd0, odd1, odd2, odd3


@triton.jit
def _values(
    both, v_first, CODES: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, VP: tl.constexpr, PLAIN: tl.constexpr
):
    """Two pages' V codes of dims v_first .. v_first + DIMS as eight INT8 tiles [VP, PAGE / 2], as ``_keys``.

    Pages are loaded one by one, so that neighbouring lanes read neighbouring bytes.
    """
    HALVES: tl.constexpr = CODES.bits == 3 and DIMS == D and VP == D
    ROWS: tl.constexpr = VP // 2 if HALVES else VP
    QUARTER: tl.constexpr = PAGE // 4
    row = tl.arange(0, ROWS)
    place = both + tl.arange(0, QUARTER)[None, None, :]  # [2, 1, QUARTER]
    inside = (row < DIMS)[None, :, None]
    low = _load(place + CODES.low + ((v_first + row) * QUARTER)[None, :, None], inside, DIMS == VP)
    low = _side_by_side(low, ROWS)
    high = low
    if CODES.bits == 4:
        high = _load(place + CODES.high + ((v_first + row) * QUARTER)[None, :, None], inside, DIMS == VP)
        high = _side_by_side(high, ROWS)
    elif CODES.bits == 3:  # dims of the second half have their third bit beside those of the first
        high_row = (v_first + row) % (D // 2)
        high = _load(place + CODES.high + (high_row * QUARTER)[None, :, None], inside, DIMS == VP)
        high = _side_by_side(high, ROWS)
    if HALVES:
        low_b = _load(place + CODES.low + ((ROWS + row) * QUARTER)[None, :, None], inside, True)
        v0, v1, v2, v3 = _both_halves(low, _side_by_side(low_b, ROWS), high, CODES, PLAIN)
    elif CODES.bits == 3:
        shift = tl.zeros([VP, 2 * QUARTER], tl.int32) + v_first // (D // 2) * 4
        if D // 2 % DIMS != 0:
            shift = tl.broadcast_to((v_first + row)[:, None] // (D // 2) * 4, [VP, 2 * QUARTER])
        v0, v1, v2, v3 = unpack(low, high, shift, CODES, None, PLAIN)
    else:
        v0, v1, v2, v3 = unpack(low, high, 0, CODES, 0, PLAIN)
    if in_steps(CODES):
        odd0, odd1, odd2, odd3 = unpack_odd(low, CODES, PLAIN)
    else:
        odd0, odd1, odd2, odd3 = v0, v1, v2, v3
    return v0, v1, v2, v3, odd0, odd1, odd2, odd3


@triton.jit
def _load(place, inside, ALL: tl.constexpr):
    if ALL:
        return tl.load(place)
    else:
        return tl.load(place, mask=inside, other=0)


@triton.jit
def _side_by_side(x, ROWS: tl.constexpr):
    """[2, ROWS, PAGE/4] to [ROWS, PAGE/2]."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), [ROWS, PAGE // 2])


@triton.jit
def _both_halves(low_a, low_b, high, CODES: tl.constexpr, PLAIN: tl.constexpr):
    """3-bit codes of rows whose third bits lie in the same bytes, one above the other."""
    a0, a1, a2, a3 = unpack(low_a, high, 0, CODES, 0, PLAIN)
    b0, b1, b2, b3 = unpack(low_b, high, 4, CODES, 4, PLAIN)
    return stack(a0, b0), stack(a1, b1), stack(a2, b2), stack(a3, b3)


@triton.jit
def _products(
    x0, x1, x2, x3, odd0, odd1, odd2, odd3, y0, y1, y2, y3, CODES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, g: tl.constexpr, GROUP: tl.constexpr, D4: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """Products of levels (``_share`` of them) on MAGIC_BITS, int32 [ROWS, COLUMNS], over the dims of group g."""
    products = tl.zeros([ROWS, COLUMNS], tl.int32)
    if in_steps(CODES):
        products = _sum_planes(x0, x1, x2, x3, y0, y1, y2, y3, products, g, GROUP, D4, JP) * step(CODES) + MAGIC_BITS
        return _sum_planes(odd0, odd1, odd2, odd3, y0, y1, y2, y3, products, g, GROUP, D4, JP)
    else:
        return _sum_planes(x0, x1, x2, x3, y0, y1, y2, y3, products + MAGIC_BITS, g, GROUP, D4, JP)


@triton.jit
def _sum_planes(
    x0, x1, x2, x3, y0, y1, y2, y3, products, g: tl.constexpr, GROUP: tl.constexpr, D4: tl.constexpr, JP: tl.constexpr
):
    """Add the four planes' products over the dims of group g."""
    products = group_product(x0, y0, products, 0, g, D4, JP, GROUP)
    products = group_product(x1, y1, products, 1, g, D4, JP, GROUP)
    products = group_product(x2, y2, products, 2, g, D4, JP, GROUP)
    return group_product(x3, y3, products, 3, g, D4, JP, GROUP)


@triton.jit
def _scale_places(v_first, RECORD: tl.constexpr, TOKENS: tl.constexpr):
    """Where, in halves, a record has K's scales and offsets (first group) and V's (of dim v_first): [1, 4, TOKENS].

    For what it has not per token, V's scales stand in.
    """
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    which = tl.arange(0, 4)[None, :, None]
    v_group = v_first // VALUES.group * TOKENS
    place = tl.zeros([1, 4, 1], tl.int32) + (VALUES.scale // 2 + v_group)
    if VALUES.has_offset:
        place = tl.where(which == 3, VALUES.offset // 2 + v_group, place)
    if not KEYS.channel:
        place = tl.where(which == 0, KEYS.scale // 2, place)
        if KEYS.has_offset:
            place = tl.where(which == 1, KEYS.offset // 2, place)
    return tl.multiple_of(place, [1, 1, 8]) + tl.arange(0, TOKENS)[None, None, :]  # 16 bytes, see ``int8.base_of``


@triton.constexpr_function
def _offset_step(codes):
    """Halves from a scale to its offset; without offsets, scales stand in."""
    return (codes.offset - codes.scale) // 2 if codes.has_offset else 0


@triton.constexpr_function
def _needs_offset(codes):
    """Whether a row has a term besides scale times product."""
    return codes.has_offset or centre(codes) != codes.middle


@triton.jit
def _offset(scale, offset, CODES: tl.constexpr):
    """What a level of ``centre`` stands for."""
    SHIFT: tl.constexpr = centre(CODES) - CODES.shift
    if CODES.has_offset and SHIFT == 0:
        return offset
    elif CODES.has_offset:
        return offset + SHIFT * scale
    else:
        return SHIFT * scale


@triton.jit
def _channel_product(
    k0, k1, k2, k3, odd0, odd1, odd2, odd3, q, q_head, halves, CODES: tl.constexpr, TILE: tl.constexpr,
    GQA_GROUP: tl.constexpr, HEADS: tl.constexpr, D4: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """q k of the tile's rows, float32 [TILE, HEADS], as if all had this run's scales; halves is one run's start."""
    COLUMNS: tl.constexpr = 2 * HEADS
    q0, z0 = _channel_plane(q, q_head, halves, 0, CODES, GQA_GROUP, COLUMNS, D4, JP)
    q1, z1 = _channel_plane(q, q_head, halves, 1, CODES, GQA_GROUP, COLUMNS, D4, JP)
    q2, z2 = _channel_plane(q, q_head, halves, 2, CODES, GQA_GROUP, COLUMNS, D4, JP)
    q3, z3 = _channel_plane(q, q_head, halves, 3, CODES, GQA_GROUP, COLUMNS, D4, JP)
    most = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(q2), tl.abs(q3)))
    unit = tl.max(most, 0) * (1 / 127) + 1e-30  # [COLUMNS]
    q0, q1 = int8_columns(q0, 1.0 / unit, COLUMNS), int8_columns(q1, 1.0 / unit, COLUMNS)
    q2, q3 = int8_columns(q2, 1.0 / unit, COLUMNS), int8_columns(q3, 1.0 / unit, COLUMNS)
    products = _products(
        k0, k1, k2, k3, odd0, odd1, odd2, odd3, q0, q1, q2, q3, CODES, TILE, COLUMNS, 0, 4 * D4, D4, JP
    )
    unit = tl.max(tl.reshape(unit, [HEADS, 2]), 1) * _share(CODES)
    from_offsets = tl.max(tl.reshape(z0 + z1 + z2 + z3, [HEADS, 2]), 1)
    return join_parts(products, TILE, HEADS) * unit[None, :] + from_offsets[None, :]


@triton.jit
def _channel_plane(
    q, q_head, halves, plane: tl.constexpr, CODES: tl.constexpr,
    GQA_GROUP: tl.constexpr, COLUMNS: tl.constexpr, D4: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """Queries of one plane's dims times their scales [JP, COLUMNS], and the sum of queries times offsets [COLUMNS]."""
    x = load_plane(q, q_head, plane, GQA_GROUP, COLUMNS, D4, JP)
    j = tl.arange(0, JP)
    scale = tl.load(halves + CODES.scale // 2 + plane * D4 + j, mask=j < D4, other=0.0).to(tl.float32)
    offset = tl.load(halves + CODES.offset // 2 + plane * D4 + j, mask=j < D4, other=0.0).to(tl.float32)
    from_offsets = tl.sum(x * _offset(scale, offset, CODES)[:, None], 0)
    return x * (scale * (1 / multiple(CODES, plane)))[:, None], from_offsets
