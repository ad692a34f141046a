"""Packed codes of any width and table to INT8 tiles for tensor cores, four bytes at a time.

A level is recovered in one of three ways, the one with the fewest instructions:

    uniform levels       the code
    2 bits, not uniform  levels 0, a, b, a + b:  2 level = b code + (2 a - b) (code & 1), put together as products
    3 and 4 bits, not    a table in registers, of levels shifted by ``centre`` to fit INT8

A plane's tile may hold a multiple of these numbers, where that saves a shift.
"""

import triton
import triton.language as tl

from sglang_kvq.kernels.device.codes import level_of


@triton.constexpr_function
def in_steps(codes):
    """Tells if products with levels are put together from products with codes and with their lowest bits."""
    return codes.bits == 2 and not codes.uniform


@triton.constexpr_function
def step(codes):
    """Returns b: twice a level is b times its code, plus 1 if the code is odd."""
    a, b, top = codes.levels[1:]
    if top != a + b or 2 * a - b != 1:
        raise ValueError(f"levels {codes.levels}: must be 0, a, b and a + b, where b is 2a - 1.")
    return b


@triton.constexpr_function
def centre(codes):
    """Returns the number subtracted from levels: half their range if they come from a table, else 0."""
    return 0 if codes.uniform or codes.bits == 2 else codes.levels[-1] // 2


@triton.constexpr_function
def multiple(codes, plane):
    """Returns the factor in a plane's tile: 4 for 2-bit codes of odd planes, which keep their position in the byte."""
    return 4 if codes.bits == 2 and plane % 2 else 1


@triton.jit
def unpack(low, high, shift, CODES: tl.constexpr, FIXED: tl.constexpr, PLAIN: tl.constexpr):
    """Unpacks INT8 tiles of the four planes: codes of 2 bits or of uniform levels, else level - centre.

    low, high: uint8 tiles of equal shape, see ``formats.pack``. For 3-bit codes, shift is the first bit of a row's
    codes in a byte of high, int32 of the same shape. FIXED is that bit, 0 or 4, if it is the same for all rows, else
    None. PLAIN: without inline assembly.
    """
    if PLAIN:
        x0 = _plain(low, high, shift, 0, CODES)
        x1 = _plain(low, high, shift, 1, CODES)
        x2 = _plain(low, high, shift, 2, CODES)
        x3 = _plain(low, high, shift, 3, CODES)
        return x0, x1, x2, x3
    elif CODES.bits == 2:
        return two_bits(low, 3, PLAIN)
    elif CODES.bits == 3 and FIXED is None:
        tiles = tl.inline_asm_elementwise(
            asm=_assembly(CODES, None),
            constraints="=r,=r,=r,=r,r,r,r,r,r,r",
            args=[low, high, shift],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
        return own_tiles(tiles, 0)
    else:
        tiles = tl.inline_asm_elementwise(
            asm=_assembly(CODES, FIXED),
            constraints="=r,=r,=r,=r,r,r",
            args=[low, high],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
        return own_tiles(tiles, 0)


@triton.jit
def unpack_odd(low, CODES: tl.constexpr, PLAIN: tl.constexpr):
    """Returns INT8 tiles of the four planes: 1 where a 2-bit code is odd, times the plane's multiple."""
    return two_bits(low, 1, PLAIN)


@triton.jit
def two_bits(low, MASK: tl.constexpr, PLAIN: tl.constexpr):
    """Returns INT8 tiles of ``code & MASK`` for the four planes, times 1, 4, 1, 4, which saves half the shifts."""
    if PLAIN:
        x0, x1 = (low & MASK).to(tl.int8), (low & (4 * MASK)).to(tl.int8)
        x2, x3 = ((low >> 4) & MASK).to(tl.int8), ((low >> 4) & (4 * MASK)).to(tl.int8)
        return x0, x1, x2, x3
    else:
        tiles = tl.inline_asm_elementwise(
            asm=_masks(MASK),
            constraints="=r,=r,=r,=r,r",
            args=[low],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
        return own_tiles(tiles, 0)


@triton.jit
def own_tiles(tiles, USE: tl.constexpr):
    """Returns tiles of codes, each for one product; USE is another number for each product that takes a tile.

    Triton extracts codes in the layout of the product's operand, so that the operand stays in registers. Triton 3.8
    does this for only one of the operands that come from one operation, and moves the others through shared memory
    (https://github.com/triton-lang/triton/issues/11526). So each gets an operation of its own, which ptxas drops.
    """
    result = ()
    for n in tl.static_range(len(tiles)):
        result += (
            tl.inline_asm_elementwise(
                asm=_move(USE),
                constraints="=r,r",
                args=[tiles[n]],
                dtype=tiles[n].dtype,
                is_pure=True,
                pack=32 // tiles[n].dtype.primitive_bitwidth,
            ),
        )
    return result


@triton.constexpr_function
def _move(use):
    """Returns PTX that copies a word. Equal operations would become one, so the number of its use is a comment."""
    return f"mov.b32 $0, $1; // {use}"


@triton.jit
def _plain(low, high, shift, plane: tl.constexpr, CODES: tl.constexpr):
    code = (low.to(tl.int32) >> (2 * plane)) & 3
    if CODES.bits == 4:
        code |= ((high.to(tl.int32) >> (2 * plane)) & 3) << 2
    elif CODES.bits == 3:
        code |= ((high.to(tl.int32) >> (shift + plane)) & 1) << 2
    if CODES.bits > 2:
        code = level_of(code, CODES) - centre(CODES)
    return (code * multiple(CODES, plane)).to(tl.int8)


@triton.constexpr_function
def _masks(mask):
    """Returns the PTX of ``two_bits``: $0 to $3 are the planes, $4 is low; every line works on four bytes."""
    even, odd = f"{mask * 0x01010101:#010x}", f"{mask * 0x04040404:#010x}"
    return f"""{{
        .reg .b32 upper;
        and.b32 $0, $4, {even};
        and.b32 $1, $4, {odd};
        shr.u32 upper, $4, 4;
        and.b32 $2, upper, {even};
        and.b32 $3, upper, {odd};
        }}"""


@triton.constexpr_function
def _assembly(codes, shift):
    """Returns the PTX of ``unpack`` for 3 and 4 bits; every line works on four bytes.

    $0 to $3 are the planes, $4 is low, $5 high, $6 shift unless it is given. First it puts whole codes into nibbles:
    ``even`` holds those of planes 0 and 2, ``odd`` those of 1 and 3.
    """
    lines = ["{", ".reg .b32 even, odd, high, upper, first, second, sign;"]
    if codes.bits == 4:
        lines += [
            "shl.b32 high, $5, 2;",
            "and.b32 high, high, 0xcccccccc;",
            "and.b32 upper, $5, 0xcccccccc;",
        ]
    else:  # moves a plane's bit n to bit 2 of its nibble; other moved bits are masked
        lines += [
            f"shr.u32 upper, $5, {'$6' if shift is None else shift};",
            "and.b32 high, upper, 0x05050505;",
            "mul.lo.u32 high, high, 20;",
            "and.b32 high, high, 0x44444444;",
            "and.b32 upper, upper, 0x0a0a0a0a;",
            "mul.lo.u32 upper, upper, 10;",
            "and.b32 upper, upper, 0x44444444;",
        ]
    lines += [
        "and.b32 even, $4, 0x33333333;",
        "or.b32 even, even, high;",
        "shr.u32 odd, $4, 2;",
        "and.b32 odd, odd, 0x33333333;",
        "or.b32 odd, odd, upper;",
    ]
    for nibbles, plane in (("even", 0), ("odd", 1)):
        if codes.uniform:
            lines.append(f"and.b32 ${plane}, {nibbles}, 0x0f0f0f0f;")
            lines.append(f"shr.u32 {nibbles}, {nibbles}, 4;")
            lines.append(f"and.b32 ${plane + 2}, {nibbles}, 0x0f0f0f0f;")
        else:
            lines += _look_up(codes, nibbles, plane)
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _look_up(codes, nibbles, plane):
    """Returns PTX for the levels of a plane and the one after next, from their codes in nibbles.

    A byte permutation is a table of eight bytes, indexed by four nibbles. A nibble with bit 3 set returns the sign of
    an entry, eight times. Of 16 levels, the lower half is negative. The upper half is stored with its sign bit set too,
    so either half gives 0xFF for codes of the other. The sign bit is removed at the end.
    """
    middle = codes.levels[-1] // 2
    table = [(level - middle) & 0xFF for level in codes.levels]
    if codes.bits == 4:
        if any(level >= middle for level in codes.levels[:8]):
            raise ValueError(f"levels {codes.levels}: the lower eight must be below their middle {middle}.")
        table[8:] = [entry | 0x80 for entry in table[8:]]
    words = [sum(entry << 8 * i for i, entry in enumerate(table[n : n + 4])) for n in range(0, len(table), 4)]
    words = [f"{word:#010x}" for word in words]
    lines = []
    for half in ("first", "second"):
        if half == "second":
            lines.append(f"shr.u32 {nibbles}, {nibbles}, 16;")
        if codes.bits == 3:
            lines.append(f"prmt.b32 {half}, {words[0]}, {words[1]}, {nibbles};")
        else:
            lines += [
                f"prmt.b32 {half}, {words[0]}, {words[1]}, {nibbles};",
                f"xor.b32 sign, {nibbles}, 0x8888;",
                f"prmt.b32 sign, {words[2]}, {words[3]}, sign;",
                f"and.b32 {half}, {half}, sign;",
            ]
    lines.append(f"prmt.b32 ${plane}, first, second, 0x6420;")
    lines.append(f"prmt.b32 ${plane + 2}, first, second, 0x7531;")
    for n in (plane, plane + 2) if codes.bits == 4 else ():
        lines.append(f"shl.b32 sign, $5, {6 - 2 * n};")
        lines.append("and.b32 sign, sign, 0x80808080;")
        lines.append(f"xor.b32 ${n}, ${n}, sign;")
    return lines
