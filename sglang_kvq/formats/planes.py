"""Pages for transform coding: each quarter of a row has its own code width, and each row one 8-bit gain.

A row of D elements has four *planes* of D / 4 elements, the plane of most energy first. ``rotations.maths.transform``
scales elements so that a quantizer step is 1 in every plane. Plane p has codes of ``widths[p]`` bits, 0 to 6. With w
bits, the levels are the 2^w half-integers around 0 times the row's gain g. A gain is a float with a 3-bit fraction:

    code  = k + 2^(w - 1),  -2^(w - 1) <= k < 2^(w - 1)
    value = (k + 1/2) g,    0 where w is 0

There are two candidates for the gain: the least that clips no element, and the one ``BELOW`` it, about sqrt(2) lower.
The lower one clips the row's largest elements but gives all others finer steps. The candidate of less squared error
wins; at equal errors the first wins. All arithmetic is in FP16, because a GPU processes two FP16 numbers at a time.

Let u be the power of two in the first gain (the gain without its fraction) and N = 2^w - 1. fp16(x) is the FP16 number
nearest to x, ties to even. Then for every plane with w > 0:

    X_i   = 2^4 x_i / u,  G = 2^4 g / u
    a_p   = fp16(fp16(1/G) fp16(1/N))
    t_i   = fp16(X_i a_p + 1/2),  y_i = min(max(t_i, 0), 1)
    code  = round(N y_i)
    e_i   = fp16(N/c t_i - code/c)
    E_j   = fp16(e_3^2 + fp16(e_2^2 + fp16(e_1^2 + fp16(e_0^2)))) of column j's elements of planes 0 to 3
    E(G)  = G^2 sum over j of round(2^10 min(E_j, 1))

y is the code's position between the plane's first and last level. A column's errors are added in the order of planes.
Columns are added as integers, so their order does not matter. A column's squared error above c^2, in steps, counts as
c^2. The widest plane determines c: 2, 4 or 8 (``PlaneCode.cap``). The first gain clips nothing, so its codes in E are
round(N t_i), computed by adding and subtracting ``MAGIC`` in FP16.

X is exact, except for elements below 2^-18 u, which are rounded to steps of 2^-25 u. If the first gain would exceed the
largest that a byte can hold, u is still the power of two in the gain that would be needed. A row that would need a gain
of 2^19 or more is stored like a row of zeros. Its values become 2^-17 in magnitude, or 0 where w is 0. The same holds
for a row with an infinity or NaN in a plane that has codes. Such an element gets code 0, whose value is above -2^-11.
Planes without codes are ignored.

A column, the four elements j, D / 4 + j, ..., has W = sum(widths) bits: 2, 4, 6, ... or 16. These bits are stored in
*cells*. Every eight bits form a cell of a byte, which one token owns. Of the remainder, four bits form a half byte and
two bits a quarter byte: two or four tokens *share* such a byte. The codes of some planes fill each cell exactly. A
record of one KV head is, without gaps, for P tokens per page and cells whose bytes s tokens share:

    K cells   uint8 [P / s, D / 4]: row r has rows r, r + P / s, ... of the order ``page.KEY_TOKENS``, lowest bits first
    V cells   uint8 [4 / s, D / 4, P / 4]: [t, :, i] has tokens t P / 4 + i, then each P / s later, lowest bits first
    K gains, V gains   uint8 [P]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, TypeAlias

import torch

from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import KEY_TOKENS

PLANES = 4
MOST_BITS = 6
#: Most bits of a column, all planes together.
MOST_COLUMN_BITS = 16
#: Bits of each plane's codes.
Widths: TypeAlias = tuple[int, int, int, int]

#: A gain's byte is its float32 bit pattern shifted right by ``_SIGNIFICAND``, minus this bias: 128 is a gain of 1.
GAIN_BIAS = (127 << 3) - 128
_SIGNIFICAND = 20
#: The second candidate's byte is this much lower than that of the gain that clips nothing; eight are a factor of two.
BELOW = 4
#: FP16 value of u after scaling; then the number of a gain's byte from which on rows are stored as zeros.
UNITS, TOO_LARGE = 16.0, 280
#: Number that rounds a code to an integer when it is added in FP16; then the integer for a column's largest error.
MAGIC, ERRORS = 1536.0, 1024.0


@dataclass(frozen=True)
class Field:
    """Position of a plane's codes in a cell: at ``shift`` from the lowest bit."""

    plane: int
    shift: int
    width: int


@dataclass(frozen=True)
class Cell:
    """Bits of a column that are stored together: 8, 4 or 2."""

    bits: int
    fields: tuple[Field, ...]

    @property
    def shares(self) -> int:
        """Number of tokens that share a byte."""
        return 8 // self.bits


@cache
def cells_of(widths: Widths) -> tuple[Cell, ...] | None:
    """Returns the cells of a column, bytes first; None if no choice of planes fills every cell exactly."""
    total = sum(widths)
    if total == 0 or total % 2 or total > MOST_COLUMN_BITS:
        return None
    sizes = [8] * (total // 8) + [4] * (total % 8 // 4) + [2] * (total % 4 // 2)
    chosen = _fill([(w, p) for p, w in enumerate(widths) if w], sizes)
    if chosen is None:
        return None
    cells = []
    for size, planes in zip(sizes, chosen):
        shifts = [sum(w for w, _ in planes[:n]) for n in range(len(planes))]
        cells.append(Cell(size, tuple(Field(p, shift, w) for (w, p), shift in zip(planes, shifts))))
    return tuple(cells)


def _fill(planes: list[tuple[int, int]], sizes: list[int]) -> list[list[tuple[int, int]]] | None:
    """Assigns planes (width, number) to cells so that widths sum to the cell's size; returns the first solution."""
    if not planes:
        return [[] for _ in sizes] if not any(sizes) else None
    width = planes[0][0]
    for n, room in enumerate(sizes):
        if width <= room and (rest := _fill(planes[1:], [*sizes[:n], room - width, *sizes[n + 1 :]])) is not None:
            rest[n].insert(0, planes[0])
            return rest
    return None


def gain_bytes(least: torch.Tensor) -> torch.Tensor:
    """Returns the uint8 bytes of the least gains not below these positive float32 numbers, clamped to the range."""
    return _gain_numbers(least).clamp(0, 255).to(torch.uint8)


def _gain_numbers(least: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of ``gain_bytes`` before they are clamped to 0 .. 255: int32. A NaN counts as infinity."""
    numbers = least.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    rounded = (numbers.contiguous().view(torch.int32) + ((1 << _SIGNIFICAND) - 1)) >> _SIGNIFICAND
    return rounded - GAIN_BIAS


def _fp16(x: torch.Tensor) -> torch.Tensor:
    """Rounds float64 to FP16 precision in one step (torch's own conversion goes through float32)."""
    last = ((torch.frexp(x)[1].clamp(min=-13) - 11 + 1023).long() << 52).view(torch.float64)  # value of x's last bit
    return (x / last).round() * last


def gains_of(stored: torch.Tensor) -> torch.Tensor:
    """Decodes gains from their bytes, integers of any dtype: float32 from 2^-16 to 1.875 * 2^15."""
    return ((stored.int() + GAIN_BIAS) << _SIGNIFICAND).view(torch.float32)


@dataclass(frozen=True)
class PlaneCode:
    """The code of keys or of values.

    Attributes:
        widths: bits of each plane.

    Raises:
        KVQuantError: widths are out of range, or do not fill cells exactly.
    """

    widths: Widths

    def __post_init__(self) -> None:
        if len(self.widths) != PLANES or not all(0 <= w <= MOST_BITS for w in self.widths) or not self.cells:
            raise KVQuantError(
                f"widths {self.widths}: must be four numbers from 0 to {MOST_BITS}, one per plane, with an even sum "
                f"from 2 to {MOST_COLUMN_BITS}; some of them must exactly fill each byte, half byte and quarter byte "
                "of a column."
            )

    @property
    def cells(self) -> tuple[Cell, ...]:
        return cells_of(self.widths) or ()

    @property
    def total(self) -> int:
        """Bits of a column: one element of each plane."""
        return sum(self.widths)

    def describe(self) -> str:
        """Returns a short description for logs, such as ``4+3+1+0 bits``."""
        return "+".join(map(str, self.widths)) + " bits"

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantizes rows ``[..., D]``, exact in float32: codes uint8 ``[..., D]``, gains' bytes uint8 ``[...]``."""
        planes = x.float().unflatten(-1, (PLANES, -1))
        reach = [planes[..., p, :].abs().amax(-1) * 2.0 ** (1 - w) for p, w in enumerate(self.widths) if w]
        least = _gain_numbers(torch.stack(reach).amax(0)).clamp(0, TOO_LARGE)
        kept = least < TOO_LARGE
        least = torch.where(kept, least, 0)
        counts = UNITS / gains_of(least & ~7)
        scaled = torch.where(kept[..., None, None], planes, 0.0).double() * counts[..., None, None]
        units = (scaled * 2.0**21).round() * 2.0**-21
        first = least.clamp(max=255)
        second = (first - BELOW).clamp(min=0)
        codes, error = self._codes(units, gains_of(first) * counts, clips=False)
        others, other_error = self._codes(units, gains_of(second) * counts, clips=True)
        better = other_error < error
        codes, stored = torch.where(better[..., None], others, codes), torch.where(better, second, first)
        codes = torch.where(x.isfinite(), codes, 0.0)
        return codes.to(torch.uint8), stored.to(torch.uint8)

    @property
    def cap(self) -> float:
        """c of the module's docstring: a column's error, in steps, counts as at most this."""
        return min(2.0 ** (max(self.widths) // 2 + 1), 8.0)

    def _codes(self, units: torch.Tensor, gain: torch.Tensor, clips: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns codes ``[..., D]`` and E ``[...]`` of X ``[..., PLANES, D / 4]`` at G ``[...]``, all in float64."""
        inverse = _fp16(1.0 / gain.double())[..., None]
        total, codes = torch.zeros_like(units[..., 0, :]), torch.zeros_like(units)
        for p, width in enumerate(self.widths):
            if width:
                most = 2.0**width - 1
                step = _fp16(inverse * _fp16(torch.full_like(inverse, 1 / most)))
                wanted = _fp16(units[..., p, :] * step + 0.5)
                inside = wanted.clamp(0.0, 1.0)
                codes[..., p, :] = (inside * most).round()
                code = codes[..., p, :] if clips else _fp16(wanted * most + MAGIC) - MAGIC
                error = _fp16(wanted * (most / self.cap) - code / self.cap)
                total = _fp16(total + error**2)
        error = (total.clamp(max=1.0) * ERRORS).round().sum(-1) * gain.double() ** 2
        return codes.flatten(-2), error

    def dequantize(self, codes: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """Dequantizes codes ``[..., D]`` and gains' bytes ``[...]`` to exact float32 values ``[..., D]``."""
        widths = torch.tensor(self.widths, device=codes.device)
        middle = ((2.0**widths) - 1) / 2
        levels = (codes.unflatten(-1, (PLANES, -1)).float() - middle[:, None]) * (widths > 0)[:, None]
        values: torch.Tensor = levels.flatten(-2) * gains_of(stored)[..., None]
        return values

    def columns(self, codes: torch.Tensor, cell: Cell) -> torch.Tensor:
        """Collects a cell's bits of every column, uint8 ``[..., D / 4]``, from codes ``[..., D]``."""
        planes, bits = codes.unflatten(-1, (PLANES, -1)), torch.zeros_like(codes[..., : codes.shape[-1] // PLANES])
        for field in cell.fields:
            bits = bits | planes[..., field.plane, :] << field.shift
        return bits

    def codes_of(self, columns: list[torch.Tensor]) -> torch.Tensor:
        """Inverts ``columns``: returns codes uint8 ``[..., D]`` from every cell's bits."""
        planes = [torch.zeros_like(columns[0])] * PLANES
        for cell, bits in zip(self.cells, columns):
            for field in cell.fields:
                planes[field.plane] = (bits >> field.shift) & ((1 << field.width) - 1)
        return torch.cat(planes, dim=-1)


class PlaneParts(NamedTuple):
    """Byte offsets of a record's parts; ``end`` is the record's size."""

    k_cells: int
    v_cells: int
    k_gains: int
    v_gains: int
    end: int


@dataclass(frozen=True)
class PlaneFormat:
    """The record layout of a page of one KV head.

    Attributes:
        head_dim: D, one of ``HEAD_DIMS``, the same for keys and values.
        k, v: codes of keys and of values.

    Raises:
        KVQuantError: head_dim is not supported.
    """

    head_dim: int
    k: PlaneCode
    v: PlaneCode

    #: Constants in place of ``PageFormat``'s clipping: these rows are never clipped by rank.
    clip_k = clip_v = 1.0
    rank_k = rank_v = 0

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise KVQuantError(
                f"head_dim {self.head_dim} is not supported by --kv-quant. Supported: {', '.join(map(str, HEAD_DIMS))}."
            )

    @property
    def layout(self) -> PlaneFormat:
        """This format: equal for all formats with the same record layout."""
        return self

    @cached_property
    def parts(self) -> PlaneParts:
        bit = PAGE_SIZE * self.head_dim // PLANES // 8
        v_cells = self.k.total * bit
        k_gains = v_cells + self.v.total * bit
        return PlaneParts(0, v_cells, k_gains, k_gains + PAGE_SIZE, k_gains + 2 * PAGE_SIZE)

    @property
    def record_bytes(self) -> int:
        return self.parts.end

    @property
    def elements(self) -> int:
        """Number of keys' and values' elements in a record."""
        return 2 * PAGE_SIZE * self.head_dim

    @property
    def bits_per_element(self) -> float:
        """Allocated bits per stored element, gains included."""
        return self.record_bytes * 8 / self.elements

    def quantize_pages(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Quantizes whole pages, BF16 ``[..., PAGE_SIZE, head_dim]`` each, into uint8 ``[..., record_bytes]``."""
        (k_codes, k_gains), (v_codes, v_gains) = self.k.quantize(k), self.v.quantize(v)
        columns = [code.columns(x, cell) for code, x in ((self.k, k_codes), (self.v, v_codes)) for cell in code.cells]
        return self.join_tokens((*columns, k_gains[..., None], v_gains[..., None]))

    def dequantize_pages(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantizes records ``[..., record_bytes]`` to keys and values, float32 ``[..., PAGE_SIZE, head_dim]``."""
        *columns, k_gains, v_gains = self.split_tokens(records)
        cut = len(self.k.cells)
        return (
            self.k.dequantize(self.k.codes_of(columns[:cut]), k_gains[..., 0]),
            self.v.dequantize(self.v.codes_of(columns[cut:]), v_gains[..., 0]),
        )

    #: True: tokens share no stored data, see ``PageFormat.per_token``.
    per_token = True
    #: True: steps and widths suit typical tokens, but a sequence's first token is an outlier and would be clipped.
    keeps_first = True

    def check_per_token(self) -> None:
        """Does nothing: tokens can always move."""

    def split_tokens(self, records: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits records ``[..., record_bytes]`` into what each token stores: uint8 ``[..., PAGE_SIZE, n]`` each.

        The parts are the bits of K's cells and then V's, D / 4 columns each, and both gains. ``join_tokens`` is the
        inverse.
        """
        quarter, first, parts = self.head_dim // PLANES, 0, []
        for cell in self.k.cells:
            end = first + PAGE_SIZE * quarter * cell.bits // 8
            rows = _apart(records[..., first:end].unflatten(-1, (-1, quarter)), cell, -2)
            parts.append(rows[..., KEY_TOKENS.argsort(), :])
            first = end
        for cell in self.v.cells:
            end = first + PAGE_SIZE * quarter * cell.bits // 8
            turned = _apart(records[..., first:end].unflatten(-1, (-1, quarter, PAGE_SIZE // 4)), cell, -3)
            parts.append(turned.transpose(-1, -2).flatten(-3, -2))
            first = end
        at = self.parts
        return *parts, records[..., at.k_gains : at.v_gains, None], records[..., at.v_gains : at.end, None]

    def join_tokens(self, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Builds records ``[..., record_bytes]`` from parts of ``split_tokens``; tokens may come from any pages."""
        *columns, k_gains, v_gains = parts
        cut, stored = len(self.k.cells), []
        for cell, bits in zip(self.k.cells, columns[:cut]):
            rows = bits[..., KEY_TOKENS, :]  # [..., P, D / 4]
            stored.append(_together(rows, cell, -2).flatten(-2))
        for cell, bits in zip(self.v.cells, columns[cut:]):
            turned = bits.unflatten(-2, (4, -1)).transpose(-1, -2)  # [..., 4, D / 4, P / 4]
            stored.append(_together(turned, cell, -3).flatten(-3))
        return torch.cat([*stored, k_gains[..., 0], v_gains[..., 0]], dim=-1)


def _together(x: torch.Tensor, cell: Cell, dim: int) -> torch.Tensor:
    """Packs a cell's bits: joins those along ``dim`` that share a byte."""
    bytes = torch.zeros_like(x.narrow(dim, 0, x.shape[dim] // cell.shares))
    for n, part in enumerate(x.chunk(cell.shares, dim)):
        bytes = bytes | part << n * cell.bits
    return bytes


def _apart(bytes: torch.Tensor, cell: Cell, dim: int) -> torch.Tensor:
    """Inverts ``_together``."""
    return torch.cat([bytes >> n * cell.bits & (1 << cell.bits) - 1 for n in range(cell.shares)], dim)
