"""The scheduler's state machine of tests/cache over tiers that are planned by kernels, in the interpreter."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from sglang_kvq.kernels import events, overlays, ranges
from tests.cache.test_state_machine import Scheduler
from tests.kernels.conftest import ON_GPU
from tests.kernels.tier_twins import TwinTierManager


class KernelScheduler(Scheduler):
    manager = TwinTierManager


KernelScheduler.TestCase.settings = settings(
    max_examples=6, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.skipif(ON_GPU, reason="the model of the scheduler is on the CPU; test_tier_plan runs on both")
class TestKernelScheduler(KernelScheduler.TestCase):
    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that every loop turns more than once."""
        monkeypatch.setattr(overlays, "_ELEMENTS", 16)
        monkeypatch.setattr(ranges, "_PAGES", 4)
        monkeypatch.setattr(events, "_BLOCK", 4)
