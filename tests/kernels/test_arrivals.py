"""Requests that arrive from a prefill server at a server whose plans are made by kernels."""

from __future__ import annotations

import random

from sglang_kvq.cache.triton_tiers import TritonTierManager
from tests.sglang.disaggregation.test_handover import Pair


def test_random_schedules():
    """Every read of the decode server finds its tokens, as in ``tests/sglang/disaggregation/test_handover.py``."""
    pair = Pair(random.Random(703), overlap=True, manager=TritonTierManager)
    pair.run(40)
    assert pair.counts["arrived"] > 2, pair.counts
    pair.finish()
