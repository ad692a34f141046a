"""A tile of query rows over the records of one request: the loops of ``extend``.

With codes c in 0..3, scale s and zero z per token,

    q k     = s_k (q c_k) + z_k sum(q)            the affine terms stay outside the product
    sum p v = sum (p s_v) c_v + sum p z_v         s_v is folded into p, z_v is one number per row

as in ``decode``, but on FP16 tensor cores: a code AND-ed out of its byte is the low bits of a subnormal FP16 number,
code 4^plane 2^-24, exactly, with neither a shift nor an addition. Q and P carry the powers of four, and are brought
to where FP16 has 11 bits: Q by a power of two, which loses nothing, P by the largest scale of V so far.

Records of any other format are dequantised to BF16 in registers.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.common import PAGE, dot, key_row, page_of, to_bf16
from sglang_kvq.kernels.gather import dequantise, packed

NEVER = tl.constexpr(-1e30)
#: q is scaled to at most 2^14, p s_v to at most 2^15; a code counts 2^-24.
_Q_SCALE = tl.constexpr(2.0**13)
_Q_UNSCALE = tl.constexpr(2.0**11)
_P_SCALE = tl.constexpr(2.0**15)
_P_UNSCALE = tl.constexpr(2.0**9)


@triton.jit
def history_two_bits(
    q, place, live, table, first, last, prefix, records, head, v_first, scale_log2,
    KV_HEADS: tl.constexpr, D: tl.constexpr, JP: tl.constexpr, GROUP: tl.constexpr, VP: tl.constexpr,
    ROWS: tl.constexpr, PAGES: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Records of pages first .. last: (acc [ROWS, VP], denominator [ROWS], maximum [ROWS]), base 2.

    place: int64 [ROWS], each row's query in q; live: which rows are queries. PAGES pages a turn, 1 or 2, tokens in
    their order. One or two groups along D, whole planes of K's bytes each; acc are dims v_first .. v_first + GROUP.
    """
    TILE: tl.constexpr = PAGES * PAGE
    QUARTER: tl.constexpr = PAGE // 4
    D4: tl.constexpr = D // 4
    GROUPS: tl.constexpr = D // GROUP
    COLUMNS: tl.constexpr = 4 * JP // GROUPS
    CODES: tl.constexpr = PAGE * D4
    SCALES: tl.constexpr = PAGE * GROUPS
    RECORD: tl.constexpr = 2 * CODES + 8 * SCALES

    peak = _peak(q, place, live, D4, JP, ROWS)
    q0, sum0 = _queries(q, place, live, peak, 0, D4, JP, COLUMNS)
    sum0 *= scale_log2
    if GROUPS == 2:
        q1, sum1 = _queries(q, place, live, peak, COLUMNS, D4, JP, COLUMNS)
        sum1 *= scale_log2
    unscale = peak * (_Q_UNSCALE * scale_log2)

    n, j, dim, i = tl.arange(0, TILE), tl.arange(0, JP), tl.arange(0, VP), tl.arange(0, QUARTER)
    token = n % PAGE
    second = n >= PAGE
    pair = tl.arange(0, TILE // 2)  # of neighbouring tokens, whose scales are one word
    second_pair = pair >= PAGE // 2
    fraction = _quarter_power(token // QUARTER) * _P_SCALE
    k_place = key_row(token)[:, None] * D4 + j[None, :]
    v_page = tl.arange(0, PAGES)[None, :, None]
    v_place = CODES + (v_first + dim)[:, None, None] * QUARTER + i[None, None, :]
    records += head * RECORD

    acc = tl.zeros([ROWS, VP], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    zeros = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NEVER, tl.float32)
    largest = tl.min(total, 0) + 1e-30  # scale of V so far
    page_a = page_of(table, first)
    page_b = page_of(table, tl.minimum(first + 1, last - 1))
    for index in tl.range(first, last, PAGES):
        base_a = records + page_a * (KV_HEADS * RECORD)
        base_b = records + page_b * (KV_HEADS * RECORD)
        page_a = page_of(table, tl.minimum(index + PAGES, last - 1))
        if PAGES == 2:
            page_b = page_of(table, tl.minimum(index + PAGES + 1, last - 1))
            base_k = tl.where(second, base_b, base_a)[:, None]
            base_v = tl.where(v_page == 1, base_b, base_a)
            words = tl.where(second_pair, base_b, base_a)
        else:
            base_k, base_v, words = base_a, base_a, base_a
        words = (words + 2 * CODES).to(tl.pointer_type(tl.int32)) + pair % (PAGE // 2)
        if D4 == JP:
            k = tl.load(base_k + k_place)  # [TILE, JP]
        else:
            k = tl.load(base_k + k_place, mask=(j < D4)[None, :], other=0)
        if GROUP == VP:
            v = tl.load(base_v + v_place)  # [VP, PAGES, QUARTER]
        else:
            v = tl.load(base_v + v_place, mask=(dim < GROUP)[:, None, None], other=0)
        which = v_first // GROUP * (PAGE // 2)
        s_k, z_k = _halves(words, 0, TILE), _halves(words, SCALES // 2, TILE)
        s_v, z_v = _halves(words, SCALES + which, TILE), _halves(words, SCALES * 3 // 2 + which, TILE)

        # A page that is half stored, and the turn's second page if there is none.
        stored = (n + index * PAGE < tl.minimum(last * PAGE, prefix))[None, :]
        k0, k1, k2, k3 = _unpack(k, PLAIN)
        if GROUPS == 2:
            x = _product(q0, _join2(k0, k1, TILE, JP), ROWS, TILE) * (s_k * unscale)[None, :]
            x += sum0[:, None] * z_k[None, :]
            s_k, z_k = _halves(words, PAGE // 2, TILE), _halves(words, SCALES // 2 + PAGE // 2, TILE)
            x += _product(q1, _join2(k2, k3, TILE, JP), ROWS, TILE) * (s_k * unscale)[None, :]
            x += sum1[:, None] * z_k[None, :]
        else:
            x = _product(q0, join_planes(k0, k1, k2, k3, TILE, JP), ROWS, TILE) * (s_k * unscale)[None, :]
            x += sum0[:, None] * z_k[None, :]
        x = tl.where(stored, x, NEVER)

        new_top = tl.maximum(top, tl.max(x, 1))
        new_largest = tl.maximum(largest, tl.max(s_v, 0))
        decay = tl.exp2(top - new_top)
        p = tl.exp2(x - new_top[:, None])
        total = total * decay + tl.sum(p, 1)
        zeros = zeros * decay + tl.sum(p * z_v[None, :], 1)
        p = (p * (s_v * (fraction / new_largest))[None, :]).to(tl.float16)
        v0, v1, v2, v3 = _unpack(v, PLAIN)
        v = tl.reshape(join_planes(v0, v1, v2, v3, VP * PAGES, QUARTER), [VP, TILE])
        acc = dot(p, tl.trans(v), acc * (decay * (largest / new_largest))[:, None])
        top, largest = new_top, new_largest
    return acc * (largest * _P_UNSCALE) + zeros[:, None], total, top


@triton.jit
def history_any(
    q, place, live, table, first, last, prefix, records, head, v_first, scale_log2,
    RECORD: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, JP: tl.constexpr, DIMS: tl.constexpr,
    VP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``history_two_bits`` of records of any format; acc are dims v_first .. v_first + DIMS."""
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    QUARTER: tl.constexpr = PAGE // 4
    D4: tl.constexpr = D // 4
    c = tl.arange(0, 4 * JP)
    inside = live[:, None] & (c % JP < D4)[None, :]
    queries = tl.load(q + place[:, None] + (c // JP * D4 + c % JP)[None, :], mask=inside, other=0.0)  # [ROWS, 4 JP]

    token, j = tl.arange(0, PAGE)[:, None], tl.arange(0, JP)[None, :]
    dim, i = v_first + tl.arange(0, VP)[:, None], tl.arange(0, QUARTER)[None, :]
    in_k, in_v = j < D4, dim < v_first + DIMS
    records += head * RECORD.bytes
    acc = tl.zeros([ROWS, VP], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NEVER, tl.float32)
    for index in tl.range(first, last):
        record = records + page_of(table, index) * (KV_HEADS * RECORD.bytes)
        low, high = packed(record, key_row(token), j, PAGE, D4, in_k, KEYS)  # [PAGE, JP]
        k0 = _keys(low, high, 0, record, token, j, in_k, D4, D, KEYS)
        k1 = _keys(low, high, 1, record, token, j, in_k, D4, D, KEYS)
        k2 = _keys(low, high, 2, record, token, j, in_k, D4, D, KEYS)
        k3 = _keys(low, high, 3, record, token, j, in_k, D4, D, KEYS)
        k = join_planes(k0, k1, k2, k3, PAGE, JP)
        low, high = packed(record, dim, i, D, QUARTER, in_v, VALUES)  # [VP, QUARTER]
        scales = dim // VALUES.group * PAGE + i
        v0 = dequantise(low, high, 0, record, scales, in_v, VALUES)
        v1 = dequantise(low, high, 1, record, scales + QUARTER, in_v, VALUES)
        v2 = dequantise(low, high, 2, record, scales + 2 * QUARTER, in_v, VALUES)
        v3 = dequantise(low, high, 3, record, scales + 3 * QUARTER, in_v, VALUES)
        v = join_planes(v0, v1, v2, v3, VP, QUARTER)
        seen = (tl.arange(0, PAGE) + index * PAGE < prefix)[None, :]
        acc, total, top = attend(acc, total, top, queries, k, tl.trans(v), seen, scale_log2, ROWS, PAGE)
    return acc, total, top


@triton.jit
def attend(acc, total, top, q, k, v, seen, scale_log2, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Online softmax over BF16 keys k [KEYS, dims] and values v [KEYS, VP], where seen [ROWS or 1, KEYS]."""
    x = _product(q, k, ROWS, KEYS) * scale_log2
    x = tl.where(seen, x, NEVER)
    new_top = tl.maximum(top, tl.max(x, 1))
    decay = tl.exp2(top - new_top)
    p = tl.exp2(x - new_top[:, None])
    total = total * decay + tl.sum(p, 1)
    acc = dot(to_bf16(p), v, acc * decay[:, None])
    return acc, total, new_top


@triton.jit
def _product(q, k, ROWS: tl.constexpr, KEYS: tl.constexpr):
    return dot(q, tl.trans(k), tl.zeros([ROWS, KEYS], tl.float32))


@triton.jit
def _peak(q, place, live, D4: tl.constexpr, JP: tl.constexpr, ROWS: tl.constexpr):
    """The largest power of two that is no more than any |q| of the tile's largest."""
    c = tl.arange(0, 4 * JP)
    inside = live[:, None] & (c % JP < D4)[None, :]
    x = tl.load(q + place[:, None] + (c // JP * D4 + c % JP)[None, :], mask=inside, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-30)
    return (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _queries(q, place, live, peak, first, D4: tl.constexpr, JP: tl.constexpr, COLUMNS: tl.constexpr):
    """FP16 [ROWS, COLUMNS] of columns first .. (plane, j), divided by 4^plane, and the sum of q over them."""
    c = first + tl.arange(0, COLUMNS)
    plane = c // JP
    inside = live[:, None] & (c % JP < D4)[None, :]
    x = tl.load(q + place[:, None] + (plane * D4 + c % JP)[None, :], mask=inside, other=0.0).to(tl.float32)
    return (x * (_quarter_power(plane) * (_Q_SCALE / peak))[None, :]).to(tl.float16), tl.sum(x, 1)


@triton.jit
def _quarter_power(plane):
    """4^-plane."""
    return tl.where(plane == 0, 1.0, tl.where(plane == 1, 0.25, tl.where(plane == 2, 0.0625, 0.015625)))


@triton.jit
def _halves(words, offset, TILE: tl.constexpr):
    """float32 [TILE] of TILE / 2 words, two FP16 each: loads of four bytes, which the compiler copies ahead."""
    x = tl.load(words + offset)
    low = (x & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = ((x >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), [TILE]).to(tl.float32)


@triton.jit
def _keys(
    low, high, plane: tl.constexpr, record, token, j, mask, D4: tl.constexpr, D: tl.constexpr, CODES: tl.constexpr
):
    """BF16 [PAGE, JP] of one plane of packed keys."""
    dim = plane * D4 + j
    if CODES.channel:
        place = token // CODES.group * D + dim
    else:
        place = dim // CODES.group * PAGE + token
    return dequantise(low, high, plane, record, place, mask, CODES)


@triton.jit
def join_planes(x0, x1, x2, x3, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Four tiles of ROWS rows of COLUMNS to one [ROWS, 4 COLUMNS], side by side."""
    x = tl.join(tl.join(x0, x2), tl.join(x1, x3))  # [.., COLUMNS, plane // 2, plane % 2]
    x = tl.reshape(x, [ROWS, COLUMNS, 2, 2])
    return tl.reshape(tl.permute(x, (0, 2, 3, 1)), [ROWS, 4 * COLUMNS])


@triton.jit
def _join2(x0, x1, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(x0, x1), (0, 2, 1)), [ROWS, 2 * COLUMNS])


@triton.jit
def _unpack(bytes, PLAIN: tl.constexpr):
    """uint8 tile of four codes each to FP16 tiles of code 4^plane 2^-24."""
    if PLAIN:
        c0 = (bytes & 3).to(tl.uint16).to(tl.float16, bitcast=True)
        c1 = (bytes & 12).to(tl.uint16).to(tl.float16, bitcast=True)
        c2 = (bytes & 48).to(tl.uint16).to(tl.float16, bitcast=True)
        c3 = (bytes & 192).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        c0, c1, c2, c3 = tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 even, odd;
            prmt.b32 even, $8, 0, 0x4140;
            prmt.b32 odd, $8, 0, 0x4342;
            and.b32 $0, even, 0x00030003;
            and.b32 $1, odd, 0x00030003;
            and.b32 $2, even, 0x000c000c;
            and.b32 $3, odd, 0x000c000c;
            and.b32 $4, even, 0x00300030;
            and.b32 $5, odd, 0x00300030;
            and.b32 $6, even, 0x00c000c0;
            and.b32 $7, odd, 0x00c000c0;
            }""",
            constraints="=r,=r,=r,=r,=r,=r,=r,=r,r",
            args=[bytes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return c0, c1, c2, c3
