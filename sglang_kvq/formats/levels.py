"""Tables of reconstruction levels: small integers, so that every path compares and multiplies exactly.

    value = level[code] * scale + offset,    code = #{t : x > offset + t * scale},    t = midpoints of levels

Levels are integers below 256 and thresholds are multiples of 0.5: their products with an FP16 scale are exact in
float32. Non-uniform levels are the Lloyd-Max levels of a density (Max, "Quantizing for minimum distortion", 1960). They
are rounded to the coarsest integers that add less than ``TOLERANCE`` to the distortion. They are symmetric about an
integer and at most 127 from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

#: Names of the tables, see ``level_table``.
LEVELS = ("uniform", "lloyd-max", "sphere")

#: Relative distortion that rounding levels to integers may add.
TOLERANCE = 1e-3

_POINTS = 1 << 14


@dataclass(frozen=True)
class LevelTable:
    """Levels, and their scale for a source of mean 0 and variance 1.

    Attributes:
        levels: ascending integers from 0, ``levels[i] + levels[-1 - i] == levels[-1]``.
        unit: scale of least mean squared error at variance 1, times the gain. The density is the one that the levels
            are optimal for, or a Gaussian for uniform levels. The scale is rounded to 12 significant bits, because the
            last bits may differ between math libraries.
        distortion: mean squared error at that scale.
    """

    levels: tuple[int, ...]
    unit: float
    distortion: float

    @property
    def top(self) -> int:
        return self.levels[-1]

    @property
    def middle(self) -> float:
        """Center of symmetry: an integer, or a half-integer for uniform levels."""
        return self.top / 2

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Midpoints of neighboring levels, multiples of 0.5. A value on a midpoint takes the lower code."""
        return tuple((a + b) / 2 for a, b in zip(self.levels, self.levels[1:]))


@cache
def level_table(levels: str, bits: int, head_dim: int, gain: float = 1.0) -> LevelTable:
    """Returns the table of 2^bits levels; ``gain`` multiplies its unit.

    ``uniform`` is 0, 1, 2, ... ``lloyd-max`` is optimal for a Gaussian. ``sphere`` is optimal for sqrt(D) times one
    coordinate of a uniform point on the unit sphere of R^D, with D = head_dim. Its density is
    (1 - x^2 / D)^((D - 3) / 2). Every coordinate of a randomly rotated vector follows it (TurboQuant, arXiv
    2504.19874, lemma 1).
    """
    density = _sphere(head_dim) if levels == "sphere" else _gaussian()
    if gain != 1.0:
        table = level_table(levels, bits, head_dim)
        unit = _short(table.unit * gain)
        return LevelTable(table.levels, unit, _distortion(unit * (np.array(table.levels) - table.middle), density))
    if levels == "uniform":
        return _table(np.arange(2**bits), density)
    exact = _lloyd(2**bits, density)
    best = _distortion(exact, density)
    upper = exact[len(exact) // 2 :] / exact[-1]
    for reach in range(2 ** (bits - 1), 128):
        half = np.rint(upper * reach).astype(int)
        if half[0] == 0 or (np.diff(half) <= 0).any():
            continue
        table = _table(np.concatenate([reach - half[::-1], reach + half]), density)
        if table.distortion <= best * (1 + TOLERANCE):
            return table
    raise AssertionError(f"no integer levels within int8 for {levels} at {bits} bits")


class _Density:
    """A symmetric density of variance 1 on a grid; interpolates its mass and first moment below any point."""

    def __init__(self, reach: float, log_density: Callable[[np.ndarray], np.ndarray]) -> None:
        edges = np.linspace(-reach, reach, _POINTS + 1)
        x = (edges[1:] + edges[:-1]) / 2
        mass = np.exp(log_density(x))
        mass /= mass.sum()
        self.variance = float((mass * x * x).sum())
        self._edges = edges
        self._below = [np.concatenate([[0.0], np.cumsum(mass * power)]) for power in (np.ones_like(x), x)]

    def cells(self, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns mass and first moment between neighboring thresholds, the outer cells included."""
        t = np.concatenate([[self._edges[0]], thresholds, [self._edges[-1]]])
        return tuple(np.diff(np.interp(t, self._edges, below)) for below in self._below)


@cache
def _gaussian() -> _Density:
    return _Density(8.0, lambda x: -0.5 * x * x)


@cache
def _sphere(d: int) -> _Density:
    return _Density(min(8.0, math.sqrt(d)), lambda x: 0.5 * (d - 3) * np.log1p(-x * x / d))


def _lloyd(count: int, density: _Density) -> np.ndarray:
    """Runs Lloyd's iteration to convergence: thresholds become midpoints, levels become the cells' means."""
    levels = np.linspace(-2.0, 2.0, count)
    for _ in range(5000):
        mass, moment = density.cells((levels[1:] + levels[:-1]) / 2)
        levels, previous = moment / mass, levels
        if np.abs(levels - previous).max() < 1e-10:
            break
    return (levels - levels[::-1]) / 2


def _distortion(values: np.ndarray, density: _Density) -> float:
    """Returns the mean squared error of rounding to the nearest of ``values``."""
    mass, moment = density.cells((values[1:] + values[:-1]) / 2)
    return float(density.variance - 2 * (values * moment).sum() + (values**2 * mass).sum())


def _table(levels: np.ndarray, density: _Density) -> LevelTable:
    """Finds the best unit for these levels by Lloyd's iteration on the unit alone."""
    centred, unit = levels - levels[-1] / 2, 4.0 / levels[-1]
    for _ in range(1000):
        mass, moment = density.cells(unit * (centred[1:] + centred[:-1]) / 2)
        unit, previous = float((centred * moment).sum() / (centred**2 * mass).sum()), unit
        if abs(unit - previous) < 1e-12:
            break
    unit = _short(unit)
    return LevelTable(tuple(int(x) for x in levels), unit, _distortion(unit * centred, density))


def _short(x: float) -> float:
    """Rounds x to 12 significant bits."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 4096), exponent - 12)
