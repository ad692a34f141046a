"""Requests that arrive from a prefill server at a server whose plans are made by kernels."""

from __future__ import annotations

import random

from tests.cache.arrivals import Pair
from tests.kernels.tier_twins import TwinTierManager
from tests.pairs import each, few


@each(seed=few(range(4), 2))
def test_random_schedules(seed):
    """Tables equal those of plans in torch, and every read of the decode server finds its tokens."""
    pair = Pair(random.Random(700 + seed), overlap=True, radix=seed % 2 == 0, manager=TwinTierManager)
    pair.run(40)
    assert pair.counts["arrived"] > 2 and pair.model.tiers.plans > 2, pair.counts
    pair.finish()
