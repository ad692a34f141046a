"""Records of ``formats.planes`` in kernels: bytes to INT8 tiles of codes, and gains.

A plane's codes keep their position in a cell if that leaves them below 2^7 and at most ``_MOST_SHIFT`` bits too high.
The other operand of the product is then divided by this ``multiple``. Other codes are shifted down.
"""

import triton
import triton.language as tl

from sglang_kvq.formats.planes import GAIN_BIAS as _GAIN_BIAS
from sglang_kvq.kernels.device.codes import PlaneRecord
from sglang_kvq.kernels.device.common import PAGE
from sglang_kvq.kernels.device.int8 import base_of

GAIN_BIAS = tl.constexpr(_GAIN_BIAS)
#: Queries have 15 bits. With four fewer, the largest elements still have BF16's precision.
_MOST_SHIFT = 4


@triton.constexpr_function
def is_planes(record):
    """Tells if a record consists of planes."""
    return isinstance(record, PlaneRecord)


@triton.constexpr_function
def cell_count(codes):
    return len(codes.cells)


@triton.constexpr_function
def shares_of(codes, cell):
    """Returns how many tokens share a byte of the cell: 1, 2 or 4."""
    return codes.cells[cell].shares


@triton.constexpr_function
def bits_of(codes, cell):
    """Returns how many bits one token has in a cell."""
    return codes.cells[cell].bits


@triton.constexpr_function
def runs_of(codes):
    """Returns the number of runs into which a page's tokens are divided so that none in a run share a byte: 2 or 4."""
    return max(2, *(cell.shares for cell in codes.cells))


@triton.constexpr_function
def start_of(codes, cell):
    """Returns the start of the cell in the record, in bytes."""
    return codes.starts[cell]


@triton.constexpr_function
def field_count(codes, cell):
    return len(codes.cells[cell].fields)


@triton.constexpr_function
def plane_of(codes, cell, field):
    return codes.cells[cell].fields[field].plane


@triton.constexpr_function
def operand_of(codes, cell, share, field):
    """Returns the index of the operand for a field of a share's tokens; operands are counted from the first cell on."""
    before = sum(x.shares * len(x.fields) for x in codes.cells[:cell])
    return before + share * len(codes.cells[cell].fields) + field


@triton.constexpr_function
def shift_of(codes, cell, field):
    """Returns the distance of the field from the cell's lowest bit."""
    return codes.cells[cell].fields[field].shift


@triton.constexpr_function
def mask_of(codes, cell, field):
    """Returns the mask of the field's bits, shifted down to bit 0."""
    return (1 << codes.cells[cell].fields[field].width) - 1


@triton.constexpr_function
def height_of(codes, cell, field, share):
    """Returns the position of the lowest bit of a share's field in its byte."""
    return shift_of(codes, cell, field) + bits_of(codes, cell) * share


@triton.constexpr_function
def cut_of(codes, cell, field, share):
    """Returns the mask of a share's field in its byte."""
    return mask_of(codes, cell, field) << height_of(codes, cell, field, share)


@triton.constexpr_function
def middle(codes, plane):
    """Returns the number subtracted from a plane's codes: half their range."""
    return (2 ** codes.widths[plane] - 1) / 2


@triton.constexpr_function
def multiple(codes, plane):
    """Returns the factor by which a plane's codes are multiplied in its INT8 tile."""
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
    """Returns how many planes a tile needs to hold all that have bits: the first two, or all four."""
    return 4 if any(codes.widths[2:]) else 2


@triton.constexpr_function
def _stays(field):
    """Tells if a field's codes keep their position in the cell."""
    return field.shift + field.width <= 7 and field.shift <= _MOST_SHIFT


@triton.constexpr_function
def _left(codes, cell, field, share):
    """Returns how far bytes are shifted down for a field of a share's tokens."""
    own = 0 if _stays(codes.cells[cell].fields[field]) else shift_of(codes, cell, field)
    return own + bits_of(codes, cell) * share


@triton.constexpr_function
def _mask(codes, cell, field):
    """Returns the mask of the field after the shift by ``_left``."""
    return mask_of(codes, cell, field) << (
        shift_of(codes, cell, field) if _stays(codes.cells[cell].fields[field]) else 0
    )


@triton.constexpr_function
def _field_ptx(codes, cell, field, share):
    """Returns the PTX of ``field_codes`` for four bytes."""
    left, words = _left(codes, cell, field, share), f"{_mask(codes, cell, field) * 0x01010101:#010x}"
    if left == 0:
        return f"and.b32 $0, $1, {words};"
    return f"{{ .reg .b32 down; shr.u32 down, $1, {left}; and.b32 $0, down, {words}; }}"


@triton.jit
def field_codes(
    bytes, CODES: tl.constexpr, CELL: tl.constexpr, FIELD: tl.constexpr, SHARE: tl.constexpr, PLAIN: tl.constexpr
):
    """Converts a tile of bytes to an INT8 tile of ``multiple`` times a plane's codes, for one share's tokens."""
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
    """Converts gains' bytes, uint8, to float32: ``formats.planes.gains_of``."""
    return ((byte.to(tl.int32) + GAIN_BIAS) << 20).to(tl.float32, bitcast=True)


@triton.jit
def plane_dims(v_first, SHAPE: tl.constexpr):
    """Returns V dims of a program's rows [VP], ``VP / 4`` of each plane in turn, and a mask of rows without padding."""
    ROWS: tl.constexpr = SHAPE.VP // 4
    row = tl.arange(0, SHAPE.VP)
    j = row % ROWS
    return row // ROWS * SHAPE.D4 + v_first // 4 + j, j < SHAPE.DIMS // 4


@triton.jit
def row_dims(v_first, RECORD: tl.constexpr, SHAPE: tl.constexpr):
    """Returns the V dim of each of a program's rows [VP], and a mask of rows without padding, for any record."""
    if is_planes(RECORD) and SHAPE.VP != SHAPE.D:
        return plane_dims(v_first, SHAPE)
    else:
        row = tl.arange(0, SHAPE.VP)
        return v_first + row, row < SHAPE.DIMS


@triton.jit
def tile_bytes(bytes):
    """Splits gains' bytes [2 pages, 2, PAGE] into K's and V's, int32 [128], in ``int8.tokens_of_tile`` order."""
    x = tl.reshape(bytes, [2, 2, 4, 8, 2])  # page, which, plane of tokens, i, half
    k, v = tl.split(tl.reshape(tl.permute(x, (2, 0, 4, 3, 1)), [2 * PAGE, 2]))
    return k.to(tl.int32), v.to(tl.int32)


@triton.jit
def key_address(records, base_a, base_b, CELL: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Returns addresses of a cell's rows in the keys of two pages, [2 PAGE / shares], in the order of the tile."""
    ROWS: tl.constexpr = 2 * PAGE // shares_of(CODES, CELL)
    QUARTER: tl.constexpr = PAGE // 4
    row = tl.arange(0, ROWS)
    # ``common.key_row`` of each row's token, times the bytes of a row.
    of_page = (row // (2 * QUARTER) * QUARTER + row % QUARTER) * SHAPE.D4
    return records + base_of(row // QUARTER % 2 == 1, base_a, base_b) + of_page + start_of(CODES, CELL)


@triton.jit
def key_bytes(records, base_a, base_b, CELL: tl.constexpr, CODES: tl.constexpr, JP: tl.constexpr, SHAPE: tl.constexpr):
    """Loads one cell of the keys of two pages: uint8 [2 PAGE / shares, JP]."""
    j = tl.arange(0, JP)[None, :]
    address = key_address(records, base_a, base_b, CELL, CODES, SHAPE)[:, None]
    if SHAPE.D4 == JP:
        return tl.load(address + j)
    else:
        return tl.load(address + j, mask=(j < SHAPE.D4) & (tl.arange(0, address.shape[0]) >= 0)[:, None], other=0)
