"""INT8 products of queries with keys of planes, for ``history_planes_fp16`` if a plane's dims fill such products.

One instruction extracts four codes from a word; FP16 needs one for two. Codes keep their bit position, and queries are
divided accordingly. A code that begins at bit six leaves ten bits of its query, two fewer than ``plane_codes`` allows
where it can choose. Only narrow codes are that high, and their own error is a hundred times larger. A tile's bytes are
signed. If a field has the highest bit, that bit is inverted, which subtracts 128 from the code.

Queries are split into a high and a low part, x = unit (high + low / 256). A product's columns are all heads' high
parts, then the low ones, so that both parts of a score are in one thread.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.decode.history_fp16 import columns_of, power_of_two, query_planes
from sglang_kvq.kernels.device.common import PAGE
from sglang_kvq.kernels.device.int8 import MAGIC, MAGIC_BITS, joined, rounded_halves
from sglang_kvq.kernels.device.plane_codes import (
    cell_count,
    cut_of,
    field_count,
    height_of,
    key_bytes,
    operand_of,
    plane_of,
    shares_of,
)


@triton.constexpr_function
def _twice_middle(codes, cell, field, share):
    """Returns twice the middle of a tile's values for a field of a share's token."""
    cut = cut_of(codes, cell, field, share)
    return cut - 256 * (cut >= 128)


@triton.jit
def int8_queries(q, scale_log2, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Multiplies a KV head's queries by the softmax's scale and converts them to operands.

    Returns:
        the operands for every field, INT8 [JP, 2 columns], by cell and share (``operand_of``); the start of products,
        INT32 [2 columns], for each share of the last cell; their unit, powers of two [columns].
    """
    COUNT: tl.constexpr = shares_of(CODES, cell_count(CODES) - 1)
    planes, largest, _ = query_planes(q, columns_of(SHAPE), SHAPE)
    unit = power_of_two(largest * (scale_log2 * (1 / 127)) + 1e-20)
    tiles, sums = (), ()
    for _ in tl.static_range(COUNT):
        sums += (tl.zeros([columns_of(SHAPE)], tl.int32),)
    for c in tl.static_range(cell_count(CODES)):
        for share in tl.static_range(shares_of(CODES, c)):
            for f in tl.static_range(field_count(CODES, c)):
                factor = (scale_log2 * (256 * 0.5 ** height_of(CODES, c, f, share))) / unit
                x = planes[plane_of(CODES, c, f)] * factor[None, :]
                tiles += (_operand(x, SHAPE),)
                part = tl.sum((x + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS, 0)
                sums = _with_middle(sums, part * _twice_middle(CODES, c, f, share), share, shares_of(CODES, c))
    starts = ()
    for n in tl.static_range(COUNT):
        starts += (_start(sums[n]),)
    return tiles, starts, unit


@triton.jit
def _operand(x, SHAPE: tl.constexpr):
    """Splits |x| <= 127 * 256 as x = 256 high + low, rounded: INT8 [JP, 2 columns]."""
    high, low = rounded_halves(x)
    both = tl.join((high >> 8).to(tl.int8), low.to(tl.int8))
    return tl.reshape(tl.permute(both, (0, 2, 1)), [SHAPE.JP, 2 * columns_of(SHAPE)])


@triton.jit
def _with_middle(sums, x, SHARE: tl.constexpr, SHARES: tl.constexpr):
    """Adds x to the sums that belong to a cell's share."""
    result = ()
    for n in tl.static_range(len(sums)):
        if n * SHARES // len(sums) == SHARE:
            result += (sums[n] + x,)
        else:
            result += (sums[n],)
    return result


@triton.jit
def _start(twice):
    """Returns the start of high and low parts: ``MAGIC`` minus half of ``twice``, rounded."""
    x = -(twice >> 1)
    both = tl.join(x >> 8, x & 255) + MAGIC_BITS
    return tl.reshape(tl.permute(both, (1, 0)), [2 * x.shape[0]])


@triton.jit
def int8_products(
    records, base_a, base_b, queries, starts, unit, CODES: tl.constexpr, SHAPE: tl.constexpr, PLAIN: tl.constexpr
):
    """Multiplies codes of two pages' keys, minus their middles, by queries: FP32 [2 PAGE, columns].

    Each share's tokens are separate rows, as in ``history_planes_fp16``.
    """
    LAST: tl.constexpr = cell_count(CODES) - 1
    ROWS: tl.constexpr = 2 * PAGE // shares_of(CODES, LAST)
    COLUMNS: tl.constexpr = columns_of(SHAPE)
    parts = ()
    for n in tl.static_range(len(starts)):
        parts += (tl.broadcast_to(starts[n][None, :], [ROWS, 2 * COLUMNS]),)
    for n in tl.static_range(cell_count(CODES)):
        parts = joined(parts, shares_of(CODES, LAST - n))
        bytes = key_bytes(records, base_a, base_b, LAST - n, CODES, SHAPE.JP, SHAPE)
        parts = _with_cell(parts, bytes, queries, LAST - n, CODES, PLAIN)
    products = tl.reshape(joined(parts, 1)[0].to(tl.float32, bitcast=True), [2 * PAGE, 2, COLUMNS])
    high, low = tl.split(tl.permute(products, (0, 2, 1)))
    # ``int8.join_halves``, times the unit: exact, because the unit is a power of two.
    high = high * unit[None, :] - (unit * (MAGIC + MAGIC / 256))[None, :]
    return low * (unit * (1 / 256))[None, :] + high


@triton.jit
def _with_cell(parts, bytes, queries, CELL: tl.constexpr, CODES: tl.constexpr, PLAIN: tl.constexpr):
    """Adds a cell's products to the parts of its shares."""
    result = ()
    for share in tl.static_range(shares_of(CODES, CELL)):
        part = parts[share]
        for f in tl.static_range(field_count(CODES, CELL)):
            k = _codes(bytes, CODES, CELL, f, share, PLAIN)
            part = tl.dot(k, queries[operand_of(CODES, CELL, share, f)], part, out_dtype=tl.int32)
        result += (part,)
    return result


@triton.jit
def _codes(
    bytes, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, SHARE: tl.constexpr, PLAIN: tl.constexpr
):
    """Extracts an INT8 tile of a field's codes of a share, at their bit position in the bytes."""
    if PLAIN:
        cut = cut_of(CODES, CELL, FIELD, SHARE)
        return ((bytes.to(tl.int32) & cut) ^ (cut & 128)).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            asm=bytes_ptx(CODES, CELL, FIELD, SHARE),
            constraints="=r,r",
            args=[bytes],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )


@triton.constexpr_function
def bytes_ptx(codes, cell, field, share):
    """Returns the PTX of ``_codes``, for four bytes."""
    cut = cut_of(codes, cell, field, share)
    if cut < 128:
        return f"and.b32 $0, $1, {cut * 0x01010101:#010x};"
    return f"lop3.b32 $0, $1, {cut * 0x01010101:#010x}, 0x80808080, 0x6a;"  # ($1 & cut) ^ 128 of each
