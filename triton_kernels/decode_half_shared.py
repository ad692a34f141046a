"""``decode_half_int8`` for 9 to 16 query heads in 168 registers: three programs to a scheduler instead of two.

Sums of 16 heads take 64 of them. So of the rest less is in registers at a time:

- Operands of queries, 32 registers, lie in shared memory, each lane's own, and are read for each product (``_kept``).
- Scores are computed for half a page after the other. Those of a whole one take 64 registers as INT32, and 32 after.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.common import PAGE, page_of
from sglang_kvq.kernels.decode_half import (
    CODE,
    LEAST_SCALE,
    columns_of,
    corrected,
    half_dot,
    half_product,
    load_keys,
    load_values,
    power_of_two,
)
from sglang_kvq.kernels.decode_half_int8 import (
    half_bits,
    no_sums,
    products_of,
    split_parts,
    sums_of,
    tiles_of,
    weights_of,
)
from sglang_kvq.kernels.int8 import MAGIC, half_scales
from sglang_kvq.kernels.softmax import NEVER, Softmax, have_risen, raised

#: PTX of ``_place``: where the lane keeps its words in shared memory.
PLACE = tl.constexpr("""{
    .shared .align 16 .b8 kept[4096];
    .reg .b32 lane, start;
    mov.u32 lane, %laneid;
    mov.u32 start, kept;
    mad.lo.u32 $0, lane, 16, start;
    }""")
#: PTX that stores four words $4 to $7 at $8; it has to have a result.
STORE = tl.constexpr("""
    st.shared.v4.b32 [$8], {$4, $6, $5, $7};
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    """)
#: Bytes of 32 lanes' words, 16 each.
_WORDS = tl.constexpr(512)


@triton.constexpr_function
def has_shared_queries(shape):
    """Whether a program's queries are what ``_keep`` takes: 16 columns, and planes that fill one INT8 product."""
    return shape.HEADS == 16 and shape.JP == 32


@triton.jit
def history_half_shared(
    q, item, table, records, v_first, scale_log2, RECORD: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr
):
    """What ``decode_half_int8.history_half_int8`` does, a page a turn, where ``has_shared_queries``."""
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    ROWS: tl.constexpr = SHAPE.VP
    PAGE_BYTES: tl.constexpr = SHAPE.KV_HEADS * RECORD.bytes
    HALF: tl.constexpr = PAGE // 2

    queries, q_sum, unit = _queries(q, scale_log2, SHAPE, PLAIN)
    # Columns of the lower half are (plane 0 or 1, half, i), those of the upper one of planes 2 and 3.
    column = tl.arange(0, HALF)
    plane = column // (PAGE // 4)
    token = plane * (PAGE // 4) + column % 8 * 2 + column // 8 % 2
    fraction = tl.where(plane == 1, 1 / 4, 1.0)  # by what a plane of V's codes is multiplied; upper ones 1 / 16 more
    dim = tl.arange(0, ROWS)
    scale_codes = RECORD.k.scale // 2 + tl.arange(0, 4)[None, :, None] * PAGE + tl.arange(0, PAGE)[None, None, :]

    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    sums = no_sums(COLUMNS)
    top = tl.zeros([COLUMNS], tl.float32)
    largest = LEAST_SCALE + 0.0  # a power of two, no less than s_v so far
    inverse, largest_bits = 1 / largest, half_bits(largest)
    page = item.page_a.to(tl.int64)
    last = item.last_page
    limit = tl.minimum(last * PAGE, item.length)
    for index in tl.range(item.first_page, last):
        base = records + page * PAGE_BYTES
        page = page_of(table, tl.minimum(index + 1, last - 1))
        rows, both = base + tl.zeros([HALF], tl.int64), base + tl.zeros([1, 1, 1], tl.int64)
        k_lower = load_keys(rows, plane, RECORD.k.low, SHAPE, PLAIN)
        k_upper = load_keys(rows, plane + 2, RECORD.k.low, SHAPE, PLAIN)
        values = load_values(both + RECORD.v.low, v_first + dim, dim < SHAPE.DIMS, SHAPE, PLAIN, 1)
        s_k, z_k, s_v, z_v = half_scales(tl.load(both.to(tl.pointer_type(tl.float16)) + scale_codes))  # FP16 [PAGE]
        most = tl.max(s_v.to(tl.int16, bitcast=True).to(tl.int32), 0)
        s_lower, s_upper = _halves(s_k)
        z_lower, z_upper = _halves(z_k)

        operands = _kept(queries, index, 0, PLAIN)
        lower = _scores(operands, k_lower, s_lower, z_lower, q_sum, unit, top, COLUMNS)
        # These are read when the lower scores are there: the compiler mixes both halves else, and registers run out.
        operands = _kept(queries, index, tl.max(lower.to(tl.int32, bitcast=True)), PLAIN)
        upper = _scores(operands, k_upper, s_upper, z_upper, q_sum, unit, top, COLUMNS)

        begins, ends = index == item.first_page, (index + 1) * PAGE > limit
        if have_risen(_larger(lower, upper), begins | ends | (most > largest_bits)):
            position = index * PAGE + token
            lower = tl.where((position < limit)[None, :], lower, NEVER)
            upper = tl.where((position + HALF < limit)[None, :], upper, NEVER)
            rise = raised(tl.maximum(lower, upper), begins, 1)
            lower -= rise[:, None]
            upper -= rise[:, None]
            top += rise
            decay = tl.exp2(tl.minimum(-rise, 0.0))
            sums = sums[0] * decay[:, None], sums[1] * decay[:, None]
            s_most = most.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            new_largest = tl.maximum(largest, power_of_two(s_most))
            acc *= (decay * (largest / new_largest))[None, :]
            largest = new_largest
            inverse, largest_bits = 1 / largest, half_bits(largest)

        s_lower, s_upper = _halves(s_v)
        z_lower, z_upper = _halves(z_v)
        own_lower = half_product(s_lower, (fraction * inverse).to(tl.float16), PLAIN)
        own_upper = half_product(s_upper, (fraction * (inverse * (1 / 16))).to(tl.float16), PLAIN)
        p_lower, w_lower = weights_of(tl.exp2(lower), own_lower, PLAIN)
        p_upper, w_upper = weights_of(tl.exp2(upper), own_upper, PLAIN)
        w0, w1 = _planes(tl.trans(w_lower), COLUMNS)
        w2, w3 = _planes(tl.trans(w_upper), COLUMNS)
        w = corrected((w0, w1, w2, w3), 1)
        for n in tl.static_range(len(w)):
            acc = half_dot(values[n], w[n], acc, PLAIN)
        sums = _with_sums(sums, p_lower, z_lower, COLUMNS, PLAIN)
        sums = _with_sums(sums, p_upper, z_upper, COLUMNS, PLAIN)
    total, offset = sums_of(sums, COLUMNS)
    acc = acc * (largest / CODE) + offset[None, :]
    return Softmax(acc, total, top)


@triton.jit
def _scores(queries, k, s_k, z_k, q_sum, unit, top, COLUMNS: tl.constexpr):
    """Of half a page, in base 2 and relative to ``top``, as in ``history_half_int8``."""
    s_k, z_k = s_k.to(tl.float32), z_k.to(tl.float32)
    high, low = products_of(queries, k, PAGE // 2, COLUMNS)
    # Sums are MAGIC too large: ``int8.join_halves``, times the unit.
    x = low * (unit * (1 / 256))[:, None] + (high * unit[:, None] + (unit * -(MAGIC + MAGIC / 256))[:, None])
    return x * s_k[None, :] + (z_k[None, :] * q_sum[:, None] - top[:, None])


@triton.jit
def _larger(a, b):
    """As integers, for ``have_risen``."""
    a, b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    return tl.maximum(a, b).to(tl.float32, bitcast=True)


@triton.jit
def _halves(x):
    """Of both halves of the page."""
    return tl.split(tl.permute(tl.reshape(x, [2, PAGE // 2]), (1, 0)))


@triton.jit
def _planes(x, COLUMNS: tl.constexpr):
    """``decode_half.token_planes`` of half a page: rows (plane, half, i) to two operands [16 tokens, COLUMNS]."""
    x = tl.permute(tl.reshape(x, [2, 2, 4, 2, COLUMNS]), (2, 1, 3, 4, 0))
    return tl.split(tl.reshape(x, [16, COLUMNS, 2]))


@triton.jit
def _with_sums(sums, p, z_v, COLUMNS: tl.constexpr, PLAIN: tl.constexpr):
    """``decode_half_int8.with_sums`` of half a page."""
    p, z_v = tiles_of(p, COLUMNS), tiles_of(z_v[None, :], 1)
    total, offset = sums
    for n in tl.static_range(len(p)):
        total = half_dot(p[n], tl.full([16, 8], 1.0, tl.float16), total, PLAIN)
        offset = half_dot(p[n], tl.broadcast_to(tl.reshape(z_v[n], [16, 1]), [16, 8]), offset, PLAIN)
    return total, offset


@triton.jit
def _queries(q, scale_log2, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Queries of one KV head times the softmax's scale.

    Returns:
        what ``_kept`` takes; sums of queries, and what their high parts count, a power of two, [columns] each.
    """
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    JP: tl.constexpr = SHAPE.JP
    h, j = tl.arange(0, COLUMNS)[:, None], tl.arange(0, JP)[None, :]
    inside = (j < SHAPE.D4) & (h < SHAPE.GQA_GROUP)
    planes = ()
    largest, total = tl.zeros([COLUMNS, JP], tl.float32), tl.zeros([COLUMNS, JP], tl.float32)
    for n in tl.static_range(4):
        x = tl.load(q.data + h * q.head + (n * SHAPE.D4 + j), mask=inside, other=0.0).to(tl.float32)
        planes += (x,)
        largest = tl.maximum(largest, tl.abs(x))
        total += x
    unit = power_of_two(tl.max(largest, 1) * (scale_log2 * (1 / 127)) + 1e-20)
    factor = scale_log2 * 256 / unit
    parts = ()
    for n in tl.static_range(4):
        high, low = split_parts(planes[n] * (factor * (0.25 if n % 2 == 1 else 1.0))[:, None], PLAIN)
        parts += (high, low)
    return _keep(parts, planes[0], PLAIN), tl.sum(total, 1) * scale_log2, unit


@triton.jit
def _keep(parts, like, PLAIN: tl.constexpr):
    """Store INT8 tiles [16, 32] in shared memory, as registers hold them.

    Returns:
        each lane's place, for all elements of a tile. It is laid out as ``like`` is, which was loaded as the operand of
        a product wants it. So ``_kept`` takes the same registers from the same lane's place, whatever the layout is.
        PLAIN: the tiles.
    """
    if PLAIN:
        return parts
    else:
        place = tl.inline_asm_elementwise(PLACE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        place = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [place, like], dtype=tl.int32, is_pure=True, pack=1
        )
        for n in tl.static_range(len(parts)):
            tl.inline_asm_elementwise(
                asm=STORE,
                constraints=_words(20),
                args=[parts[n], place + n * _WORDS],
                dtype=tl.int8,
                is_pure=False,
                pack=16,
            )
        return place


@triton.jit
def _kept(queries, turn, before, PLAIN: tl.constexpr):
    """Operands INT8 [32, 32] for the four planes, from ``_keep``: all heads' high parts, then the low ones.

    They are read in this turn, and not earlier than ``before`` is known, bits of a number.
    """
    if PLAIN:
        parts = queries
    else:
        # Zero, but only we know: one for NaN. Without the turn the compiler would read them before the loop.
        zero = tl.inline_asm_elementwise(
            asm="{ .reg .pred nan; setp.eq.s32 nan, $1, 0x7fffffff; selp.b32 $0, 16, 0, nan; }",
            constraints="=r,r,r",
            args=[before, turn],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        parts = ()
        for n in tl.static_range(8):
            # Of 16 bytes in a row the middle words change places, for four neighbouring registers to be an operand.
            part = tl.inline_asm_elementwise(
                asm="ld.volatile.shared.v4.b32 {$0, $2, $1, $3}, [$4];",
                constraints=_words(16),
                args=[queries + (zero + n * _WORDS)],
                dtype=tl.int8,
                is_pure=True,
                pack=16,
            )
            parts += (part,)
    tiles = ()
    for n in tl.static_range(4):
        both = tl.join(parts[2 * n], parts[2 * n + 1])
        tiles += (tl.reshape(tl.permute(both, (2, 0, 1)), [32, 32]),)
    return tiles


@triton.constexpr_function
def _words(inputs):
    """Constraints of assembly with four words of output."""
    return ",".join(["=r"] * 4 + ["r"] * inputs)
