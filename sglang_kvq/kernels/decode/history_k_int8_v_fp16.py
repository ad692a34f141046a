"""Decode attention over 2-bit records, with INT8 products for K and FP16 for V, for heads of more than 64 dims.

The operands of V are those of ``history_fp16``. Four things keep an iteration short:

- Rows of scores are query heads: first all high parts, then the low ones. Columns are tokens. Weights as an operand
  have the same layout, so lanes exchange nothing. Two neighboring weights belong to two neighboring tokens, like their
  scales.
- Units of queries are powers of two, so their products with what ``MAGIC`` adds to sums are exact. From its two parts
  to the argument of the exponential, a score takes four multiply-adds.
- Scores are relative to the maximum at the last rescaling of sums. Rescaling happens in the first iteration, and when a
  weight would exceed the range of FP16. Other iterations compare all scores with one limit.
- Sums of p and of p z_v are products of p with ones and with V's offsets.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.decode.history_fp16 import (
    CODE,
    LEAST_SCALE,
    bases,
    columns_of,
    corrected,
    half_dot,
    half_product,
    load_keys,
    load_values,
    power_of_two,
    token_planes,
)
from sglang_kvq.kernels.device.codes import page_bytes
from sglang_kvq.kernels.device.common import PAGE, page_of
from sglang_kvq.kernels.device.int8 import MAGIC, MAGIC_BITS, half_scales, join_halves, rounded_halves
from sglang_kvq.kernels.device.softmax import NEVER, Softmax, first_columns, have_risen, raised

#: PTX of ``_split``: packs second bytes of $2 to $5 into one word, first bytes of $6 to $9 into another.
SPLIT = tl.constexpr("""{
    .reg .b32 first, second;
    prmt.b32 first, $2, $3, 0x0051;
    prmt.b32 second, $4, $5, 0x0051;
    prmt.b32 $0, first, second, 0x5410;
    prmt.b32 first, $6, $7, 0x0040;
    prmt.b32 second, $8, $9, 0x0040;
    prmt.b32 $1, first, second, 0x5410;
    }""")


@triton.jit
def history_half_int8(
    q, item, table, records, v_first, scale_log2, RECORD: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr,
    PAGES: tl.constexpr,
):  # fmt: skip
    """Attends like ``history_fp16.history_half``, if ``has_int8_keys``."""
    TILE: tl.constexpr = PAGES * PAGE
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    ROWS: tl.constexpr = SHAPE.VP
    PAGE_BYTES: tl.constexpr = page_bytes(RECORD, SHAPE.KV_HEADS)

    queries, q_sum, unit = _queries(q, scale_log2, SHAPE, PLAIN)
    # ``int8.join_halves``, times the unit: sums include MAGIC, which is subtracted here.
    start, low_unit = unit * -(MAGIC + MAGIC / 256), unit * (1 / 256)
    # Columns are (plane, page, half, i), see ``int8.tokens_of_tile``.
    column = tl.arange(0, TILE)
    plane, second = column // (TILE // 4), column // (PAGE // 4) % PAGES == 1
    token = plane * (PAGE // 4) + column % 8 * 2 + column // 8 % 2
    # Factor of each plane of V's codes.
    fraction = tl.where(plane // 2 == 1, 1 / 16, 1.0) * tl.where(plane % 2 == 1, 1 / 4, 1.0)
    dim = tl.arange(0, ROWS)
    scale_codes = RECORD.k.scale // 2 + tl.arange(0, 4)[None, :, None] * PAGE + tl.arange(0, PAGE)[None, None, :]

    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    sums = _no_sums(COLUMNS)
    top = tl.zeros([COLUMNS], tl.float32)
    largest = LEAST_SCALE + 0.0  # a power of two, no less than any s_v so far
    inverse, largest_bits = 1 / largest, _half_bits(largest)
    page_a, page_b = item.page_a.to(tl.int64), item.page_b.to(tl.int64)
    last = item.last_page
    limit = tl.minimum(last * PAGE, item.length)
    for index in tl.range(item.first_page, last, PAGES):
        base, both = bases(records, second, page_a * PAGE_BYTES, page_b * PAGE_BYTES, PAGES)
        page_a = page_of(table, tl.minimum(index + PAGES, last - 1))
        if PAGES == 2:
            page_b = page_of(table, tl.minimum(index + 3, last - 1))
        k = load_keys(base, plane, RECORD.k.low, SHAPE, PLAIN)
        values = load_values(both + RECORD.v.low, v_first + dim, dim < SHAPE.DIMS, SHAPE, PLAIN, PAGES)
        s_k, z_k, s_v, z_v = half_scales(tl.load(both.to(tl.pointer_type(tl.float16)) + scale_codes))  # FP16 [TILE]
        s_k, z_k = s_k.to(tl.float32), z_k.to(tl.float32)

        begins, ends = index == item.first_page, (index + PAGES) * PAGE > limit
        most = tl.max(s_v.to(tl.int16, bitcast=True).to(tl.int32), 0)
        high, low = _products(queries, k, TILE, COLUMNS)
        x = low * low_unit[:, None] + (high * unit[:, None] + start[:, None])
        x = x * s_k[None, :] + (z_k[None, :] * q_sum[:, None] - top[:, None])
        if have_risen(x, begins | ends | (most > largest_bits)):  # one branch: two would run out of registers
            position = (index + second.to(tl.int32)) * PAGE + token
            x = tl.where((position < limit)[None, :], x, NEVER)
            rise = raised(x, begins, 1)
            x -= rise[:, None]
            top += rise
            decay = tl.exp2(tl.minimum(-rise, 0.0))
            sums = _scaled_sums(sums, decay, COLUMNS)
            s_most = most.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            new_largest = tl.maximum(largest, power_of_two(s_most))
            acc *= (decay * (largest / new_largest))[None, :]
            largest = new_largest
            inverse, largest_bits = 1 / largest, _half_bits(largest)

        p, w = _weights(tl.exp2(x), half_product(s_v, (fraction * inverse).to(tl.float16), PLAIN), PLAIN)
        w = corrected(token_planes(tl.trans(w), COLUMNS, PAGES), PAGES)
        for n in tl.static_range(len(w)):
            acc = half_dot(values[n], w[n], acc, PLAIN)
        sums = _with_sums(sums, p, z_v, COLUMNS, PAGES, PLAIN)
    total, offset = _sums(sums, COLUMNS)
    acc = acc * (largest / CODE) + offset[None, :]
    return first_columns(Softmax(acc, total, top), COLUMNS, SHAPE.HEADS)


@triton.jit
def _half_bits(x):
    """Returns the FP16 bits of a power of two, ``LEAST_SCALE`` or more."""
    return tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) - 112) << 10, 512)


@triton.jit
def _queries(q, scale_log2, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Multiplies queries of one KV head by the softmax's scale and converts them to operands.

    Returns:
        operands INT8 [2 columns, JP] for the four planes: all heads' high parts, then the low ones; sums of queries;
            the unit of their high parts, a power of two; [columns] each.
    """
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    JP: tl.constexpr = SHAPE.JP
    h, j = tl.arange(0, COLUMNS)[:, None], tl.arange(0, JP)[None, :]
    inside = (j < SHAPE.D4) & (h < SHAPE.GQA_GROUP)
    planes = ()
    largest = tl.zeros([COLUMNS, JP], tl.float32)
    for n in tl.static_range(4):
        x = tl.load(q.data + h * q.head + (n * SHAPE.D4 + j), mask=inside, other=0.0).to(tl.float32)
        planes += (x,)
        largest = tl.maximum(largest, tl.abs(x))
    unit = power_of_two(tl.max(largest, 1) * (scale_log2 * (1 / 127)) + 1e-20)
    factor = scale_log2 * 256 / unit
    # This product makes the compiler convert operands to their layout here, and not in every iteration of the loop.
    tiles, ones = (), ()
    for n in tl.static_range(4):
        high, low = _split(planes[n] * (factor * (0.25 if n % 2 == 1 else 1.0))[:, None], PLAIN)
        tiles += (tl.reshape(tl.permute(tl.join(high, low), (2, 0, 1)), [2 * COLUMNS, JP]),)
        ones += (tl.full([8, JP], 4 if n % 2 == 1 else 1, tl.int8),)
    high, low = _products(tiles, ones, 8, COLUMNS)
    return tiles, tl.max(join_halves(high, low), 1) * unit, unit


@triton.jit
def _split(x, PLAIN: tl.constexpr):
    """Splits |x| <= 127 * 256 into INT8 (high, low) with x = 256 high + low, rounded."""
    high, low = rounded_halves(x)
    if PLAIN:
        return (high >> 8).to(tl.int8), low.to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            asm=SPLIT,
            constraints="=&r,=r,r,r,r,r,r,r,r,r",
            args=[high, low],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _products(queries, k, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiplies queries' high and low parts by codes of K, plus ``MAGIC``, float32 [COLUMNS, TOKENS] each."""
    products = tl.full([2 * COLUMNS, TOKENS], MAGIC_BITS, tl.int32)
    for n in tl.static_range(4):
        products = tl.dot(queries[n], tl.trans(k[n]), products, out_dtype=tl.int32)
    parts = tl.reshape(products.to(tl.float32, bitcast=True), [2, COLUMNS, TOKENS])
    return tl.split(tl.permute(parts, (1, 2, 0)))


@triton.jit
def _weights(p, own, PLAIN: tl.constexpr):
    """Returns p [COLUMNS, TILE] in FP16, and its product with own [TILE]."""
    p, own = tl.broadcast(p, own[None, :])
    if PLAIN:
        p = p.to(tl.float16)
        return p, half_product(p, own, PLAIN)
    else:
        return tl.inline_asm_elementwise(
            asm="cvt.rn.f16x2.f32 $0, $3, $2; mul.rn.f16x2 $1, $0, $4;",
            constraints="=&r,=r,r,r,r",
            args=[p, own],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _no_sums(COLUMNS: tl.constexpr):
    """Returns the zeros to which ``_with_sums`` adds.

    Eight heads are columns of one product; the rows of its other operand are ones and offsets. More heads are rows, and
    fill a product by themselves, so each of the two sums has its own product.
    """
    if COLUMNS == 8:
        return (tl.zeros([16, COLUMNS], tl.float32),)
    else:
        return tl.zeros([COLUMNS, 8], tl.float32), tl.zeros([COLUMNS, 8], tl.float32)


@triton.jit
def _with_sums(sums, p, z_v, COLUMNS: tl.constexpr, PAGES: tl.constexpr, PLAIN: tl.constexpr):
    """Adds the sums over tokens of p, FP16 [COLUMNS, TILE], and of p z_v."""
    if COLUMNS == 8:
        p, z_v = token_planes(tl.trans(p), COLUMNS, PAGES), token_planes(z_v[:, None], 1, PAGES)
        both = sums[0]
        for n in tl.static_range(len(p)):
            ones, z = tl.full([8, 16], 1.0, tl.float16), tl.broadcast_to(tl.reshape(z_v[n], [1, 16]), [8, 16])
            both = half_dot(tl.reshape(tl.permute(tl.join(ones, z), (2, 0, 1)), [16, 16]), p[n], both, PLAIN)
        return (both,)
    else:
        p, z_v = _tiles(p, COLUMNS), _tiles(z_v[None, :], 1)
        total, offset = sums
        for n in tl.static_range(len(p)):
            total = half_dot(p[n], tl.full([16, 8], 1.0, tl.float16), total, PLAIN)
            offset = half_dot(p[n], tl.broadcast_to(tl.reshape(z_v[n], [16, 1]), [16, 8]), offset, PLAIN)
        return total, offset


@triton.jit
def _scaled_sums(sums, factor, COLUMNS: tl.constexpr):
    """Multiplies each head's sums by its factor, [COLUMNS]."""
    if COLUMNS == 8:
        return (sums[0] * factor[None, :],)
    else:
        return sums[0] * factor[:, None], sums[1] * factor[:, None]


@triton.jit
def _sums(sums, COLUMNS: tl.constexpr):
    """Returns both sums, [COLUMNS] each; the maximum is over equal copies."""
    if COLUMNS == 8:
        total, offset = tl.split(tl.permute(tl.reshape(sums[0], [2, 8, COLUMNS]), (1, 2, 0)))
        return tl.max(total, 0), tl.max(offset, 0)
    else:
        return tl.max(sums[0], 1), tl.max(sums[1], 1)


@triton.jit
def _tiles(x, ROWS: tl.constexpr):
    """Splits [ROWS, tokens] into tiles of 16 tokens."""
    tiles = (x,)
    for _ in tl.static_range(_log2(x.shape[1] // 16)):
        halves = ()
        for n in tl.static_range(len(tiles)):
            a, b = _halves(tiles[n], ROWS)
            halves += (a, b)
        tiles = halves
    return tiles


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def _halves(x, ROWS: tl.constexpr):
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, HALF]), (0, 2, 1)))
