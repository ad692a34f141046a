"""Scalar codes: the product's uniform levels for widths of any channels, and trained levels (Lloyd 1982, Max 1960)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang_kvq.formats.planes import BELOW, gain_bytes, gains_of
from sglang_kvq.rotations.maths.transform import STEPS


def uniform(x: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """Codes rows ``[n, D]`` as ``formats.planes`` does, without its FP16 arithmetic; takes the better of two gains."""
    steps = torch.tensor(STEPS)[widths]
    z, coded = x / steps, widths > 0
    half = 2.0 ** (widths - 1)
    first = gain_bytes(((z.abs() / half) * coded).amax(-1).clamp(min=2.0**-16))
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    for number in (first, (first.int() - BELOW).clamp(min=0)):
        gain = gains_of(number)[:, None]
        read = (((z / gain).floor().maximum(-half).minimum(half - 1)) + 0.5) * gain * coded
        error = ((z - read) * coded).square().sum(-1, keepdim=True)
        if best is None:
            best = read, error
        else:
            best = torch.where(error < best[1], read, best[0]), torch.minimum(error, best[1])
    assert best is not None
    return best[0] * steps


@dataclass(frozen=True)
class TwoGains:
    """``uniform`` with one gain for the widest channels and one for the other coded ones."""

    def __call__(self, x: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        coded = int((widths > 0).sum())
        cut = min(max(int((widths == widths.max()).sum()), coded // 4), coded - 1)
        order = widths.argsort(descending=True, stable=True)
        first, rest = order[:cut], order[cut:]
        read = torch.zeros_like(x)
        read[:, first] = uniform(x[:, first], widths[first])
        read[:, rest] = uniform(x[:, rest], widths[rest])
        return read


def row_gain(x: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """Returns the 8-bit gain next above the root mean square of a row's coded channels: ``[n, 1]``."""
    coded = widths > 0
    mean = (x.square() * coded).sum(-1) / coded.sum().clamp(min=1)
    return gains_of(gain_bytes(mean.sqrt().clamp(min=2.0**-16)))[:, None]


def with_best_gain(x: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """Returns rows ``[n, D]`` coded as ``units`` as they are read: times the 8-bit gain nearest to the best one."""
    squares = units.square().sum(-1, keepdim=True).clamp(min=1e-12)
    best = ((x * units).sum(-1, keepdim=True) / squares).clamp(min=2.0**-16)
    above = gain_bytes(best)
    below = (above.int() - 1).clamp(min=0)
    pair = torch.stack([gains_of(above), gains_of(below)])
    nearest = (pair - best).abs().argmin(0, keepdim=True)
    return units * pair.gather(0, nearest)[0]


@dataclass(frozen=True)
class Levels:
    """Levels trained for each width, relative to the row's root mean square; trellises are compared with them."""

    tables: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def trained(cls, samples: torch.Tensor, most: int, rounds: int = 30) -> Levels:
        """Trains levels for 1 to ``most`` bits on numbers ``[n]`` in units of their row's gain."""
        tables = {}
        for width in range(1, most + 1):
            at = (torch.arange(2**width) + 0.5) / 2**width
            levels = samples.quantile(at)
            for _ in range(rounds):
                nearest = torch.bucketize(samples, (levels[1:] + levels[:-1]) / 2)
                sums = torch.zeros_like(levels).index_add_(0, nearest, samples)
                counts = torch.zeros_like(levels).index_add_(0, nearest, torch.ones_like(samples))
                levels = torch.where(counts > 0, sums / counts.clamp(min=1), levels)
            tables[width] = levels
        return cls(tables)

    def __call__(self, x: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        gain = row_gain(x, widths)
        z, read = x / gain, torch.zeros_like(x)
        for width, levels in self.tables.items():
            at = (widths == width).nonzero()[:, 0]
            if len(at):
                read[:, at] = levels[torch.bucketize(z[:, at].contiguous(), (levels[1:] + levels[:-1]) / 2)]
        return with_best_gain(x, read)
