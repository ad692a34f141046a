"""Compile-time properties of a record: one constant argument instead of twenty.

Triton's caches of compiled kernels are keyed by a ``Record``'s printed form, with all attributes. Formats that differ
only in clipping share one record, and so one kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PLANES, Cell, PlaneCode, PlaneFormat, Widths


@dataclass(frozen=True)
class Codes:
    """Keys or values of a record.

    Attributes:
        bits, statistic: as in ``CodeFormat``; channel: True if the code's axis is a channel.
        levels: ``LevelTable.levels``; uniform: True if they are 0, 1, 2, ...
        group: elements that share a scale, along head_dim, or along tokens for a channel.
        has_offset, clips, centred: as in ``CodeFormat``.
        factor: float32 that converts the statistic to the scale (``formats.quantize``); inverse: float32 1 / group.
        low, high, scale, offset, mean: start of each in the record, in bytes.
    """

    bits: int
    statistic: str
    channel: bool
    levels: tuple[int, ...]
    uniform: bool
    group: int
    has_offset: bool
    clips: bool
    centred: bool
    factor: float
    inverse: float
    low: int
    high: int
    scale: int
    offset: int
    mean: int

    @property
    def middle(self) -> float:
        return self.levels[-1] / 2

    @property
    def shift(self) -> float:
        """Constant subtracted from every level: levels without an offset are centred on 0."""
        return 0.0 if self.has_offset else self.middle

    @property
    def runs(self) -> int:
        """Number of scales that a channel has in a page."""
        return PAGE_SIZE // self.group

    @property
    def thresholds(self) -> int:
        return len(self.levels) - 1


@dataclass(frozen=True, eq=False)  # one object per format (record_of): launches find kernels by identity
class Record:
    """A record of ``bytes`` bytes; ``page``: see ``page_bytes``."""

    k: Codes
    v: Codes
    bytes: int
    page: int


@dataclass(frozen=True)
class PlaneCodes:
    """Keys or values of a ``PlaneRecord``.

    Attributes:
        widths, cells: as in ``PlaneCode``.
        starts: start of each cell in the record, in bytes; gains: start of the gains.
    """

    widths: Widths
    cells: tuple[Cell, ...]
    starts: tuple[int, ...]
    gains: int

    @property
    def cap(self) -> float:
        """``PlaneCode.cap``."""
        return PlaneCode(self.widths).cap


@dataclass(frozen=True, eq=False)
class PlaneRecord:
    """A record of ``formats.planes``, of ``bytes`` bytes; ``page``: see ``page_bytes``."""

    k: PlaneCodes
    v: PlaneCodes
    bytes: int
    page: int


@cache
def record_of(format: PageFormat | PlaneFormat, page: int = 0) -> Record | PlaneRecord:
    """Returns the constants of a format; the same object for formats that only clip differently.

    page: bytes from a page's records in a layer to the next page's; 0 if these are adjacent.
    """
    if isinstance(format, PlaneFormat):
        planes = format.parts
        return PlaneRecord(
            _plane_codes(format.k, format.head_dim, planes.k_cells, planes.k_gains),
            _plane_codes(format.v, format.head_dim, planes.v_cells, planes.v_gains),
            planes.end,
            page,
        )
    if format.layout != format:
        return record_of(format.layout, page)
    at = format.parts
    return Record(
        _codes(format, format.k, at.k_low, at.k_high, at.k_scale, at.k_offset, at.k_mean),
        _codes(format, format.v, at.v_low, at.v_high, at.v_scale, at.v_offset, at.end),
        at.end,
        page,
    )


@triton.constexpr_function
def page_bytes(record, kv_heads):
    """Returns the bytes from a page's records in a layer to the next page's."""
    return record.page or kv_heads * record.bytes


def _plane_codes(code: PlaneCode, head_dim: int, first: int, gains: int) -> PlaneCodes:
    sizes = [PAGE_SIZE * head_dim // PLANES * cell.bits // 8 for cell in code.cells]
    starts = tuple(first + sum(sizes[:n]) for n in range(len(sizes)))
    return PlaneCodes(code.widths, code.cells, starts, gains)


def _codes(format: PageFormat, code: CodeFormat, low: int, high: int, scale: int, offset: int, mean: int) -> Codes:
    table, n = code.table(format.head_dim), format.group_of(code)
    factor = {"minmax": 1 / table.top, "moments": table.unit / n, "norm": table.unit / math.sqrt(n)}[code.statistic]
    return Codes(
        bits=code.bits,
        statistic=code.statistic,
        channel=code.axis == "channel",
        levels=table.levels,
        uniform=table.levels == tuple(range(2**code.bits)),
        group=n,
        has_offset=code.has_offset,
        clips=code.clips,
        centred=code.centred,
        factor=_f32(factor),
        inverse=_f32(1 / n),
        low=low,
        high=high,
        scale=scale,
        offset=offset,
        mean=mean,
    )


def _f32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


@triton.constexpr_function
def words_between(a, b):
    """Returns the distance from one part of a record to another, in words."""
    return (b - a) // 4


@triton.constexpr_function
def bound(codes, i):
    """Returns the threshold between levels i and i + 1, in scales from the offset."""
    return (codes.levels[i] + codes.levels[i + 1]) / 2 - codes.shift


@triton.constexpr_function
def table_of(codes):
    """Returns levels as bytes of a word: all, or the lower eight of sixteen; symmetry gives the upper ones."""
    return sum(level << 8 * i for i, level in enumerate(codes.levels[:8]))


@triton.jit
def level_of(code, CODES: tl.constexpr):
    """Looks up the levels of codes; both are int32."""
    if CODES.uniform:
        return code
    elif CODES.bits == 2:
        return (table_of(CODES) >> (8 * code)) & 0xFF
    else:
        upper = code > 7
        table = tl.full(code.shape, table_of(CODES), tl.int64)
        level = (table >> (8 * tl.where(upper, 15 - code, code)).to(tl.int64)).to(tl.int32) & 0xFF
        return tl.where(upper, CODES.levels[-1] - level, level)
