"""Long random schedules keep pool, tiers and tree equal to the dictionary model."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_kvq.cache import sink_token_cache
from tests.cache.scheduler_model import PLANES, Model
from tests.cache.schedules import OVERLAP, Driver, converse, crowd, random_model, shared_model, soft_model
from tests.pairs import each, few


@each(seed=few(range(6), 3), overlap=OVERLAP)
def test_random_schedules(seed, overlap):
    rng = random.Random(100 + seed)
    driver = Driver(random_model(rng, overlap, look_every=1 if seed == 0 else 8), rng)
    driver.run(160)
    driver.finish()
    assert driver.model.tiers.steps > 30 and int(driver.model.tiers.records_written) > 1
    assert driver.model.copied and driver.model.folded


@each(drafts=[1, 4], overlap=OVERLAP)
def test_random_schedules_of_soft_windows(drafts, overlap):
    """If BF16 pages suffice for fewer windows than requests run, recent pages are taken and nothing else changes."""
    shortened = 0
    for seed in few([1, 2, 0], 1):
        rng = random.Random(400 + seed)
        model = soft_model(rng, drafts, overlap=overlap, look_every=8)
        crowd(model, rng, 5, drafts)
        shortened += model.shortened
    assert shortened > 20


@each(seed=few(range(8), 2), overlap=OVERLAP)
def test_random_schedules_of_a_shared_memory(seed, overlap):
    """Batches read what was written, whatever pages the boundary passes."""
    rng = random.Random(600 + seed)
    driver = Driver(shared_model(rng, overlap=overlap, look_every=4), rng)
    driver.run(100)
    driver.finish()
    assert (driver.model.moved > 9 or not driver.model.wanders) and driver.model.copied and driver.model.folded


@each(drafts=[2, 7], overlap=OVERLAP)
def test_random_schedules_of_a_shared_memory_with_drafts(drafts, overlap):
    rng = random.Random(0)
    driver = Driver(shared_model(rng, drafts, overlap=overlap, look_every=4), rng, drafts=drafts)
    driver.run(80)
    driver.finish()
    assert driver.model.moved > 50 and driver.model.copied and driver.model.folded


@each(kind=["first tokens", "crowd"], overlap=OVERLAP)
def test_a_shared_memory_keeps_first_tokens_and_shrinks_windows(kind, overlap):
    rng = random.Random(700)
    if kind == "crowd":
        model = shared_model(rng, overlap=overlap, look_every=8, rows=5, recent=4, kept=0, batch=1, room=1)
        crowd(model, rng, 8)
        assert model.shortened > 5
    else:
        model = shared_model(rng, overlap=overlap, look_every=16, format=PLANES, sinks=1)
        converse(model, rng, 30)
        assert model.restored > 5
    assert model.moved > 5


@pytest.mark.parametrize("seed", few(range(3), 1))
def test_windows_are_whole_where_there_is_room(seed):
    """While there is room, tables are bit for bit what they are without ``kept_pages``."""
    tables = []
    for kept in (None, 0):
        rng = random.Random(500 + seed)
        driver = Driver(random_model(rng, kept_pages=kept), rng)
        for _ in range(80):
            driver.event()
            tiers = driver.model.tiers
            shown = (tiers.slot_page, tiers.slot_stamp, tiers.pool.page_slot, tiers.pool.row_history_end)
            tables.append([x.clone() for x in shown])
        driver.finish()
    half = len(tables) // 2
    for hard, soft in zip(tables[:half], tables[half:]):
        assert all(torch.equal(a, b) for a, b in zip(hard, soft))


@each(pages_per_entry=[1, 8], overlap=OVERLAP)
def test_random_schedules_keep_first_tokens(pages_per_entry, overlap, monkeypatch):
    """A first page is read with its first token as written, whatever takes BF16 pages, as long as there are entries."""
    monkeypatch.setattr(sink_token_cache, "PAGES_PER_ENTRY", pages_per_entry)
    restored = unkept = 0
    for seed in few(range(4), 1):
        rng = random.Random(300 + seed)
        rows, sinks = rng.randint(1, 3), rng.randint(1, 2)
        model = Model(70, rows * (sinks + 2) + 1, rows, sinks, 1, overlap=overlap, format=PLANES, look_every=16)
        converse(model, rng, 40)
        assert not model.pool.sink_cache.pages.any()
        restored, unkept = restored + model.restored, unkept + model.unkept
    assert restored > 20 and (unkept == 0 or pages_per_entry > 1)


@each(drafts=[2, 4, 5, 7, 64], overlap=OVERLAP)
def test_random_schedules_with_drafts(drafts, overlap):
    """Whatever is rejected, pages that become records or belong to the tree hold only committed tokens."""
    rng = random.Random(200 + drafts)
    driver = Driver(random_model(rng, overlap, look_every=4), rng, drafts=drafts)
    driver.run(90)
    driver.finish()
    assert driver.model.tiers.steps > 20 and int(driver.model.tiers.records_written) > 1
