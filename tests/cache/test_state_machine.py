"""Any order of scheduler events keeps pool, tiers and tree true to a dictionary model."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_kvq.config import PAGE_SIZE as P
from tests.cache.scheduler_model import Model

#: Few distinct prompts, so that prefixes are shared, forked and duplicated.
prompts = st.tuples(st.integers(0, 2), st.integers(1, 9 * P))


def prompt_tokens(kind: int, length: int) -> list[int]:
    """Prompts of one kind are prefixes of each other; kinds 1 and 2 part at token 150."""
    return [i % 251 if kind == 0 or (kind == 1 and i < 150) else (i * kind + 5) % 241 for i in range(length)]


class Scheduler(RuleBasedStateMachine):
    @initialize(
        rows=st.integers(1, 4), sinks=st.integers(0, 2), recent=st.integers(1, 2), spare=st.integers(0, 6),
        pages=st.integers(14, 40),
    )
    def build(self, rows, sinks, recent, spare, pages):
        # One overlay per row beyond its window: every row may resume in the middle of a page.
        slots = rows * (sinks + recent + 2) + spare
        self.model = Model(pages, slots, rows, sinks, recent)
        self.prefilling, self.decoding = [], []

    def running(self):
        return self.prefilling + self.decoding

    def drop(self, request, publish):
        for group in (self.prefilling, self.decoding):
            if request in group:
                group.remove(request)
        self.model.leave(request, publish)

    @rule(prompt=prompts)
    def start(self, prompt):
        tokens = prompt_tokens(*prompt)
        if len(tokens) // P + 2 < self.model.pages:
            request = self.model.start(tokens)
            if request is not None:
                self.prefilling.append(request)

    @precondition(lambda self: self.prefilling)
    @rule(data=st.data(), count=st.integers(1, 4))
    def prefill(self, data, count):
        batch = []
        for request in self.prefilling[:count]:
            left = len(request.tokens) - request.stored
            batch.append((request, data.draw(st.integers(1, left), label="chunk")))
        before = [(r, r.stored) for r, _ in batch]
        if not self.model.extend(batch):
            # SGLang would not have admitted it: undo by retracting the whole batch.
            for request, stored in before:
                self.drop(request, publish=False)
            return
        for request, _ in batch:
            self.model.publish(request, finished=False)
            if request.stored == len(request.tokens):
                self.prefilling.remove(request)
                self.decoding.append(request)

    @precondition(lambda self: self.decoding)
    @rule(steps=st.integers(1, 70), token=st.integers(0, 3), padding=st.integers(0, 2))
    def decode(self, steps, token, padding):
        for _ in range(steps):
            for request in self.decoding:
                request.tokens.append(token)
            while self.decoding:
                free = len(self.model.free)
                needed = sum(r.stored % P == 0 for r in self.decoding)
                if needed > free:
                    self.model.evict(needed - free)
                if needed <= len(self.model.free):
                    break
                self.retract()
            if not self.decoding:
                return
            assert self.model.decode(self.decoding, padding)

    def retract(self):
        """As SGLang: pages and row are given back, the request starts again from its tokens later."""
        self.drop(self.decoding[-1], publish=False)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data):
        self.drop(data.draw(st.sampled_from(self.running())), publish=True)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def abort(self, data):
        self.drop(data.draw(st.sampled_from(self.running())), publish=False)

    @precondition(lambda self: self.decoding)
    @rule(data=st.data())
    def fork(self, data):
        """A new request with another's whole conversation and one more turn."""
        source = data.draw(st.sampled_from(self.decoding))
        extra = data.draw(st.integers(1, 100))
        if (len(source.tokens) + extra) // P + 2 < self.model.pages:
            request = self.model.start(source.tokens[: source.stored] + [9] * extra)
            if request is not None:
                self.prefilling.append(request)

    @rule(count=st.integers(1, 5))
    def evict(self, count):
        self.model.evict(count)

    @precondition(lambda self: not self.running())
    @rule()
    def flush(self):
        self.model.flush()

    @invariant()
    def consistent(self):
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self):
        if hasattr(self, "model"):
            for request in self.running():
                self.drop(request, publish=True)
            self.model.check_empty()


Scheduler.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestScheduler = pytest.mark.timeout(600)(Scheduler.TestCase)
