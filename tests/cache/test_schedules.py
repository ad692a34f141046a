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
    driver.run(160)
    driver.finish()
    assert driver.model.tiers.steps > 30 and int(driver.model.tiers.records_written) > 1
    assert driver.model.copied and driver.model.folded


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "in-flight"])
@pytest.mark.parametrize(("seed", "drafts"), [(0, 2), (1, 4), (2, 4), (3, 7), (4, 64)])
def test_random_schedules_with_drafts(seed, drafts, overlap):
    """Whatever is rejected, pages hold committed tokens once they are records, or belong to the tree."""
    rng = random.Random(200 + seed)
    driver = Driver(random_model(rng, overlap, look_every=4), rng, drafts=drafts)
    driver.run(90)
    driver.finish()
    assert driver.model.tiers.steps > 20 and int(driver.model.tiers.records_written) > 1
