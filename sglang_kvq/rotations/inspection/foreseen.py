"""Predicts transform coding's error at each budget, and compares it with the least error that any code could reach.

In the model of ``maths.transform``, a channel of energy e in a layer of importance a costs a·e·d nats at distortion d.
Reverse water-filling over all channels of all layers, keys and values together, gives a lower bound at R bits per
element, for independent Gaussian channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

import numpy as np
import torch

from sglang_kvq.rotations.base import Rotations
from sglang_kvq.rotations.inspection.budgets import BUDGETS
from sglang_kvq.rotations.maths.transform import coded_error, rate_distortion
from sglang_kvq.rotations.resolve import coding_parts, plane_formats


@dataclass(frozen=True)
class Foreseen:
    """Predicted error at one budget.

    Attributes:
        budget, bits: requested and allocated bits per element of the chosen widths.
        nats: predicted error of these widths, in nats per token if importances are measured.
        bound: least possible error of Gaussian channels at ``budget``, in the same units.
        gap_bits: ``budget`` minus the bits per element at which the bound equals ``nats``.
    """

    budget: float
    bits: float
    nats: float
    bound: float
    gap_bits: float

    @property
    def gap_db(self) -> float:
        """Ratio of the chosen widths' error to the bound, in dB."""
        return 10 * log10(self.nats / self.bound)


def foreseen(rotations: Rotations, budgets: Sequence[float] = BUDGETS) -> list[Foreseen]:
    """Returns, for each budget, the predicted error of the widths that a server would choose, and the bound."""
    weighted = weighted_energies(rotations)
    channels = torch.cat([x.flatten() for x in weighted])
    rows = []
    for budget, bound in zip(budgets, rate_distortion(channels, budgets)):
        formats = plane_formats(rotations, budget)
        widths = torch.tensor([f.k.widths for f in formats]), torch.tensor([f.v.widths for f in formats])
        nats = sum(float(coded_error(*part).sum()) for part in zip(weighted, widths))
        bits = sum(f.bits_per_element for f in formats) / len(formats)
        rows.append(Foreseen(budget, bits, nats, bound, budget - rate_at(channels, nats)))
    return rows


def weighted_energies(rotations: Rotations) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cost of losing each channel of keys and of values, float64 ``[layers, heads, D]`` each."""
    (k_energies, k_weights), (v_energies, v_weights) = coding_parts(rotations)
    return k_energies.double() * k_weights[:, None, None], v_energies.double() * v_weights[:, None, None]


def rate_at(energies: torch.Tensor, error: float) -> float:
    """Inverts ``rate_distortion``: returns the bits per channel at which Gaussian channels have this total error."""
    x = np.sort(energies.double().flatten().numpy())
    if error >= x.sum():
        return 0.0
    # If the water level is the n-th smallest energy, smaller channels lose all their energy, and others the level each.
    below = np.append(0.0, np.cumsum(x))[:-1]
    above = len(x) - np.arange(len(x))
    n = int(np.argmax(below + x * above >= error))
    level = (error - below[n]) / above[n]
    return float(np.log2(x[n:] / level).sum() / 2 / len(x))
