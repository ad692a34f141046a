"""Long random schedules keep pool, tiers and tree true to the dictionary model."""

from __future__ import annotations

import random

import pytest

from tests.cache.scheduler_model import Model
from tests.cache.schedules import drive


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(seed):
    rng = random.Random(100 + seed)
    rows, sinks, recent = rng.randint(1, 4), seed % 3, rng.randint(1, 3)
    slots = rows * (sinks + recent + 2) + rng.randint(0, 6)
    model = Model(rng.randint(30, 60), slots, rows, sinks, recent)
    drive(model, rng, 120)
    assert model.tiers.steps > 30 and int(model.tiers.records_written) > 5
