"""A code for eight values: points of the lattice E8 in a ball, as many as the bits can name.

With w bits per value there are 2^(8 w) names. E8 has 1, 240, 2160, ... points of squared length 0, 2, 4, ...; at 2 m
there are 240 times the sum of the cubes of m's divisors (Conway and Sloane, *Sphere Packings, Lattices and Groups*,
chapter 4). QuIP# (arXiv 2402.04396) uses such a code of 2 bits for weights. The assignment of names to points is left
open, which favors the code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from benchmarks.research.scalar.uniform import row_gain, with_best_gain

DIM = 8


@cache
def largest_norm(width: int) -> int:
    """Returns the largest squared length up to which all of E8's points have names of ``width`` bits per value."""
    names, points, m = 1 << (DIM * width), 1, 0
    while True:
        m += 1
        points += 240 * sum(d**3 for d in range(1, m + 1) if m % d == 0)
        if points > names:
            return 2 * (m - 1)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Returns the nearest points of E8 to ``[..., 8]``: the nearer of those in D8 and in D8 + 1/2."""
    a, b = _nearest_even(x), _nearest_even(x - 0.5) + 0.5
    closer = (x - a).square().sum(-1, keepdim=True) <= (x - b).square().sum(-1, keepdim=True)
    return torch.where(closer, a, b)


def _nearest_even(x: torch.Tensor) -> torch.Tensor:
    """Returns the nearest integers with an even sum: if the sum is odd, the worst rounding goes the other way."""
    rounded = x.round()
    left = x - rounded
    worst = left.abs().argmax(-1, keepdim=True)
    away = torch.where(left.gather(-1, worst) >= 0, 1.0, -1.0)
    other = rounded.scatter_add(-1, worst, away)
    return torch.where((rounded.sum(-1, keepdim=True) % 2).abs() < 0.5, rounded, other)


def in_ball(x: torch.Tensor, norm: int, tries: int = 40) -> torch.Tensor:
    """Returns points of E8 of squared length up to ``norm``: the nearest, or else the nearest to a shortened vector."""
    length = x.square().sum(-1, keepdim=True).sqrt()
    inside = x * (norm**0.5 / length.clamp(min=1e-9)).clamp(max=1.0)
    found = nearest(inside)
    for _ in range(tries):
        outside = found.square().sum(-1, keepdim=True) > norm + 0.5
        if not outside.any():
            break
        inside = torch.where(outside, inside * 0.96, inside)
        found = torch.where(outside, nearest(inside), found)
    return found


@dataclass(frozen=True)
class Lattice:
    """A coder of rows; groups of eight neighboring channels have equal widths. ``scales`` are by width."""

    scales: dict[int, float] = field(default_factory=dict)

    @classmethod
    def trained(cls, samples: torch.Tensor, most: int) -> Lattice:
        """Finds each width's scale of least squared error on rows ``[n, N]`` in units of their gain."""
        groups, scales = samples.reshape(-1, DIM), {}
        for width in range(1, most + 1):
            norm = largest_norm(width)
            base = (DIM / norm) ** 0.5
            tried = [base * 1.07**k for k in range(-4, 14)]
            errors = [float((groups - in_ball(groups / s, norm) * s).square().mean()) for s in tried]
            scales[width] = tried[errors.index(min(errors))]
        return cls(scales)

    def __call__(self, x: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
        gain, read = row_gain(x, widths), torch.zeros_like(x)
        groups = widths.view(-1, DIM)
        if not (groups == groups[:, :1]).all():
            raise ValueError("eight neighbouring channels need equal widths")
        for number, width in enumerate(groups[:, 0].tolist()):
            if width:
                part, scale = slice(number * DIM, (number + 1) * DIM), self.scales[width]
                read[:, part] = in_ball(x[:, part] / gain / scale, largest_norm(width)) * scale
        return with_best_gain(x, read)
