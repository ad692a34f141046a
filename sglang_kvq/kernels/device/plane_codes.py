"""Records of ``formats.planes`` in kernels: bytes to INT8 tiles of codes, and gains.

A plane's codes are used as they lie in a cell where that leaves them below 2^7 and at most ``_MOST_SHIFT`` bits too
high; the other factor of a product is divided by that ``multiple``. Else they are shifted down.
"""

import triton
import triton.language as tl

from sglang_kvq.formats.planes import GAIN_BIAS as _GAIN_BIAS
from sglang_kvq.kernels.device.codes import PlaneRecord
from sglang_kvq.kernels.device.common import PAGE
from sglang_kvq.kernels.device.int8 import base_of

GAIN_BIAS = tl.constexpr(_GAIN_BIAS)
#: A query is split to 15 bits: four less are as many as BF16 has of the largest.
_MOST_SHIFT = 4


@triton.constexpr_function
def is_planes(record):
    """Whether a record is one of planes."""
    return isinstance(record, PlaneRecord)


@triton.constexpr_function
def cell_count(codes):
    return len(codes.cells)


@triton.constexpr_function
def shares_of(codes, cell):
    """How many tokens share a byte of the cell: 1, 2 or 4."""
    return codes.cells[cell].shares


@triton.constexpr_function
def bits_of(codes, cell):
    """Bits of one token's cell."""
    return codes.cells[cell].bits


@triton.constexpr_function
def runs_of(codes):
    """Of how many runs of a page's tokens none shares a byte with another of its own: 2 or 4."""
    return max(2, *(cell.shares for cell in codes.cells))


@triton.constexpr_function
def start_of(codes, cell):
    """Where the cell begins in the record, in bytes."""
    return codes.starts[cell]


@triton.constexpr_function
def field_count(codes, cell):
    return len(codes.cells[cell].fields)


@triton.constexpr_function
def plane_of(codes, cell, field):
    return codes.cells[cell].fields[field].plane


@triton.constexpr_function
def operand_of(codes, cell, share, field):
    """Which operand is that of a field of a share's tokens, of all from the first cell's on."""
    before = sum(x.shares * len(x.fields) for x in codes.cells[:cell])
    return before + share * len(codes.cells[cell].fields) + field


@triton.constexpr_function
def shift_of(codes, cell, field):
    """How far the field lies from the cell's lowest bit."""
    return codes.cells[cell].fields[field].shift


@triton.constexpr_function
def mask_of(codes, cell, field):
    """The field's bits, brought to the lowest."""
    return (1 << codes.cells[cell].fields[field].width) - 1


@triton.constexpr_function
def height_of(codes, cell, field, share):
    """How many bits high the field of a share's token lies in its byte."""
    return shift_of(codes, cell, field) + bits_of(codes, cell) * share


@triton.constexpr_function
def cut_of(codes, cell, field, share):
    """The bits of a byte that it is."""
    return mask_of(codes, cell, field) << height_of(codes, cell, field, share)


@triton.constexpr_function
def middle(codes, plane):
    """What is taken off a plane's codes: half their range."""
    return (2 ** codes.widths[plane] - 1) / 2


@triton.constexpr_function
def multiple(codes, plane):
    """What a plane's codes are multiplied by in its INT8 tile."""
    for cell in codes.cells:
        for field in cell.fields:
            if field.plane == plane and _stays(field):
                return 2**field.shift
    return 1


@triton.constexpr_function
def is_coded(codes, plane):
    return codes.widths[plane] > 0


@triton.constexpr_function
def tile_planes(codes):
    """Planes that a tile needs to hold all that have bits: the first two, or all four."""
    return 4 if any(codes.widths[2:]) else 2


@triton.constexpr_function
def _stays(field):
    """Whether codes are used as they lie."""
    return field.shift + field.width <= 7 and field.shift <= _MOST_SHIFT


@triton.constexpr_function
def _left(codes, cell, field, share):
    """By how much bytes are shifted down for a field of the tokens of a share."""
    own = 0 if _stays(codes.cells[cell].fields[field]) else shift_of(codes, cell, field)
    return own + bits_of(codes, cell) * share


@triton.constexpr_function
def _mask(codes, cell, field):
    """What is left of it then."""
    return mask_of(codes, cell, field) << (
        shift_of(codes, cell, field) if _stays(codes.cells[cell].fields[field]) else 0
    )


@triton.constexpr_function
def _field_ptx(codes, cell, field, share):
    """Of four bytes."""
    left, words = _left(codes, cell, field, share), f"{_mask(codes, cell, field) * 0x01010101:#010x}"
    if left == 0:
        return f"and.b32 $0, $1, {words};"
    return f"{{ .reg .b32 down; shr.u32 down, $1, {left}; and.b32 $0, down, {words}; }}"


@triton.jit
def field_codes(
    bytes, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, SHARE: tl.constexpr, PLAIN: tl.constexpr
):
    """INT8 tile of ``multiple`` times a plane's codes, of a tile of bytes: of the first, second, ... token of each."""
    if PLAIN:
        x = bytes >> _left(CODES, CELL, FIELD, SHARE)
        return (x & _mask(CODES, CELL, FIELD)).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            asm=_field_ptx(CODES, CELL, FIELD, SHARE),
            constraints="=r,r",
            args=[bytes],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def gain_of(byte):
    """float32 of gains' bytes, uint8: ``formats.planes.gains_of``."""
    return ((byte.to(tl.int32) + GAIN_BIAS) << 20).to(tl.float32, bitcast=True)


@triton.jit
def plane_dims(v_first, SHAPE: tl.constexpr):
    """Dims of V of a program's rows [VP], ``VP / 4`` of each plane in turn, and which rows are dims."""
    ROWS: tl.constexpr = SHAPE.VP // 4
    row = tl.arange(0, SHAPE.VP)
    j = row % ROWS
    return row // ROWS * SHAPE.D4 + v_first // 4 + j, j < SHAPE.DIMS // 4


@triton.jit
def row_dims(v_first, RECORD: tl.constexpr, SHAPE: tl.constexpr):
    """The dim of V that each of a program's rows [VP] is, and which rows are dims, of any record."""
    if is_planes(RECORD) and SHAPE.VP != SHAPE.D:
        return plane_dims(v_first, SHAPE)
    else:
        row = tl.arange(0, SHAPE.VP)
        return v_first + row, row < SHAPE.DIMS


@triton.jit
def tile_bytes(bytes):
    """Gains' bytes [2 pages, 2, PAGE] to K's and V's, int32 [128], rows in the order of ``int8.tokens_of_tile``."""
    x = tl.reshape(bytes, [2, 2, 4, 8, 2])  # page, which, plane of tokens, i, half
    k, v = tl.split(tl.reshape(tl.permute(x, (2, 0, 4, 3, 1)), [2 * PAGE, 2]))
    return k.to(tl.int32), v.to(tl.int32)


@triton.jit
def key_address(records, base_a, base_b, CELL: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Rows of a cell of two pages' keys, [2 PAGE / shares], in the tile's order, in which shares follow."""
    ROWS: tl.constexpr = 2 * PAGE // shares_of(CODES, CELL)
    QUARTER: tl.constexpr = PAGE // 4
    row = tl.arange(0, ROWS)
    # ``common.key_row`` of the row's token, times the row's bytes.
    of_page = (row // (2 * QUARTER) * QUARTER + row % QUARTER) * SHAPE.D4
    return records + base_of(row // QUARTER % 2 == 1, base_a, base_b) + of_page + start_of(CODES, CELL)


@triton.jit
def key_bytes(records, base_a, base_b, CELL: tl.constexpr, CODES: tl.constexpr, JP: tl.constexpr, SHAPE: tl.constexpr):
    """A cell of two pages' keys: uint8 [2 PAGE / shares, JP]."""
    j = tl.arange(0, JP)[None, :]
    address = key_address(records, base_a, base_b, CELL, CODES, SHAPE)[:, None]
    if SHAPE.D4 == JP:
        return tl.load(address + j)
    else:
        return tl.load(address + j, mask=(j < SHAPE.D4) & (tl.arange(0, address.shape[0]) >= 0)[:, None], other=0)
