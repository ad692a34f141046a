"""Dequantization of a uniform 2-bit record to BF16, the part of ``gather_pages`` that must keep up with the memory.

A token has only four values per group of dims: code c is c scale + offset. They fill two words, two to a word. A
permutation of these words' bytes picks two values by two codes:

    selector = 0x22 c + 0x10      the bytes 2c and 2c + 1, for each byte of a word of codes

Each thread makes 16 bytes of a row of k or v at a time, from two words of codes. V's codes are stored dim by dim, so
eight dims' words are transposed byte by byte first. Nothing goes through shared memory and no thread waits for another.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.device.codes import words_between
from sglang_kvq.kernels.device.common import INTERPRETED, PAGE, key_row, to_bf16

_PLAIN = tl.constexpr(INTERPRETED)


def warps_for(head_dim: int) -> int:
    """Returns the warps of a program, so that a thread has one word of V's codes for each of eight dims."""
    return max(triton.next_power_of_2(head_dim) // 64, 1)


@triton.jit
def from_two_bits(k, v, count, kv_heads, record, RECORD: tl.constexpr, SHAPE: tl.constexpr, VALUES: tl.constexpr):
    """Dequantizes one record that ``is_two_bit`` accepts to the first ``count`` of PAGE rows of k and v.

    k, v: BF16 ``[PAGE, kv_heads, D]``, at this head. Keys first, then values, if VALUES.
    """
    _keys_of(k, count, kv_heads, record, RECORD, SHAPE)
    if VALUES:
        _values_of(v, count, kv_heads, record, RECORD, SHAPE)


@triton.jit
def _keys_of(k, count, kv_heads, record, RECORD: tl.constexpr, SHAPE: tl.constexpr):
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    D4: tl.constexpr = SHAPE.D4
    GROUP: tl.constexpr = RECORD.k.group
    GROUPS: tl.constexpr = D // GROUP
    EIGHTS: tl.constexpr = D4 // 8
    VECTOR: tl.constexpr = PAGE // 2  # words of a group's scales, or offsets: two tokens each
    K_OFFSETS: tl.constexpr = words_between(RECORD.k.scale, RECORD.k.offset)
    row_words = kv_heads * (D // 2)
    words = record.to(tl.pointer_type(tl.int32))
    scales = words + RECORD.k.scale // 4

    # One axis fixes what neighboring lanes hold: four of them make 64 bytes of a row of k, or a word of each of four
    # rows of v. No tile changes its layout.
    M: tl.constexpr = DP // 32
    x = tl.arange(0, M * PAGE)
    token, m = x // M, x % M
    inside = m < EIGHTS
    codes = words + RECORD.k.low // 4 + key_row(token) * (D4 // 4) + 2 * m
    a, b = tl.load(codes, mask=inside, other=0), tl.load(codes + 1, mask=inside, other=0)
    first = scales + token // 2
    lo, hi = _values(tl.load(first), tl.load(first + K_OFFSETS), token % 2)
    lo2, hi2 = lo, hi
    if GROUPS == 2:  # the scales and offsets of the upper two planes
        lo2, hi2 = _values(tl.load(first + VECTOR), tl.load(first + K_OFFSETS + VECTOR), token % 2)
    out = (k.to(tl.pointer_type(tl.int32)) + token * row_words + 4 * m)[:, None] + tl.arange(0, 4)[None, :]
    wanted = (inside & (token < count))[:, None]
    for plane in tl.static_range(4):
        if plane < 2:
            x = _expand(a, b, lo, hi, plane)
        else:
            x = _expand(a, b, lo2, hi2, plane)
        tl.store(out + plane * (D4 // 2), x, mask=wanted)


@triton.jit
def _values_of(v, count, kv_heads, record, RECORD: tl.constexpr, SHAPE: tl.constexpr):
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    GROUP: tl.constexpr = RECORD.v.group
    VECTOR: tl.constexpr = PAGE // 2
    V_OFFSETS: tl.constexpr = words_between(RECORD.v.scale, RECORD.v.offset)
    row_words = kv_heads * (D // 2)
    words = record.to(tl.pointer_type(tl.int32))

    x = tl.arange(0, DP // 2)
    g, c = x // 4, x % 4  # eight dims; four tokens of each plane
    inside = g < D // 8
    codes = words + RECORD.v.low // 4 + g * 32 + c  # a dim has four words
    a0, a1, a2, a3 = _transposed(
        tl.load(codes, mask=inside, other=0), tl.load(codes + 4, mask=inside, other=0),
        tl.load(codes + 8, mask=inside, other=0), tl.load(codes + 12, mask=inside, other=0),
    )  # fmt: skip
    b0, b1, b2, b3 = _transposed(
        tl.load(codes + 16, mask=inside, other=0), tl.load(codes + 20, mask=inside, other=0),
        tl.load(codes + 24, mask=inside, other=0), tl.load(codes + 28, mask=inside, other=0),
    )  # fmt: skip
    first = words + RECORD.v.scale // 4 + tl.where(inside, 8 * g // GROUP * VECTOR, 0) + 2 * c
    out = (v.to(tl.pointer_type(tl.int32)) + c * 4 * row_words + 4 * g)[:, None] + tl.arange(0, 4)[None, :]
    for plane in tl.static_range(4):
        at = first + plane * (PAGE // 8)
        row = plane * (PAGE // 4)
        s, z = tl.load(at), tl.load(at + V_OFFSETS)
        _store(out, a0, b0, s, z, row, count, c, row_words, inside, plane, 0)
        _store(out, a1, b1, s, z, row, count, c, row_words, inside, plane, 1)
        s, z = tl.load(at + 1), tl.load(at + V_OFFSETS + 1)
        _store(out, a2, b2, s, z, row, count, c, row_words, inside, plane, 2)
        _store(out, a3, b3, s, z, row, count, c, row_words, inside, plane, 3)


@triton.jit
def _store(out, a, b, s, z, row, count, c, row_words, inside, plane: tl.constexpr, n: tl.constexpr):
    """Stores eight dims of tokens row + 4 c + n of V."""
    lo, hi = _values(s, z, n % 2)
    tl.store(
        out + (row + n) * row_words, _expand(a, b, lo, hi, plane), mask=(inside & (row + 4 * c + n < count))[:, None]
    )


@triton.jit
def _values(s, z, upper):
    """Returns a token's four values, BF16, two to a word; ``upper`` selects one of the two FP16 tokens in s and z."""
    s, z = _half(s, upper), _half(z, upper)
    return _pair(0.0 * s + z, s + z), _pair(2.0 * s + z, 3.0 * s + z)


@triton.jit
def _half(words, upper):
    return ((words >> (16 * upper)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pair(low, high):
    """Packs two float32 as BF16 in one word."""
    if _PLAIN:
        low, high = to_bf16(low).to(tl.uint16, bitcast=True), to_bf16(high).to(tl.uint16, bitcast=True)
        return low.to(tl.int32) | (high.to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _expand(a, b, lo, hi, plane: tl.constexpr):
    """Expands eight codes, ``plane`` of each byte of a and b, to values: four words in a last axis."""
    if _PLAIN:
        x0, x1 = _pick(a, lo, hi, 2 * plane), _pick(a, lo, hi, 2 * plane + 16)
        x2, x3 = _pick(b, lo, hi, 2 * plane), _pick(b, lo, hi, 2 * plane + 16)
    else:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            asm=_expand_ptx(plane),
            constraints="=r,=r,=r,=r,r,r,r,r",
            args=[a, b, lo, hi],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    x = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.reshape(x, [x.shape[0], 4])


@triton.jit
def _pick(codes, lo, hi, shift: tl.constexpr):
    """Returns the values of the codes at bits ``shift`` and ``shift`` + 8, in one word."""
    first, second = (codes >> shift) & 3, (codes >> (shift + 8)) & 3
    low = tl.where(first > 1, hi, lo) >> (first % 2 * 16)
    high = tl.where(second > 1, hi, lo) >> (second % 2 * 16)
    return (low & 0xFFFF) | (high << 16)


@triton.constexpr_function
def _expand_ptx(plane):
    lines = ["{", ".reg .b32 code, select;"]
    for word in range(2):
        lines += [f"shr.u32 code, ${4 + word}, {2 * plane};", "and.b32 code, code, 0x03030303;"]
        lines += ["mad.lo.u32 select, code, 0x22, 0x10101010;", f"prmt.b32 ${2 * word}, $6, $7, select;"]
        lines += ["shr.u32 select, select, 16;", f"prmt.b32 ${2 * word + 1}, $6, $7, select;"]
    return "\n".join([*lines, "}"])


@triton.jit
def _transposed(w0, w1, w2, w3):
    """Transposes bytes: byte i of word j becomes byte j of word i."""
    if _PLAIN:
        x0, x1 = _bytes(w0, w1, w2, w3, 0), _bytes(w0, w1, w2, w3, 8)
        x2, x3 = _bytes(w0, w1, w2, w3, 16), _bytes(w0, w1, w2, w3, 24)
    else:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            asm=_TRANSPOSE_PTX,
            constraints="=&r,=&r,=&r,=&r,r,r,r,r",
            args=[w0, w1, w2, w3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return x0, x1, x2, x3


@triton.jit
def _bytes(w0, w1, w2, w3, shift: tl.constexpr):
    low = ((w0 >> shift) & 0xFF) | (((w1 >> shift) & 0xFF) << 8)
    return low | (((w2 >> shift) & 0xFF) << 16) | (((w3 >> shift) & 0xFF) << 24)


_TRANSPOSE_PTX = tl.constexpr(
    """{
    .reg .b32 p, q, r, s;
    prmt.b32 p, $4, $5, 0x5140;
    prmt.b32 q, $4, $5, 0x7362;
    prmt.b32 r, $6, $7, 0x5140;
    prmt.b32 s, $6, $7, 0x7362;
    prmt.b32 $0, p, r, 0x5410;
    prmt.b32 $1, p, r, 0x7632;
    prmt.b32 $2, q, s, 0x5410;
    prmt.b32 $3, q, s, 0x7632;
    }"""
)
