"""Any order of scheduler events keeps pool, tiers and tree equal to a dictionary model."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_kvq.constants import PAGE_SIZE as P
from tests import pairs
from tests.cache.scheduler_model import PLANES, TWO_BITS, Model
from tests.cache.schedules import Driver


def prompt_tokens(kind: int, length: int) -> list[int]:
    """Returns a prompt of few distinct kinds, so that prefixes are shared, forked and duplicated.

    Prompts of one kind are prefixes of each other; kinds 0 and 1 differ from token 150 on.
    """
    return [i % 251 if kind == 0 or (kind == 1 and i < 150) else (i * kind + 5) % 241 for i in range(length)]


class Scheduler(RuleBasedStateMachine):
    @initialize(
        rows=st.integers(1, 4),
        sinks=st.integers(0, 2),
        recent=st.integers(1, 2),
        spare=st.integers(0, 6),
        pages=st.integers(14, 40),
        overlap=st.booleans(),
        drafts=st.sampled_from([1, 1, 2, 4, 9]),
        format=st.sampled_from([TWO_BITS, PLANES]),
        prefill_pages=st.sampled_from([0, 1, 5]),
        host=st.sampled_from([None, "write-through", "write-back"]),
        rng=st.randoms(use_true_random=False),
    )
    def build(self, rows, sinks, recent, spare, pages, overlap, drafts, format, prefill_pages, host, rng):
        # Each row has one BF16 page beyond its window, because it may resume in the middle of a page.
        slots = rows * (sinks + recent + 2) + spare
        more = {"overlap": overlap, "format": format, "prefill_pages": prefill_pages}
        model = Model(pages, slots, rows, sinks, recent, **more)
        if host is not None:
            model.add_host(pages + 5 * spare, rng, write_back=host == "write-back")
        self.driver = Driver(model, rng, drafts=drafts)

    def running(self):
        return self.driver.prefilling + self.driver.decoding

    @rule(kind=st.integers(0, 2), length=st.integers(1, 9 * P))
    def start(self, kind, length):
        self.driver.start(prompt_tokens(kind, length))

    @precondition(lambda self: self.driver.prefilling)
    @rule(count=st.integers(1, 4))
    def prefill(self, count):
        self.driver.prefill(self.driver.prefilling[:count])

    @precondition(lambda self: self.driver.decoding)
    @rule(steps=st.integers(1, 70), padding=st.integers(0, 2))
    def decode(self, steps, padding):
        for _ in range(steps):
            self.driver.decode(padding)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), publish=st.booleans())
    def leave(self, data, publish):
        self.driver.leave(data.draw(st.sampled_from(self.running())), publish)

    @precondition(lambda self: self.driver.decoding)
    @rule(data=st.data(), extra=st.integers(1, 100))
    def fork(self, data, extra):
        """Starts a request with another's whole conversation and one more turn."""
        source = data.draw(st.sampled_from(self.driver.decoding))
        self.driver.start(source.tokens[: source.stored] + [9] * extra)

    @rule()
    def select(self):
        """Starts a request with some pages from the tree."""
        self.driver.select()

    @precondition(lambda self: self.running())
    @rule(data=st.data(), publish=st.booleans())
    def fold(self, data, publish):
        """Ends a request, and starts one that goes on from some of its tokens."""
        self.driver.fold(data.draw(st.sampled_from(self.running())), publish)

    @rule(count=st.integers(1, 5))
    def evict(self, count):
        self.driver.evict(count)

    @rule()
    def submit_backups(self):
        """Submits backups before the results of a batch are processed; usually that happens at their end."""
        self.driver.model.submit_backups()

    @rule()
    def land(self):
        """Lets the device catch up with the host."""
        self.driver.model.land()

    @precondition(lambda self: not self.running())
    @rule()
    def flush(self):
        self.driver.model.flush()

    @invariant()
    def consistent(self):
        if hasattr(self, "driver"):
            self.driver.model.check()

    def teardown(self):
        if hasattr(self, "driver"):
            for request in self.running():
                self.driver.leave(request, publish=True)
            self.driver.model.check_empty()


Scheduler.TestCase.settings = settings(
    max_examples=60 if pairs.everything else 15,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestScheduler = pytest.mark.timeout(600)(Scheduler.TestCase)
