"""Decode attention over 2-bit records, with FP16 products for V or for both K and V.

``history_general`` splits queries and weights into two INT8 columns. Splitting weights and joining products
takes ten instructions for each token and head. With more than four heads, or heads of 64 dims, FP16 takes fewer, with
one column per query head:

- One AND cuts two codes out of a word. Each is a subnormal FP16 number, c 2^-24, times 4^plane. Tensor cores multiply
  these exactly; queries and weights carry the remaining factor.
- A byte permutation brings the second and fourth byte of a word to the lower halves. That is already an operand with
  all four codes of a byte, c_0 + 4 c_1 + 16 c_2 + 64 c_3. It is used for plane 3; what it adds for the other planes is
  subtracted from their queries or weights.
- The tensor cores themselves add products of V to the sums of earlier tiles.
- Weights are products of FP16 numbers, two per instruction: p, which is at most 2^13, and s_v, scaled below 1 by a
  power of two that all heads share.

If a plane's dims fill an INT8 product, K's products are in INT8 (``history_k_int8_v_fp16``): extracting codes takes
five instructions per word, not eight. These are logical ones, of which an SM runs half as many per cycle as additions.

An iteration is two pages, or one. One page takes fewer registers and half the shared memory, which leaves room for
another stage of copies. With two stages a program waits for its latest copy, and only other programs hide that.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.device.codes import page_bytes
from sglang_kvq.kernels.device.common import PAGE, page_of, quad_order
from sglang_kvq.kernels.device.int8 import base_of, half_scales
from sglang_kvq.kernels.device.softmax import NEVER, Softmax, first_columns
from sglang_kvq.kernels.device.unpack import own_tiles, two_bits

#: Value of one code: the least subnormal number of FP16.
CODE = tl.constexpr(2.0**-24)
#: Largest element of queries as operands; then log2 of the largest p, which weights p s_v do not exceed.
LARGEST_QUERY = tl.constexpr(2.0**14)
_WEIGHT_LOG2 = tl.constexpr(13.0)
#: Least common factor of V's scales: its inverse must be an FP16 number.
LEAST_SCALE = tl.constexpr(2.0**-15)


@triton.jit
def history_half(
    q, item, table, records, v_first, scale_log2, RECORD: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr,
    PAGES: tl.constexpr,
):  # fmt: skip
    """Attends like ``history_general``, for records with one group per row; PAGES per iteration.

    Requires that ``has_int8_keys`` is False.
    """
    TILE: tl.constexpr = PAGES * PAGE
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    ROWS: tl.constexpr = SHAPE.VP
    PAGE_BYTES: tl.constexpr = page_bytes(RECORD, SHAPE.KV_HEADS)

    queries, q_sum, unit = _queries(q, SHAPE)
    unit = unit * scale_log2
    # Rows are (plane, page, half, i), see ``int8.tokens_of_tile``.
    row = tl.arange(0, TILE)
    plane, second = row // (TILE // 4), row // (PAGE // 4) % PAGES == 1
    token = plane * (PAGE // 4) + row % 8 * 2 + row // 8 % 2
    # Factor of each plane of V's codes.
    fraction = tl.where(plane // 2 == 1, 1 / 16, 1.0) * tl.where(plane % 2 == 1, 1 / 4, 1.0)
    dim = tl.arange(0, ROWS)
    scale_codes = RECORD.k.scale // 2 + tl.arange(0, 4)[None, :, None] * PAGE + tl.arange(0, PAGE)[None, None, :]

    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    offsets = tl.zeros([8, COLUMNS], tl.float32)
    top = tl.full([COLUMNS], NEVER, tl.float32)
    total = tl.zeros([8, COLUMNS], tl.float32)
    largest = LEAST_SCALE + 0.0  # a power of two, no less than any s_v so far
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
        scales = half_scales(tl.load(both.to(tl.pointer_type(tl.float16)) + scale_codes))  # FP16 [TILE] each
        s_k, z_k, z_v = scales[0].to(tl.float32), scales[1].to(tl.float32), scales[3].to(tl.float32)

        x = _products(k, queries, TILE, COLUMNS, PLAIN) * s_k[:, None] + z_k[:, None] * q_sum[None, :]
        if (index + PAGES) * PAGE > limit:
            position = (index + second.to(tl.int32)) * PAGE + token
            x = tl.where((position < limit)[:, None], x, NEVER)

        new_top = tl.maximum(top, tl.max(x, 0) * unit - _WEIGHT_LOG2)
        decay = tl.exp2(top - new_top)
        top = new_top
        p = tl.exp2(x * unit[None, :] - top[None, :])
        total = total * decay[None, :] + _spread_sum(p, TILE, COLUMNS)
        offsets = offsets * decay[None, :] + _spread_sum(p * z_v[:, None], TILE, COLUMNS)
        new_largest = tl.maximum(largest, power_of_two(tl.max(scales[2], 0).to(tl.float32)))
        decay *= largest / new_largest
        largest = new_largest
        own = half_product(scales[2], (fraction * (1 / largest)).to(tl.float16), PLAIN)
        w = corrected(token_planes(half_product(p.to(tl.float16), own[:, None], PLAIN), COLUMNS, PAGES), PAGES)
        acc *= decay[None, :]
        for n in tl.static_range(len(w)):
            acc = half_dot(values[n], w[n], acc, PLAIN)
    acc = acc * (largest / CODE) + tl.sum(offsets, 0)[None, :]
    return first_columns(Softmax(acc, tl.sum(total, 0), top), COLUMNS, SHAPE.HEADS)


@triton.jit
def bases(records, second, base_a, base_b, PAGES: tl.constexpr):
    """Returns pointers to an iteration's records: one per row of the tile, and one per page, [PAGES, 1, 1].

    second: True for rows of the second page; base_a, base_b: bytes from ``records`` to the pages'.
    """
    if PAGES == 2:
        rows, pages = base_of(second, base_a, base_b), base_of(tl.arange(0, 2) == 1, base_a, base_b)[:, None, None]
    else:
        rows, pages = base_a + tl.zeros(second.shape, tl.int64), base_a + tl.zeros([1, 1, 1], tl.int64)
    return records + rows, records + pages


@triton.jit
def power_of_two(x):
    """Returns the least power of two that is no less than x, a positive number or zero."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def half_product(a, b, PLAIN: tl.constexpr):
    """Multiplies FP16 numbers, two elements per instruction."""
    a, b = tl.broadcast(a, b)
    if PLAIN:
        return (a.to(tl.float32) * b.to(tl.float32)).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            asm="mul.rn.f16x2 $0, $1, $2;", constraints="=r,r,r", args=[a, b], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.constexpr_function
def has_int8_keys(shape):
    """Tells if products of K are in INT8, because a plane's dims fill one."""
    return shape.JP >= 32


@triton.jit
def _products(k, queries, TILE: tl.constexpr, COLUMNS: tl.constexpr, PLAIN: tl.constexpr):
    """Multiplies codes of K by queries, float32 [TILE, COLUMNS]."""
    products = tl.zeros([TILE, COLUMNS], tl.float32)
    for n in tl.static_range(len(k)):
        products = half_dot(k[n], queries[n], products, PLAIN)
    return products


@triton.constexpr_function
def columns_of(shape):
    """Returns the columns of a product: the heads, or eight, the smallest product."""
    return max(shape.HEADS, 8)


@triton.jit
def half_dot(a, b, acc, PLAIN: tl.constexpr):
    if PLAIN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _spread_sum(x, TILE: tl.constexpr, HEADS: tl.constexpr):
    """Returns ``int8.spread_sum`` of a tile of any size."""
    return tl.sum(tl.reshape(x, [TILE // 8, 8, HEADS]), 0)


@triton.jit
def load_keys(base, plane, LOW: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr):
    """Loads INT8 or FP16 tiles of K's codes; base: a pointer to the page's record for each row of the tile."""
    D4: tl.constexpr = SHAPE.D4
    QUARTER: tl.constexpr = PAGE // 4
    row = tl.arange(0, plane.shape[0])
    start = LOW + (plane * QUARTER + row % QUARTER) * D4  # ``common.key_row`` of the row's token
    j = tl.arange(0, SHAPE.JP)
    if PLAIN and not has_int8_keys(SHAPE):
        j = quad_order(j)
    address = (base + start)[:, None] + j[None, :]
    if SHAPE.JP == D4:
        bytes = tl.load(address)
    else:
        bytes = tl.load(address, mask=(j < D4)[None, :], other=0)
    if has_int8_keys(SHAPE):
        return two_bits(bytes, 3, PLAIN)
    else:
        return _quads(bytes, PLAIN)


@triton.jit
def load_values(records, dim, inside, SHAPE: tl.constexpr, PLAIN: tl.constexpr, PAGES: tl.constexpr):
    """Loads FP16 tiles of V's codes, [dims, tokens] each; records: pointers to V's codes in pages, [PAGES, 1, 1].

    Loads page by page, so that neighboring lanes read neighboring bytes.
    """
    QUARTER: tl.constexpr = PAGE // 4
    ROWS: tl.constexpr = SHAPE.VP
    address = records + dim[None, :, None] * QUARTER
    if PAGES == 2:
        words = address.to(tl.pointer_type(tl.int16)) + tl.arange(0, QUARTER // 2)[None, None, :]
        if ROWS == SHAPE.DIMS:
            x = tl.load(words)
        else:
            x = tl.load(words, mask=inside[None, :, None], other=0)
        return _fields(tl.reshape(tl.permute(x, (1, 0, 2)), [ROWS, QUARTER]), PLAIN)
    else:
        i = tl.arange(0, QUARTER)
        if PLAIN:
            i = quad_order(i)
        if ROWS == SHAPE.DIMS:
            x = tl.load(address + i[None, None, :])
        else:
            x = tl.load(address + i[None, None, :], mask=inside[None, :, None], other=0)
        return _quads(tl.reshape(x, [ROWS, QUARTER]), PLAIN)


@triton.jit
def _queries(q, SHAPE: tl.constexpr):
    """Converts queries of one KV head to operands.

    Returns:
        for each tile of ``load_keys`` FP16 [its columns, heads]; sums of queries in units of the products; that unit,
        [heads] each.
    """
    planes, largest, total = query_planes(q, columns_of(SHAPE), SHAPE)
    unit = largest * (1 / LARGEST_QUERY) + 1e-30
    factor = (1 / unit)[None, :]
    whole = tl.where((tl.arange(0, SHAPE.JP) % 2 == 1)[:, None], planes[3] * factor * (1 / 64), 0.0)
    tiles = ()
    for n in tl.static_range(4):
        x = planes[n] * factor * 4.0**-n
        if n < 3:
            x -= whole
        tiles += (_in_quad_order(x.to(tl.float16)),)
    return tiles, total / unit * CODE, unit * (1 / CODE)


@triton.jit
def query_planes(q, COLUMNS: tl.constexpr, SHAPE: tl.constexpr):
    """Reads each query of a KV head once; returns each plane, float32 [JP, COLUMNS], and heads' maxima and sums."""
    JP: tl.constexpr = SHAPE.JP
    h, j = tl.arange(0, COLUMNS)[None, :], tl.arange(0, JP)[:, None]
    inside = (j < SHAPE.D4) & (h < SHAPE.GQA_GROUP)
    planes = ()
    largest, total = tl.zeros([JP, COLUMNS], tl.float32), tl.zeros([JP, COLUMNS], tl.float32)
    for n in tl.static_range(4):
        x = tl.load(q.data + h * q.head + (n * SHAPE.D4 + j), mask=inside, other=0.0).to(tl.float32)
        planes += (x,)
        largest = tl.maximum(largest, tl.abs(x))
        total += x
    return planes, tl.max(largest, 0), tl.sum(total, 0)


@triton.jit
def _in_quad_order(x):
    """Reorders rows by ``quad_order``."""
    ROWS: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [ROWS // 4, 2, 2, x.shape[1]])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3)), [ROWS, x.shape[3]])


@triton.jit
def _fields(words, PLAIN: tl.constexpr):
    """Splits int16 words of eight codes into FP16 tiles: planes 0 to 3 of the first byte, then of the second.

    Plane n is 4^n times the code times ``CODE``.
    """
    if PLAIN:
        upper = (words >> 8) & 0xFF
        x0, x1, x2, x3 = subnormal(words & 3), subnormal(words & 12), subnormal(words & 48), subnormal(words & 192)
        y0, y1, y2, y3 = subnormal(upper & 3), subnormal(upper & 12), subnormal(upper & 48), subnormal(upper)
        return x0, x1, x2, x3, y0, y1, y2, y3
    else:
        tiles = tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 upper;
            prmt.b32 upper, $8, 0, 0x4341;
            and.b32 $0, $8, 0x00030003;
            and.b32 $1, $8, 0x000c000c;
            and.b32 $2, $8, 0x00300030;
            and.b32 $3, $8, 0x00c000c0;
            and.b32 $4, upper, 0x00030003;
            and.b32 $5, upper, 0x000c000c;
            and.b32 $6, upper, 0x00300030;
            mov.b32 $7, upper;
            }""",
            constraints="=r,=r,=r,=r,=r,=r,=r,=r,r",
            args=[words],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
        return own_tiles(tiles, 0)


@triton.jit
def _quads(packed, PLAIN: tl.constexpr):
    """Splits uint8 bytes of four codes into four FP16 tiles, planes 0 to 3, with the factors of ``_fields``.

    The second and third of every four bytes change places, so that one instruction extracts two codes of a word. With
    PLAIN, bytes were loaded in that order.
    """
    if PLAIN:
        x0, x1 = subnormal(packed & 3), subnormal(packed & 12)
        x2, x3 = subnormal(packed & 48), subnormal(packed & tl.where(_is_second(packed.shape[1]), 255, 192)[None, :])
        return x0, x1, x2, x3
    else:
        tiles = tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 upper;
            prmt.b32 upper, $8, 0, 0x4341;
            and.b32 $0, $8, 0x00030003;
            and.b32 $1, upper, 0x00030003;
            and.b32 $2, $8, 0x000c000c;
            and.b32 $3, upper, 0x000c000c;
            and.b32 $4, $8, 0x00300030;
            and.b32 $5, upper, 0x00300030;
            and.b32 $6, $8, 0x00c000c0;
            mov.b32 $7, upper;
            }""",
            constraints="=r,=r,=r,=r,=r,=r,=r,=r,r",
            args=[packed],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
        return own_tiles(tiles, 0)


@triton.jit
def _is_second(COUNT: tl.constexpr):
    """Marks columns of ``_quads``' tiles, or rows of the other operand, that belong to second and fourth bytes."""
    return tl.arange(0, COUNT) // 2 % 2 == 1


@triton.jit
def subnormal(code):
    return code.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def token_planes(x, HEADS: tl.constexpr, PAGES: tl.constexpr):
    """Converts rows (plane, page, half, i) to operands [16 tokens, HEADS] for each tile of ``load_values``."""
    if PAGES == 2:
        x = split_planes(x, HEADS)
        return x[0][0], x[1][0], x[2][0], x[3][0], x[0][1], x[1][1], x[2][1], x[3][1]
    else:  # byte 4 l + 2 e + half comes at 4 l + 2 half + e
        x = tl.permute(tl.reshape(x, [2, 2, 2, 4, 2, HEADS]), (3, 2, 4, 5, 0, 1))
        a, b = tl.split(tl.reshape(x, [16, HEADS, 2, 2]))
        x0, x2 = tl.split(a)
        x1, x3 = tl.split(b)
        return x0, x1, x2, x3


@triton.jit
def corrected(w, PAGES: tl.constexpr):
    """Subtracts from ``token_planes`` of weights what products with whole bytes add for the other planes."""
    if PAGES == 2:
        y = w[7]
        return w[0], w[1], w[2], w[3], w[4] - y, w[5] - y, w[6] - y, y
    else:
        y = tl.where(_is_second(16)[:, None], w[3], 0.0)
        return w[0] - y, w[1] - y, w[2] - y, w[3]


@triton.jit
def split_planes(x, HEADS: tl.constexpr):
    """Splits rows (plane, page, half, i) into tiles [16 = (page, i), HEADS]: for each plane, one per half."""
    x = tl.permute(tl.reshape(x, [2, 2, 2, 2, 8, HEADS]), (2, 4, 5, 3, 0, 1))
    a, b = tl.split(tl.reshape(x, [16, HEADS, 2, 2, 2]))
    x0, x2 = _halves(a)
    x1, x3 = _halves(b)
    return x0, x1, x2, x3


@triton.jit
def _halves(x):
    """Splits [16, HEADS, half, upper plane] into its four parts."""
    lower, upper = tl.split(x)
    return tl.split(lower), tl.split(upper)
