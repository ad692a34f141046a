"""INT8 tensor-core products at 15 bits, shared by the INT8 loops over a history.

The operand that does not hold codes is split into two INT8 columns: x = unit (high + low / 256).
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.device.common import PAGE

#: 1.5 * 2^23: added to a small integer in float32, it leaves that integer, in two's complement, in the low bits.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def query_operands(q, ODD: tl.constexpr, SHAPE: tl.constexpr):
    """Converts queries of one KV head to operands for tiles in which the codes of planes 1 and 3 are divided by ODD.

    q: a ``View`` that starts at one token and the KV head's first query head.

    Returns:
        the four planes, INT8 [INT8_JP, 2 HEADS], see ``query_plane``; the queries in float32 [DP, HEADS]; and the unit
        of a product, [HEADS].
    """
    COLUMNS: tl.constexpr = 2 * SHAPE.HEADS
    h, n, dim = tl.arange(0, SHAPE.HEADS), tl.arange(0, COLUMNS), tl.arange(0, SHAPE.DP)
    inside = (dim < SHAPE.D)[:, None] & (n // 2 < SHAPE.GQA_GROUP)[None, :]
    twice = tl.load(q.data + n[None, :] // 2 * q.head + dim[:, None], mask=inside, other=0.0).to(tl.float32)
    unit = tl.max(tl.abs(twice), 0) * (1 / 127) + 1e-30  # [COLUMNS]
    planes = (
        query_plane(q, unit, 0, 1.0, SHAPE),
        query_plane(q, unit, 1, ODD, SHAPE),
        query_plane(q, unit, 2, 1.0, SHAPE),
        query_plane(q, unit, 3, ODD, SHAPE),
    )
    inside = (dim < SHAPE.D)[:, None] & (h < SHAPE.GQA_GROUP)[None, :]
    q_all = tl.load(q.data + h[None, :] * q.head + dim[:, None], mask=inside, other=0.0).to(tl.float32)
    return planes, q_all, tl.max(tl.abs(q_all), 0) * (1 / 127) + 1e-30


@triton.jit
def query_plane(q, unit, plane: tl.constexpr, factor: tl.constexpr, SHAPE: tl.constexpr):
    """Returns one plane of the queries as INT8: column 2h is the high part of head h, column 2h + 1 the low one."""
    return int8_columns(load_plane(q, plane, SHAPE), factor / unit, 2 * SHAPE.HEADS)


@triton.jit
def load_plane(q, plane: tl.constexpr, SHAPE: tl.constexpr):
    """Loads queries' dims of a plane, float32 [INT8_JP, 2 HEADS], each head in two columns."""
    n, j = tl.arange(0, 2 * SHAPE.HEADS), tl.arange(0, SHAPE.INT8_JP)
    inside = (j < SHAPE.D4)[:, None] & (n // 2 < SHAPE.GQA_GROUP)[None, :]
    address = q.data + n[None, :] // 2 * q.head + plane * SHAPE.D4 + j[:, None]
    return tl.load(address, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def int8_columns(x, factor, COLUMNS: tl.constexpr):
    """Returns x times factor [COLUMNS] as INT8: the high part in even columns, the low one in odd ones."""
    high, low = split_int8(x * factor[None, :])
    return tl.where((tl.arange(0, COLUMNS) % 2 == 0)[None, :], high, low)


@triton.jit
def tokens_of_tile():
    """Returns (is on the second page, plane, token in its page) of the rows of a tile of two pages."""
    row = tl.arange(0, 2 * PAGE)
    plane = row // (PAGE // 2)
    return row // (PAGE // 4) % 2 == 1, plane, plane * (PAGE // 4) + row % 8 * 2 + row // 8 % 2


@triton.jit
def base_of(second, base_a, base_b):
    """Returns base_b for rows of the second page, base_a for the others: a tensor with one axis, like ``second``.

    Both are multiples of 16. Triton 3.9 does not infer this and would load records byte by byte, ten times as slow.
    """
    return tl.multiple_of(tl.where(second, base_b, base_a), 16)


@triton.jit
def split_int8(x):
    """Splits |x| <= 127 into INT8 (high, low) with x = high + low / 256; 254.9 keeps low <= 127."""
    rounded = x + MAGIC
    low = (x - (rounded - MAGIC)) * 254.9 + MAGIC
    return rounded.to(tl.int32, bitcast=True).to(tl.int8), low.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def rounded_halves(x):
    """Rounds |x| <= 127 * 256 to 256 high + low: an int32 with high in its second byte, one with low in its first."""
    return (x + (MAGIC + 128)).to(tl.int32, bitcast=True), (x + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def join_parts(products, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Joins products of INT8 columns (high, low), accumulated on MAGIC_BITS, to float32 [ROWS, HEADS]."""
    parts = tl.reshape(products.to(tl.float32, bitcast=True), [ROWS, HEADS, 2])
    high, low = tl.split(parts)
    return join_halves(high, low)


@triton.jit
def join_halves(high, low):
    """Joins MAGIC + high and MAGIC + low to high + low / 256: exact, and without a conversion instruction."""
    return (high - (MAGIC + MAGIC / 256)) + low * (1 / 256)


@triton.jit
def tile_scales(x):
    """Converts FP16 [2 pages, 4, PAGE] to four float32 [128], rows in the tile's order."""
    s_k, z_k, s_v, z_v = half_scales(x)
    return s_k.to(tl.float32), z_k.to(tl.float32), s_v.to(tl.float32), z_v.to(tl.float32)


@triton.jit
def half_scales(x):
    """Splits scales and offsets like ``tile_scales``, but into FP16, and also for a single page."""
    PAGES: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [PAGES, 2, 2, 4, 8, 2])  # page, kind, which, plane, i, half
    x = tl.reshape(tl.permute(x, (3, 0, 5, 4, 1, 2)), [PAGES * PAGE, 2, 2])
    scale, offset = tl.split(x)
    s_k, s_v = tl.split(scale)
    z_k, z_v = tl.split(offset)
    return s_k, z_k, s_v, z_v


@triton.jit
def group_scales(pages, step: tl.constexpr):
    """Loads one group's scales, and offsets ``step`` FP16 elements after them: float32 [128] each, in the tile's order.

    pages: pointers to the group's scales in both pages, FP16 [2, 1, 1].
    """
    x = tl.load(pages + tl.arange(0, 2)[None, :, None] * step + tl.arange(0, PAGE)[None, None, :])
    x = tl.reshape(x, [2, 2, 4, 8, 2])  # page, which, plane, i, half
    scale, offset = tl.split(tl.reshape(tl.permute(x, (2, 0, 4, 3, 1)), [2 * PAGE, 2]))
    return scale.to(tl.float32), offset.to(tl.float32)


@triton.jit
def weight_operands(p, s_v, fraction, HEADS: tl.constexpr):
    """Multiplies weights p [128, HEADS] by V's scales; returns their ``token_planes`` and a product's unit, [HEADS].

    fraction: factor of each row, which depends on the row's plane.
    """
    p = p * s_v[:, None]
    unit = tl.max(p, 0) * (1 / 127) + 1e-30
    p = p * (fraction[:, None] * (1.0 / unit)[None, :])
    high, low = split_int8(p)
    return token_planes(tl.reshape(tl.join(high, low), [2 * PAGE, 2 * HEADS]), 2 * HEADS), unit


@triton.jit
def spread_sum(x, HEADS: tl.constexpr):
    """Sums [128, HEADS] into eight rows, which eight lanes hold: [8, HEADS]."""
    return tl.sum(tl.reshape(x, [2 * PAGE // 8, 8, HEADS]), 0)


@triton.jit
def empty_groups(GROUPS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Returns the zeros at which the sums of ``stack_groups`` start."""
    accs, offsets = (), ()
    for _ in tl.static_range(GROUPS):
        accs += (tl.zeros([ROWS, HEADS], tl.float32),)
        offsets += (tl.zeros([8, HEADS], tl.float32),)
    return accs, offsets


@triton.jit
def stack_groups(accs, offsets):
    """Adds each group's offsets (``spread_sum``) to its products [ROWS, HEADS]; stacks groups, one below the other.

    Three groups are padded with zeros to four.
    """
    tiles = ()
    for g in tl.static_range(len(accs)):
        tiles += (accs[g] + tl.sum(offsets[g], 0)[None, :],)
    if len(tiles) == 1:
        return tiles[0]
    elif len(tiles) == 2:
        return stack(tiles[0], tiles[1])
    else:
        last = tiles[3] if len(tiles) == 4 else tl.zeros_like(tiles[0])
        return stack(stack(tiles[0], tiles[1]), stack(tiles[2], last))


@triton.jit
def stack(a, b):
    """Stacks two tiles [R, N] to one, [2 R, N]."""
    ROWS: tl.constexpr = 2 * a.shape[0]
    return tl.reshape(tl.permute(tl.join(a, b), (2, 0, 1)), [ROWS, a.shape[1]])


@triton.jit
def joined(parts, COUNT: tl.constexpr):
    """Stacks neighboring parts, one below the other, until COUNT are left; both numbers are one, two or four."""
    if len(parts) == COUNT:
        return parts
    elif len(parts) == 2:
        return (stack(parts[0], parts[1]),)
    else:
        return joined((stack(parts[0], parts[1]), stack(parts[2], parts[3])), COUNT)


@triton.jit
def token_planes(x, COLUMNS: tl.constexpr):
    """Converts rows [128 = (plane, page, half, i), COLUMNS] to the four planes' [32 = (page, 2 i + half), COLUMNS].

    Splitting off the halves and joining them again makes them neighbors in a thread's registers. So they are bytes of
    one word in the shared memory through which the operand goes.
    """
    x = tl.permute(tl.reshape(x, [2, 2, 2, 2, 8, COLUMNS]), (2, 4, 5, 0, 1, 3))
    even, odd = tl.split(x)
    x = tl.join(even, odd)  # [page, i, COLUMNS, plane, plane, half]
    x = tl.reshape(tl.permute(x, (0, 1, 5, 2, 3, 4)), [32, COLUMNS, 2, 2])
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def group_product(k, q, products, plane: tl.constexpr, g: tl.constexpr, D4: tl.constexpr, GROUP: tl.constexpr):
    """Adds k [rows, J] q [J, columns] over the plane's dims that belong to group g."""
    if plane * D4 >= (g + 1) * GROUP or (plane + 1) * D4 <= g * GROUP:
        return products
    elif plane * D4 >= g * GROUP and (plane + 1) * D4 <= (g + 1) * GROUP:
        return tl.dot(k, q, products, out_dtype=tl.int32)
    else:
        dim = plane * D4 + tl.arange(0, q.shape[0])
        return tl.dot(k, tl.where((dim // GROUP == g)[:, None], q, 0).to(tl.int8), products, out_dtype=tl.int32)
