"""Long random schedules keep pool, tiers and tree true to the dictionary model."""

from __future__ import annotations

import random

import pytest

from tests.cache.schedules import Driver, random_model


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "in-flight"])
@pytest.mark.parametrize("seed", range(6))
def test_random_schedules(seed, overlap):
    rng = random.Random(100 + seed)
    driver = Driver(random_model(rng, overlap), rng)
    driver.run(120)
    driver.finish()
    assert driver.model.tiers.steps > 30 and int(driver.model.tiers.records_written) > 5
    assert driver.model.copied
