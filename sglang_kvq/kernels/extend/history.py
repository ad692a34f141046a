"""Attention of a tile of query rows over the records of one request: the loops of ``extend_attention``.

A program has tens of rows. So dequantizing a key or value once costs less than correcting every score for scale and
offset, as ``decode_attention`` does. FP16 holds c s + z with three bits more than BF16, up to 65504 in
magnitude. A logical instruction moves two codes from their bytes into mantissas of 1024. One FP16 instruction makes the
codes numbers, another makes these keys or values:

    c = (1024 + 4^plane c) 4^-plane - 1024 4^-plane          exact
    k = c s + z                                              rounded once

Q is scaled into FP16's range by a power of two, which loses nothing, P by 2^15. Records of any other format are
dequantized to BF16, like in ``gather_pages``.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from sglang_kvq.kernels.device.codes import page_bytes, words_between
from sglang_kvq.kernels.device.common import INTERPRETED, PAGE, dot, key_row, page_of
from sglang_kvq.kernels.device.softmax import Softmax, attend, no_keys, scores
from sglang_kvq.kernels.extend.gather_pages import dequantize, key_scale, packed

_PLAIN = tl.constexpr(INTERPRETED)
#: q is scaled to at most 2^12: 256 products with the largest FP16 number are then far from float32's largest.
_Q_SCALE = tl.constexpr(2.0**11)
#: log2 of the factor of p, which keeps all bits of p down to 2^-29 of the largest.
_P_SHIFT = tl.constexpr(15.0)


class Tile(NamedTuple):
    """Query rows of an item.

    Attributes:
        q: pointer to the batch's queries; row: int64 [ROWS], offset of each row's query from q.
        live: bool [ROWS], True for rows that are queries.
    """

    q: tl.tensor
    row: tl.tensor
    live: tl.tensor


@triton.jit
def queries_by_plane(tile, SHAPE: tl.constexpr, PLANES: tl.constexpr = 4):
    """Loads BF16 [ROWS, PLANES JP]: dims of the first planes, each padded, in the order of ``join_planes``."""
    c = tl.arange(0, PLANES * SHAPE.JP)
    dim = c // SHAPE.JP * SHAPE.D4 + c % SHAPE.JP
    inside = tile.live[:, None] & (c % SHAPE.JP < SHAPE.D4)[None, :]
    return tl.load(tile.q + tile.row[:, None] + dim[None, :], mask=inside, other=0.0)


@triton.jit
def history_two_bits(
    tile, pages, records, v_first, scale_log2,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Attends to ``is_two_bit`` records of the pages history .. history_end: a ``Softmax`` with acc [ROWS, VP].

    records: the KV head's record of page 0. D has one or two groups; each is whole planes of K's bytes. Columns of acc
    are dims v_first .. v_first + DIMS.
    """
    PAGE_BYTES: tl.constexpr = page_bytes(RECORD, SHAPE.KV_HEADS)
    x = queries_by_plane(tile, SHAPE).to(tl.float32)
    peak = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-30)
    unit = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # a power of two
    queries = (x * (_Q_SCALE / unit)).to(tl.float16)  # [ROWS, 4 JP]
    factor = unit * (scale_log2 / _Q_SCALE)

    state = no_keys(ROWS, SHAPE.VP)
    first, last = pages.history, pages.history_end
    # This loop runs once. It makes queries an argument of a loop, which the compiler keeps in shared memory. An operand
    # that is visibly computed would stay in registers.
    for _ in tl.range(0, tl.minimum(last - first, 1)):
        next_page = page_of(pages.table, first)
        for index in tl.range(first, last):
            page = next_page
            next_page = page_of(pages.table, tl.minimum(index + 1, last - 1))
            state = _page(state, queries, factor, records + page * PAGE_BYTES, v_first, RECORD, SHAPE, ROWS, PLAIN)
        queries = tl.zeros(queries.shape, queries.dtype)
    return Softmax(state.acc, state.total, state.top - _P_SHIFT)


@triton.jit
def _page(
    state, queries, factor, record, v_first,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Runs online softmax over a page: a record holds 64 tokens, and a history is whole pages.

    Loads codes and scales, dequantizes K and V, and attends.
    """
    D4: tl.constexpr = SHAPE.D4
    JP: tl.constexpr = SHAPE.JP
    VP: tl.constexpr = SHAPE.VP
    GROUP: tl.constexpr = RECORD.k.group
    GROUPS: tl.constexpr = SHAPE.D // GROUP
    V_SCALES: tl.constexpr = words_between(RECORD.k.scale, RECORD.v.scale)
    QUARTER: tl.constexpr = PAGE // 4
    VECTOR: tl.constexpr = PAGE // 2  # words of scales, or offsets, of one group: two tokens each

    n, j, i = tl.arange(0, PAGE), tl.arange(0, JP), tl.arange(0, QUARTER)
    # The order of loaded rows avoids bank conflicts: neighboring lanes' 16 bytes of a dequantized row go to different
    # banks, in the shared-memory layout of a product. The permutations of k and v below restore the order.
    token = n // 8 * 8 + n % 2 * 4 + n // 2 % 4
    dim = tl.arange(0, VP)
    dim = dim // 8 * 8 + dim % 4 * 2 + dim // 4 % 2
    k_codes = record + RECORD.k.low + key_row(token)[:, None] * D4 + j[None, :]
    # Eight bytes per thread: if neighboring lanes held different dims only, the compiler would store the dequantized
    # tile dim by dim, two bytes at a time.
    v_codes = record + RECORD.v.low + (v_first + dim)[:, None] * QUARTER + i[None, :]
    v_codes = tl.max_contiguous(v_codes, [1, 8])
    k = tl.load(k_codes) if D4 == JP else tl.load(k_codes, mask=(j < D4)[None, :], other=0)  # [PAGE, JP]
    v = tl.load(v_codes) if GROUP == VP else tl.load(v_codes, mask=(dim < GROUP)[:, None], other=0)  # [VP, QUARTER]
    words = (record + RECORD.k.scale).to(tl.pointer_type(tl.int32))
    # A word has two tokens. Loads have 256 words, at least one for each thread. The compiler copies such loads ahead,
    # while it repeats smaller ones in every thread. K's words come once for each token.
    x = tl.arange(0, 4 * PAGE)
    of_key = x // PAGE * VECTOR + (x % PAGE // 8 * 8 + x % 2 * 4 + x // 2 % 4) // 2
    if GROUPS == 2:
        s_k, s_k2, z_k, z_k2 = split4(tl.load(words + of_key), PAGE)
        s_v, s_v2, z_v, z_v2, _, _, _, _ = split8(tl.load(words + V_SCALES + x % (4 * VECTOR)), VECTOR)
        s_v, z_v = tl.where(v_first == 0, s_v, s_v2), tl.where(v_first == 0, z_v, z_v2)
        k0, k1, k2, k3 = _keys_of(k, _own(s_k, token), _own(z_k, token), _own(s_k2, token), _own(z_k2, token), PLAIN)
    else:
        s_k, z_k, values, _ = split4(tl.load(words + tl.where(x < 2 * PAGE, of_key, V_SCALES + x % (2 * VECTOR))), PAGE)
        s_v, z_v = split2(values, VECTOR)
        s_k, z_k = _own(s_k, token), _own(z_k, token)
        k0, k1, k2, k3 = _keys_of(k, s_k, z_k, s_k, z_k, PLAIN)
    k = join_planes((k0, k1, k2, k3), PAGE, JP)
    k = tl.reshape(tl.permute(tl.reshape(k, [PAGE // 8, 2, 2, 2, 4 * JP]), (0, 3, 1, 2, 4)), [PAGE, 4 * JP])
    v0, v1, v2, v3 = _values_of(v, s_v, z_v, VECTOR, PLAIN)
    v = join_planes((v0, v1, v2, v3), VP, QUARTER)
    v = tl.reshape(tl.permute(tl.reshape(v, [VP // 8, 2, 2, 2, PAGE]), (0, 2, 3, 1, 4)), [VP, PAGE])

    x = scores(queries, k, ROWS, PAGE)
    top = tl.maximum(state.top, tl.max(x, 1) * factor)
    decay = tl.exp2(state.top - top)
    p = tl.exp2(x * factor + (-top + _P_SHIFT)[:, None])
    total = state.total * decay + tl.sum(p, 1)
    return Softmax(dot(p.to(tl.float16), tl.trans(v), state.acc * decay[:, None]), total, top)


@triton.jit
def history_any(
    tile, pages, records, v_first, scale_log2, RECORD: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr
):
    """Attends like ``history_two_bits``, for records of any format."""
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    PAGE_BYTES: tl.constexpr = page_bytes(RECORD, SHAPE.KV_HEADS)
    QUARTER: tl.constexpr = PAGE // 4
    D: tl.constexpr = SHAPE.D
    D4: tl.constexpr = SHAPE.D4
    JP: tl.constexpr = SHAPE.JP
    VP: tl.constexpr = SHAPE.VP
    queries = queries_by_plane(tile, SHAPE)

    token, j = tl.arange(0, PAGE)[:, None], tl.arange(0, JP)[None, :]
    dim, i = v_first + tl.arange(0, VP)[:, None], tl.arange(0, QUARTER)[None, :]
    in_k, in_v = j < D4, dim < v_first + SHAPE.DIMS
    state = no_keys(ROWS, VP)
    for index in tl.range(pages.history, pages.history_end):
        record = records + page_of(pages.table, index) * PAGE_BYTES
        low, high = packed(record, key_row(token), j, PAGE, D4, in_k, KEYS)  # [PAGE, JP]
        k0 = _keys(low, high, 0, record, token, j, in_k, D4, D, KEYS)
        k1 = _keys(low, high, 1, record, token, j, in_k, D4, D, KEYS)
        k2 = _keys(low, high, 2, record, token, j, in_k, D4, D, KEYS)
        k3 = _keys(low, high, 3, record, token, j, in_k, D4, D, KEYS)
        k = join_planes((k0, k1, k2, k3), PAGE, JP)
        low, high = packed(record, dim, i, D, QUARTER, in_v, VALUES)  # [VP, QUARTER]
        scales = dim // VALUES.group * PAGE + i
        v0 = dequantize(low, high, 0, record, scales, dim, in_v, VALUES)
        v1 = dequantize(low, high, 1, record, scales + QUARTER, dim, in_v, VALUES)
        v2 = dequantize(low, high, 2, record, scales + 2 * QUARTER, dim, in_v, VALUES)
        v3 = dequantize(low, high, 3, record, scales + 3 * QUARTER, dim, in_v, VALUES)
        v = join_planes((v0, v1, v2, v3), VP, QUARTER)
        seen = (tl.arange(0, PAGE) + index * PAGE < pages.tokens)[None, :]
        state = attend(state, queries, k, tl.trans(v), seen, scale_log2, ROWS, PAGE)
    return state


@triton.jit
def settled(state):
    """Returns the state with all products finished before the loop's next iteration.

    Otherwise ptxas would wait after each product.
    """
    if _PLAIN:
        return state
    else:
        acc = tl.inline_asm_elementwise("// $0", "=f,0", [state.acc], dtype=tl.float32, is_pure=True, pack=1)
        return Softmax(acc, state.total, state.top)


def _affine_ptx(scales: list[list[str]], offsets: list[list[str]]) -> tl.constexpr:
    """Returns PTX that converts four bytes, $8, to $0 to $7: two words for each plane, two FP16 values each.

    scales, offsets: operands that multiply, and are added to, the two words of each plane.
    """
    lines = ["{", ".reg .b32 even, odd, base, factor, less;", "mov.b32 base, 0x64006400;"]  # 1024
    lines += ["prmt.b32 even, $8, 0, 0x4140;", "prmt.b32 odd, $8, 0, 0x4342;"]  # two bytes, a zero above each
    for plane in range(4):
        mask, factor, less = 3 << 2 * plane, (15 - 2 * plane) << 10, 0x8000 | (25 - 2 * plane) << 10
        lines += [
            f"mov.b32 factor, {factor * 0x10001:#x};",
            f"mov.b32 less, {less * 0x10001:#x};",
        ]  # 4^-plane; -1024 times it
        for n, word in enumerate(("even", "odd")):
            out = f"${2 * plane + n}"
            lines.append(f"lop3.b32 {out}, {word}, {mask * 0x10001:#x}, base, 0xea;")  # (a & b) | c
            lines.append(f"fma.rn.f16x2 {out}, {out}, factor, less;")
            lines.append(f"fma.rn.f16x2 {out}, {out}, {scales[plane][n]}, {offsets[plane][n]};")
    return tl.constexpr("\n".join([*lines, "}"]))


# Every argument has four operands, one per byte. K's are equal: a token's scale. V's first two are equal, and its last
# two: each is a word of two tokens' scales.
_KEYS_PTX = _affine_ptx([["$9"] * 2] * 2 + [["$17"] * 2] * 2, [["$13"] * 2] * 2 + [["$21"] * 2] * 2)
_KEYS_OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 17))
_VALUES_PTX = _affine_ptx(*([[f"${n + 4 * p}", f"${n + 4 * p + 2}"] for p in range(4)] for n in (9, 25)))
_VALUES_OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 33))


@triton.jit
def split2(x, SIZE: tl.constexpr):
    """Splits [2 * SIZE] into its halves."""
    return tl.split(tl.permute(tl.reshape(x, [2, SIZE]), (1, 0)))


@triton.jit
def split8(x, SIZE: tl.constexpr):
    """Splits [8 * SIZE] into its eighths."""
    x0, x1 = split2(x, 4 * SIZE)
    a0, a1, a2, a3 = split4(x0, SIZE)
    b0, b1, b2, b3 = split4(x1, SIZE)
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def split4(x, SIZE: tl.constexpr):
    """Splits [4 * SIZE] into its four quarters."""
    even, odd = tl.split(tl.permute(tl.reshape(x, [2, 2, SIZE]), (2, 0, 1)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def fp16_low(x):
    return (x & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def fp16_high(x):
    return ((x >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _own(words, token):
    """Converts words [PAGE] to [PAGE, 1]: each token's FP16 number, the upper one if it is odd, in both halves."""
    x = (words >> (token % 2 * 16)) & 0xFFFF
    return (x | (x << 16))[:, None]


@triton.jit
def _keys_of(bytes, s, z, s2, z2, PLAIN: tl.constexpr):
    """Unpacks K [PAGE, JP] to FP16 tiles of the four planes, the last two with their own scales and offsets."""
    if PLAIN:
        k0 = _affine(bytes & 3, s, z)
        k1 = _affine((bytes >> 2) & 3, s, z)
        k2 = _affine((bytes >> 4) & 3, s2, z2)
        k3 = _affine(bytes >> 6, s2, z2)
    else:
        k0, k1, k2, k3 = tl.inline_asm_elementwise(
            asm=_KEYS_PTX,
            constraints=_KEYS_OPERANDS,
            args=[bytes, s, z, s2, z2],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return k0, k1, k2, k3


@triton.jit
def _affine(code, scale, offset):
    """Returns code scale + offset, rounded once; scale and offset are words' lower halves."""
    return (code.to(tl.float32) * fp16_low(scale).to(tl.float32) + fp16_low(offset).to(tl.float32)).to(tl.float16)


@triton.jit
def _values_of(bytes, scale, offset, VECTOR: tl.constexpr, PLAIN: tl.constexpr):
    """Unpacks V [VP, QUARTER] to FP16 tiles of the four planes."""
    s0, s1, s2, s3 = split4(scale, VECTOR // 4)
    z0, z1, z2, z3 = split4(offset, VECTOR // 4)
    s0, s1, s2, s3 = _twice(s0, PLAIN), _twice(s1, PLAIN), _twice(s2, PLAIN), _twice(s3, PLAIN)
    z0, z1, z2, z3 = _twice(z0, PLAIN), _twice(z1, PLAIN), _twice(z2, PLAIN), _twice(z3, PLAIN)
    if PLAIN:
        v0 = _affine(bytes & 3, s0, z0)
        v1 = _affine((bytes >> 2) & 3, s1, z1)
        v2 = _affine((bytes >> 4) & 3, s2, z2)
        v3 = _affine(bytes >> 6, s3, z3)
    else:
        v0, v1, v2, v3 = tl.inline_asm_elementwise(
            asm=_VALUES_PTX,
            constraints=_VALUES_OPERANDS,
            args=[bytes, s0, s1, s2, s3, z0, z1, z2, z3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return v0, v1, v2, v3


@triton.jit
def _twice(x, PLAIN: tl.constexpr):
    """Expands words [n] of two tokens each to [1, 2 n]: each token's word; if PLAIN, its FP16 in the lower half."""
    if PLAIN:
        x = tl.join(x, x >> 16)
    else:
        x = tl.join(x, x)
    return tl.reshape(x, [1, x.numel])


@triton.jit
def _keys(
    low, high, plane: tl.constexpr, record, token, j, mask, D4: tl.constexpr, D: tl.constexpr, CODES: tl.constexpr
):
    """Returns BF16 [PAGE, JP] of one plane of packed keys."""
    dim = plane * D4 + j
    return dequantize(low, high, plane, record, key_scale(token, dim, D, CODES), dim, mask, CODES)


@triton.jit
def planes_last(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Joins two or four tiles [ROWS, COLUMNS] to one [ROWS, COLUMNS, planes]."""
    if len(x) == 2:
        return tl.join(x[0], x[1])
    else:  # a plane's number is two bits
        return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), [ROWS, COLUMNS, 4])


@triton.jit
def join_planes(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Joins two or four tiles [ROWS, COLUMNS] to one [ROWS, planes * COLUMNS], side by side."""
    return tl.reshape(tl.permute(planes_last(x, ROWS, COLUMNS), (0, 2, 1)), [ROWS, len(x) * COLUMNS])
