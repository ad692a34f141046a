"""What transform coding is foreseen to cost a model at each budget, beside the least that any code could.

By the model of ``maths.transform`` a channel of energy e in a layer of importance a costs a e d nats when it is coded
with distortion d. Over all channels of all layers, keys and values together, no code of R bits per element costs less
than reverse water-filling gives, if the channels are independent and Gaussian; with the same energies all others can be
coded in fewer. What is between has three parts: scalar quantizers instead of long vectors (0.25 bits, 1.5 dB, at high
rates), a gain for each row, and widths that are whole bits, at most 6, for a quarter of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

import numpy as np
import torch

from sglang_kvq.formats.planes import PlaneCode
from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.inspection.budgets import BUDGETS
from sglang_kvq.rotations.maths.transform import DISTORTION, plane_energies, rate_distortion
from sglang_kvq.rotations.resolve import plane_formats


@dataclass(frozen=True)
class Foreseen:
    """One budget.

    Attributes:
        budget: allocated bits per element asked for.
        bits: those of the widths chosen.
        nats: foreseen of these; nats per token where importances are measured, else in units of their own.
        bound: the least possible at ``budget``, in the same units, for Gaussian channels.
        gap_bits: by how many bits per element fewer than ``budget`` the bound is where ``nats`` are.
    """

    budget: float
    bits: float
    nats: float
    bound: float
    gap_bits: float

    @property
    def gap_db(self) -> float:
        """By how much the chosen widths' error is larger than the bound."""
        return 10 * log10(self.nats / self.bound)


def foreseen(rotations: Rotations, budgets: Sequence[float] = BUDGETS) -> list[Foreseen]:
    """Each budget's widths as a server would choose them, and the bound.

    Args:
        rotations: for transform coding.
    """
    weighted = weighted_energies(rotations)
    channels = torch.cat([x.flatten() for x in weighted])
    rows = []
    for budget, bound in zip(budgets, rate_distortion(channels, budgets)):
        formats = plane_formats(rotations, budget)
        codes = ([f.k for f in formats], [f.v for f in formats])
        nats = sum(_error(energies, code) for energies, code in zip(weighted, codes))
        bits = sum(f.bits_per_element for f in formats) / len(formats)
        rows.append(Foreseen(budget, bits, nats, bound, budget - rate_at(channels, nats)))
    return rows


def weighted_energies(rotations: Rotations) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys and of values, float64 ``[layers, heads, D]``: what losing each channel costs."""
    importance = rotations.meta.importance
    if rotations.k_energies is None or rotations.v_energies is None or importance is None:
        raise ValueError("transform coding has energies and importances")
    k, v = (
        energies.double() * torch.tensor(importance[part], dtype=torch.float64)[:, None, None]
        for part, energies in (("k", rotations.k_energies), ("v", rotations.v_energies))
    )
    return k, v


def rate_at(energies: torch.Tensor, error: float) -> float:
    """``rate_distortion``'s inverse: bits per channel with which Gaussian channels have this error in sum.

    Args:
        energies: of any shape, positive.
        error: positive; from the sum of energies on no bits are needed.
    """
    x = np.sort(energies.double().flatten().numpy())
    if error >= x.sum():
        return 0.0
    # Below the n-th smallest as water level, those under it lose all of themselves and the others the level each.
    below = np.append(0.0, np.cumsum(x))[:-1]
    above = len(x) - np.arange(len(x))
    n = int(np.argmax(below + x * above >= error))
    level = (error - below[n]) / above[n]
    return float(np.log2(x[n:] / level).sum() / 2 / len(x))


def _error(energies: torch.Tensor, codes: Sequence[PlaneCode]) -> float:
    """Of each layer's code on its channels ``[layers, heads, D]``, all together."""
    distortion = torch.tensor(DISTORTION, dtype=torch.float64)[torch.tensor([code.widths for code in codes])]
    return float((plane_energies(energies).sum(1) * distortion).sum())
