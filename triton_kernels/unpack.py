"""Packed codes of any width and table to INT8 levels for tensor cores, four bytes at a time.

Levels are shifted by ``centre`` to fit INT8, and a plane may carry a multiple of them, where that saves instructions:

    tile of plane n = (level[code] - centre) * multiple(n)
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.codes import level_of


@triton.constexpr_function
def centre(codes):
    """What is taken off levels: half their range, unless they are few or uniform."""
    return 0 if codes.uniform or codes.bits == 2 else codes.levels[-1] // 2


@triton.constexpr_function
def multiple(codes, plane):
    """What INT8 levels of a plane are multiplied by."""
    if codes.bits > 2:
        return 1
    if codes.uniform:  # masked where they lie in the byte
        return 4 if plane % 2 else 1
    return 2  # see _two_bits


@triton.jit
def unpack(low, high, shift, CODES: tl.constexpr, PLAIN: tl.constexpr):
    """INT8 tiles of the four planes.

    low, high: uint8 tiles of equal shape, see ``formats.pack``; of 3-bit codes, shift int32 (likewise) says where in a
    byte of high the row's bits begin, 0 or 4. PLAIN: without inline assembly.
    """
    if PLAIN:
        x0 = _plain(low, high, shift, 0, CODES)
        x1 = _plain(low, high, shift, 1, CODES)
        x2 = _plain(low, high, shift, 2, CODES)
        x3 = _plain(low, high, shift, 3, CODES)
    elif CODES.bits == 2:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            asm=assembly(CODES),
            constraints="=r,=r,=r,=r,r",
            args=[low],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    elif CODES.bits == 3:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            asm=assembly(CODES),
            constraints="=r,=r,=r,=r,r,r,r,r,r,r",
            args=[low, high, shift],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            asm=assembly(CODES),
            constraints="=r,=r,=r,=r,r,r",
            args=[low, high],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return x0, x1, x2, x3


@triton.jit
def _plain(low, high, shift, plane: tl.constexpr, CODES: tl.constexpr):
    code = (low.to(tl.int32) >> (2 * plane)) & 3
    if CODES.bits == 4:
        code |= ((high.to(tl.int32) >> (2 * plane)) & 3) << 2
    elif CODES.bits == 3:
        code |= ((high.to(tl.int32) >> (shift + plane)) & 1) << 2
    return ((level_of(code, CODES) - centre(CODES)) * multiple(CODES, plane)).to(tl.int8)


@triton.constexpr_function
def assembly(codes):
    """PTX of ``unpack``: $0 to $3 are the planes, $4 is low, $5 high, $6 shift; every line works on four bytes."""
    body = _two_bits(codes) if codes.bits == 2 else _more_bits(codes)
    return "{\n.reg .b32 upper, field, code, pairs, lower_half, upper_half;\n" + "\n".join(body) + "\n}"


@triton.constexpr_function
def _two_bits(codes) -> list[str]:
    """Uniform levels are the codes. Else 2 level = b code + (2 a - b) (code & 1), for levels 0, a, b, a + b."""
    if codes.uniform:
        return [
            "and.b32 $0, $4, 0x03030303;",
            "and.b32 $1, $4, 0x0c0c0c0c;",
            "shr.u32 upper, $4, 4;",
            "and.b32 $2, upper, 0x03030303;",
            "and.b32 $3, upper, 0x0c0c0c0c;",
        ]
    a, b, top = codes.levels[1:]
    assert top == a + b and 2 * top < 128, codes
    lines = []
    for plane in range(4):
        lines += [
            f"shr.u32 field, $4, {2 * plane};",
            "and.b32 code, field, 0x03030303;",
            "and.b32 field, field, 0x01010101;",
            f"mul.lo.u32 field, field, {2 * a - b};",
            f"mad.lo.u32 ${plane}, code, {b}, field;",
        ]
    return lines


@triton.constexpr_function
def _more_bits(codes) -> list[str]:
    """Both parts of a code together, then its level from a table in registers."""
    lines = ["shr.u32 upper, $5, $6;"] if codes.bits == 3 else ["mov.b32 upper, $5;"]
    width, mask = (1, 0x04040404) if codes.bits == 3 else (2, 0x0C0C0C0C)
    for plane in range(4):
        up = 2 - width * plane  # where the plane's upper bits lie, from where they belong
        code = f"${plane}" if codes.uniform else "code"
        lines += [
            f"shr.u32 field, $4, {2 * plane};",
            "and.b32 field, field, 0x03030303;",
            f"{'shl.b32' if up > 0 else 'shr.u32'} code, upper, {abs(up)};",
            f"and.b32 code, code, {mask:#010x};",
            f"or.b32 {code}, code, field;",
        ]
        if not codes.uniform:
            lines += _look_up(codes, f"${plane}")
    return lines


@triton.constexpr_function
def _look_up(codes, out: str) -> list[str]:
    """Levels of the four bytes of ``code``. A byte permutation is a table of eight, asked by four nibbles.

    With bit 3 set, a nibble asks for the sign of an entry, eight times. Of 16 levels the lower half are negative; the
    upper half are stored with their sign bit set too, so either half gives 0xFF for codes of the other, and the sign bit
    is taken off again.
    """
    middle = codes.levels[-1] // 2
    table = [(level - middle) & 0xFF for level in codes.levels]
    if codes.bits == 4:
        assert all(level < middle for level in codes.levels[:8]), codes
        table[8:] = [entry | 0x80 for entry in table[8:]]
    words = [sum(entry << 8 * i for i, entry in enumerate(table[n : n + 4])) for n in range(0, len(table), 4)]
    words = [f"{word:#010x}" for word in words]
    lines = ["shr.u32 pairs, code, 4;", "or.b32 pairs, pairs, code;", "prmt.b32 pairs, pairs, 0, 0x4420;"]
    if codes.bits == 3:
        return [*lines, f"prmt.b32 {out}, {words[0]}, {words[1]}, pairs;"]
    return [
        *lines,
        f"prmt.b32 lower_half, {words[0]}, {words[1]}, pairs;",
        "xor.b32 pairs, pairs, 0x8888;",
        f"prmt.b32 upper_half, {words[2]}, {words[3]}, pairs;",
        "and.b32 lower_half, lower_half, upper_half;",
        "shl.b32 code, code, 4;",
        "and.b32 code, code, 0x80808080;",
        f"xor.b32 {out}, lower_half, code;",
    ]
