"""The predicted cost of budgets, for the chosen widths and as a lower bound."""

from dataclasses import replace
from math import log10

import pytest
import torch

from sglang_kvq.rotations.inspection.budgets import BUDGETS
from sglang_kvq.rotations.inspection.foreseen import foreseen, rate_at, weighted_energies
from sglang_kvq.rotations.maths.transform import DISTORTION, rate_distortion
from sglang_kvq.rotations.resolve import plane_formats
from tests.rotations.helpers import random_transform


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("decades", [0.5, 2.0, 6.0])
def test_no_budget_costs_less_than_the_bound(seed, decades):
    rotations = random_transform(layers=6, seed=seed, decades=decades)
    rows = foreseen(rotations)
    assert [row.budget for row in rows] == list(BUDGETS)
    for row in rows:
        assert 0 < row.bound < row.nats and row.bits <= row.budget
        assert 8 / 64 < row.gap_bits < row.budget  # at least the bits of the gain
        assert row.gap_db == pytest.approx(10 * log10(row.nats / row.bound)) and row.gap_db > 0
    bounds, nats = [row.bound for row in rows], [row.nats for row in rows]
    assert bounds == sorted(bounds, reverse=True) and nats == sorted(nats, reverse=True)


def test_the_foreseen_error_is_the_sum_over_channels():
    rotations = random_transform(layers=3)
    (row,) = foreseen(rotations, [2.5])
    total, importance = 0.0, rotations.meta.importance
    for layer, format in enumerate(plane_formats(rotations, 2.5)):
        for part, code, energies in (("k", format.k, rotations.k_energies), ("v", format.v, rotations.v_energies)):
            for head in range(2):
                for channel, energy in enumerate(energies[layer, head].tolist()):
                    total += importance[part][layer] * energy * DISTORTION[code.widths[channel // 16]]
    assert row.nats == pytest.approx(total, rel=1e-6)


def test_equal_channels_are_bound_by_a_rate_each():
    """If unequal bits gain nothing, R bits leave 4^-R of every channel."""
    rotations = random_transform(layers=2)
    one = torch.ones_like(rotations.k_energies)
    meta = replace(rotations.meta, importance={"k": [2.0, 2.0], "v": [2.0, 2.0]})
    even = replace(rotations, k_energies=one, v_energies=one, meta=meta)
    for row in foreseen(even):
        assert row.bound == pytest.approx(2 * 2 * one.numel() * 4.0**-row.budget)


def test_importance_counts_in_the_bound():
    rotations = random_transform(layers=2)
    twice = replace(
        rotations.meta, importance={part: [2 * x for x in xs] for part, xs in rotations.meta.importance.items()}
    )
    for one, two in zip(foreseen(rotations), foreseen(replace(rotations, meta=twice))):
        assert two.bound == pytest.approx(2 * one.bound) and two.gap_bits == pytest.approx(one.gap_bits)
    k, v = weighted_energies(rotations)
    assert k.shape == v.shape == (2, 2, 64)
    assert float(v[1, 0, 5]) == pytest.approx(rotations.meta.importance["v"][1] * float(rotations.v_energies[1, 0, 5]))


def test_rates_of_errors_are_the_inverse_of_errors_of_rates():
    energies = torch.logspace(2, -6, 500, dtype=torch.float64)
    rates = [0.01, 0.3, 1.0, 2.5, 6.0, 12.0]
    for rate, error in zip(rates, rate_distortion(energies, rates)):
        assert rate_at(energies, error) == pytest.approx(rate)
    assert rate_at(energies, 2 * float(energies.sum())) == 0.0
