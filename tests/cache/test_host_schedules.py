"""With host memory and random schedules, every page holds what it must, whatever happens while copies are in progress.

The faults at the end of this file show that the schedules find orders which would corrupt a cache only now and then.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from sglang_kvq.cache import sink_token_cache
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from tests.cache.host_model import Host
from tests.cache.scheduler_model import PLANES, Model
from tests.cache.schedules import OVERLAP, Returning, converse, random_model, shared_model
from tests.pairs import each

POLICIES = {"write-through": False, "write-back": True}


def hosted(rng: random.Random, write_back: bool, overlap: bool = True, **more) -> Model:
    """Returns a model with a pool under pressure, and a host with half to twice as many pages."""
    model = random_model(rng, overlap, **more)
    return model.add_host(rng.randint(model.pages // 2, 2 * model.pages), rng, write_back=write_back)


def run(seed: int, write_back: bool, overlap: bool, events: int = 80, drafts: int = 1, **more) -> Model:
    rng = random.Random(seed)
    driver = Returning(hosted(rng, write_back, overlap, **more), rng, drafts=drafts)
    driver.run(events)
    driver.finish()
    assert int(driver.model.tiers.errors) == 0
    return driver.model


@pytest.mark.parametrize("write_back", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("overlap", OVERLAP.values(), ids=OVERLAP)
def test_random_schedules(overlap, write_back):
    """Loads and backups overlap with copies, folds, evictions, flushes, and requests that leave early."""
    seed = {(False, False): 700, (True, False): 702, (False, True): 703, (True, True): 707}[overlap, write_back]
    model = run(seed, write_back, overlap)
    assert model.host.loads > 30 and model.host.backups > 30
    assert model.copied and model.folded
    assert model.host.aborted or not overlap


def run_shared(seed: int, write_back: bool, overlap: bool, events: int = 80, **more) -> Model:
    """Runs a schedule in which pages of a shared memory move while others are copied to and from the host."""
    rng = random.Random(seed)
    model = shared_model(rng, overlap=overlap, rows=rng.randint(2, 3), room=3, **more)
    model.add_host(rng.randint(model.pages // 2, 2 * model.pages), rng, write_back=write_back, soon=0.05)
    driver = Returning(model, rng)
    driver.run(events)
    driver.finish()
    assert int(model.tiers.errors) == 0
    return model


@pytest.mark.parametrize("write_back", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("overlap", OVERLAP.values(), ids=OVERLAP)
def test_random_schedules_of_a_shared_memory(overlap, write_back):
    model = run_shared(508 if write_back and overlap else 505, write_back, overlap)
    assert model.host.loads > 10 and model.host.backups > 30
    assert model.moved > 20 and model.host.waited
    assert model.copied and model.folded


def test_moves_that_do_not_wait_for_copies_are_found(monkeypatch):
    monkeypatch.setattr(Host, "wait_for_copies", never)

    def fails(seed: int) -> bool:
        try:
            run_shared(1000 + seed, seed % 2 == 0, seed % 4 < 2, 60)
        except (AssertionError, RuntimeError):
            return True
        return False

    assert any(fails(seed) for seed in range(12))


@each(drafts=[2, 7], write_back=POLICIES)
def test_random_schedules_with_drafts(drafts, write_back):
    model = run(800 + drafts, write_back, True, 60, drafts)
    assert model.host.loads and model.host.backups


@each(write_back=POLICIES, overlap=OVERLAP)
def test_random_conversations_keep_first_tokens(write_back, overlap, monkeypatch):
    """A first page that comes from the host has its first token from the record; other first pages keep theirs."""
    monkeypatch.setattr(sink_token_cache, "PAGES_PER_ENTRY", 8)
    rng = random.Random(900 + write_back)
    model = Model(40, 2 * 3 + 1, 2, 1, 1, overlap=overlap, format=PLANES).add_host(60, rng, write_back=write_back)
    converse(model, rng, 40)
    assert model.host.loads and model.restored


def never(*_) -> None:
    """Does nothing."""


def evicted(write_back: bool) -> tuple[Model, list[int]]:
    """Returns a model in which only the host has the six whole pages of a prompt, and the prompt."""
    rng = random.Random(0)
    model = Model(20, 9, 2, 1, 2, overlap=True).add_host(20, rng, write_back=write_back)
    tokens = [i % 97 for i in range(6 * P + 5)]
    request = model.start(tokens)
    assert model.extend([(request, len(tokens))])
    model.land()
    model.leave(request, publish=True)
    model.submit_backups()
    model.host.settle()
    model.evict(20)
    assert not model.tree and len(model.host.held) == 6
    rng.random = lambda: 0.5  # always load, and late
    return model, tokens


@pytest.mark.parametrize("write_back", POLICIES.values(), ids=POLICIES)
def test_a_prefix_that_was_evicted_comes_back_from_the_host(write_back):
    model, tokens = evicted(write_back)
    again = model.start(tokens)
    assert again.stored == 6 * P
    assert model.extend([(again, 5)])  # reads all of it and compares
    model.land()
    again.tokens.append(3)
    assert model.decode([again])
    model.land()
    model.leave(again, publish=False)
    model.check_empty()
    assert model.host.loads == 6


@pytest.mark.parametrize("waits", [True, False])
def test_a_plan_that_copies_pages_waits_for_their_load(waits, monkeypatch):
    """Chosen pages are copied by the next plan, before any layer waits for a load."""
    if not waits:
        monkeypatch.setattr(Host, "before_plan", never)
    model, tokens = evicted(write_back=False)
    loading = model.start(tokens)
    chosen = model.select(tuple(tokens[: 6 * P]), [1, 3], [5] * 9)
    with contextlib.nullcontext() if waits else pytest.raises(AssertionError):
        assert loading.stored and chosen.stored == 2 * P
        assert model.extend([(chosen, 9)])  # reads the copies and compares
        model.land()


def test_a_prefix_whose_load_is_queued_is_inserted_by_another_request_only_after_the_load():
    """SGLang queues a load only for its next batch, so no request is given equal pages of the tree that are to come."""
    model, tokens = evicted(write_back=False)
    model.host.rng.random = lambda: 0.1  # no load for the first
    own = model.start(tokens)
    assert not own.stored and model.extend([(own, len(tokens))])
    model.host.rng.random = lambda: 0.5
    assert model.start(tokens).stored == 6 * P and model.host.to_load
    model.publish(own, finished=False)
    model.check()
    own.tokens.append(3)
    assert model.decode([own])  # reads the tree's pages and compares
    model.land()


class NothingFirst(TierManager):
    """A faulty manager: events are still pending when pages are copied."""

    def _apply_for_copy(self, what: str, ids: torch.Tensor) -> torch.Tensor:
        return self.pages_of(ids)


class Late(TierManager):
    """A faulty manager that does some work only after the next plan."""

    def _set_up(self) -> None:
        super()._set_up()
        self.later = []

    def _plan(self, *batch) -> None:
        super()._plan(*batch)
        later, self.later = self.later, []
        for work, pages in later:
            work(self, pages)


class LateMarks(Late):
    """A faulty manager: loaded pages count as quantized only after the next plan."""

    def before_load(self, ids: torch.Tensor) -> None:
        pages = self._apply_for_copy("before_load", ids)
        self.later.append((lambda self, pages: self.page_valid.index_fill_(0, pages, True), pages))


class LateRecords(Late):
    """A faulty manager: pages are quantized after the copy."""

    def before_backup(self, ids: torch.Tensor) -> None:
        pages = self._apply_for_copy("before_backup", ids)
        self.later.append((TierManager.ensure_records, pages))


class NoMarks(TierManager):
    """A faulty manager: loaded pages never count as quantized."""

    def before_load(self, ids: torch.Tensor) -> None:
        self._apply_for_copy("before_load", ids)


def found(write_back: bool, manager: type[TierManager] = TierManager) -> bool:
    """Returns whether one of some schedules fails."""
    for seed in range(12):
        try:
            run(1000 + seed, write_back, seed % 2 == 0, 60, manager=manager)
        except (AssertionError, RuntimeError):
            return True
    return False


@pytest.mark.parametrize("manager", [NothingFirst, LateMarks, NoMarks, LateRecords])
def test_tiers_that_do_their_work_late_are_found(manager):
    assert found(False, manager) or found(True, manager)


def test_layers_that_do_not_wait_are_found(monkeypatch):
    monkeypatch.setattr(Host, "wait", never)
    assert found(False) or found(True)
