"""GEAR (Kang et al., arXiv 2403.05527): quantized codes, plus a low-rank matrix, plus separate outliers.

    S = outliers(X),  C = quantize(X - S),  L = rank-r approximation of X - S - C,  X ~ C + L + S

Keys are quantized per channel and values per token, over ``group`` elements or all (the paper's KCVT). In each such
vector, the share ``outliers`` is stored exactly with indices: half largest, half smallest elements. L belongs to one
head. Elements in S do not stretch the scale, which favors the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from benchmarks.research.families.base import INDEX, NUMBER, SCALE, History, Stored, uniform


@dataclass(frozen=True)
class Gear:
    """One setting: ``width`` bits per code, ``rank`` of L, the share of outliers, and elements per scale (0: all)."""

    width: int
    rank: int
    outliers: float
    group: int = 0

    def __call__(self, layer: int, history: History) -> Stored:
        heads, n, dim = history.k.shape
        rows = history.v.transpose(1, 2).reshape(1, heads * dim, n)  # a token's values of all heads share scales
        k_read, k_bits = self._codes(history.k)
        v_read, v_bits = self._codes(rows)
        k, low_k = self._with_low_rank(history.k, *k_read)
        v, low_v = self._with_low_rank(history.v.transpose(1, 2), *(x.view(heads, dim, n) for x in v_read))
        return Stored(k, v.transpose(1, 2), k_bits + v_bits + low_k + low_v)

    def _codes(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], float]:
        """Quantizes ``[m, a, b]`` with scales along a: returns codes' values, a mask of outliers, and bits."""
        each = int(x.shape[1] * self.outliers / 2)
        apart = torch.zeros_like(x, dtype=torch.bool)
        if each:
            for largest in (True, False):
                apart.scatter_(1, x.topk(each, dim=1, largest=largest).indices, True)
        group = _group(self.group, x.shape[1])
        parts = [y.unflatten(1, (-1, group)) for y in (x, ~apart)]
        codes = uniform(parts[0], self.width, 2, parts[1]).flatten(1, 2)
        return (codes, apart), x.numel() * self.width + x.numel() // group * 2 * SCALE + int(apart.sum()) * (
            NUMBER + INDEX
        )

    def _with_low_rank(self, x: torch.Tensor, codes: torch.Tensor, apart: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Adds L to the values read of ``[heads, a, b]``; returns the sum, and L's bits."""
        left = torch.where(apart, 0.0, x - codes)
        u, s, vh = torch.linalg.svd(left, full_matrices=False)
        low = (u[..., : self.rank] * s[:, None, : self.rank]).half().float() @ vh[:, : self.rank].half().float()
        return torch.where(apart, x, codes + low), len(x) * self.rank * (x.shape[1] + x.shape[2]) * NUMBER


def _group(group: int, length: int) -> int:
    return group if group and length % group == 0 else length


def settings(budget: float, sample: History) -> list[Gear]:
    """Returns the settings of at most ``budget`` bits per element of such a history; all have a low-rank part."""
    grid = product((1, 2, 3), (1, 2, 3, 4, 6, 8), (0.0, 0.005, 0.01, 0.02), (0, 64))
    return [gear for one in grid if size(gear := Gear(*one), sample) <= budget]


def size(gear: Gear, sample: History) -> float:
    """Counts bits per element of a history without coding it."""
    heads, n, dim = sample.k.shape
    total = 2 * heads * gear.rank * (n + dim) * NUMBER
    for m, a, b in ((heads, n, dim), (1, heads * dim, n)):
        total += m * a * b * (gear.width + 2 * SCALE / _group(gear.group, a))
        total += m * b * 2 * int(a * gear.outliers / 2) * (NUMBER + INDEX)
    return total / sample.elements
