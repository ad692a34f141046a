"""Two servers' caches and the wire between them: the decode server reads what the prefill server computed."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_kvq.cache.pool import PACKED_TAIL
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang.disaggregation.staging import MOST_ENTRIES, entries_for, window_of
from tests.cache.arrivals import ENTRIES, Pair, transfers
from tests.cache.scheduler_model import PLANES, TWO_BITS, Model
from tests.pairs import each, few


@each(seed=few(range(4), 2), overlap={"in-flight": True, "alone": False})
def test_random_schedules(seed, overlap):
    """On random schedules, the decode server's reads and both servers' tables are right after every event."""
    pair = Pair(random.Random(700 + seed), overlap)
    pair.run(120)
    assert pair.counts["arrived"] > 5 and pair.counts["aborted"], pair.counts
    pair.finish()


@each(seed=range(2), overlap={"in-flight": True, "alone": False}, drafts={"two": 2, "five": 5})
def test_random_schedules_of_a_decode_server_that_drafts(seed, overlap, drafts):
    """With drafts, the first step after an arrival or a retraction writes tokens that may begin a page."""
    pair = Pair(random.Random(900 + seed), overlap, drafts=drafts)
    pair.run(160)
    assert pair.counts["arrived"] > 5 and pair.counts["aborted"], pair.counts
    pair.finish()


@pytest.mark.parametrize("steps", [1, 40, 64, 130])
def test_a_retracted_request_goes_on_where_it_was(steps):
    """One of two running requests leaves its pages and its row, and resumes in others."""
    pair = Pair(random.Random(9), overlap=True)
    for first in (0, 1000):
        pair.send(list(range(first, first + 5 * P + 3)))
        pair.arrive(pair.under_way[0])
    pair.steps(steps)
    before = pair.decoding[0]
    pages = pair.model.row_pages(before, before.stored)
    pair.retract(before)
    pair.steps(P)
    pair.resume()
    pair.arrive(pair.under_way[0])
    assert pair.model.row_pages(pair.decoding[-1], len(pages) * P) != pages
    pair.steps(P)
    pair.finish()


@each(seed=few(range(30), 3), format={"two bits": TWO_BITS, "planes": PLANES})
def test_random_schedules_with_a_radix_tree_on_the_decode_server(seed, format):
    pair = Pair(random.Random(800 + seed), seed % 4 > 0, format, radix=True)
    pair.run(120)
    assert pair.counts["prefix"], pair.counts
    pair.finish()


def test_the_first_token_of_an_arrived_request_outlives_its_bf16_page():
    """Even if the request ends before a plan includes it, as one with an answer of one token does."""
    pair = Pair(random.Random(800), overlap=False, format=PLANES, radix=True)
    d = pair.model
    assert (d.rows, d.sink_pages) == (4 + 3, 1), "the setting: four requests fill the BF16 pages"
    for n in range(5):
        pair.send(list(range(1000 * n, 1000 * n + 6 * P)))
        pair.arrive(*pair.under_way)
        if n == 0:
            page = d.row_pages(pair.decoding[0], 1)
            pair.leave(pair.decoding[0], publish=True)
            d.tiers.apply_pending()
            assert int(d.pool.page_slot[page]) > 0
        else:
            pair.steps(1)
    assert int(d.pool.page_slot[page]) < 0 and bool(d.pool.sink_cache.kept(torch.tensor(page)))
    pair.finish()


def run_some(seeds: range) -> None:
    for seed in seeds:
        Pair(random.Random(seed), True, radix=True).run(120)


def test_the_schedules_find_an_arrival_that_takes_a_second_window(monkeypatch):
    """Beside that of the tree's pages, which replace its own before the next plan, there may be no room for it."""
    monkeypatch.setattr(TierManager, "gives_way", lambda _, pages: torch.zeros_like(pages, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="impossible operations"):
        run_some(range(31, 61))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 192, 193, 448, 700])
def test_the_first_step_reads_the_window_in_bf16_and_the_rest_from_records(length):
    pair = Pair(random.Random(3), overlap=False)
    pair.send(list(range(length)))
    (sent,) = pair.under_way
    pair.arrive(sent)
    pair.steps(1)  # the model compares every key and value
    row, d = sent.decode.row, pair.model
    whole = (length + 1) // P
    assert int(d.pool.row_history_end[row]) == max(whole - d.recent_pages, d.sink_pages) * P or whole <= d.sink_pages
    assert d.tiers.counts().slots_used == len(window_of(length, d.sink_pages, d.recent_pages)) + (length % P == 0)


def test_a_whole_page_that_arrives_without_a_bf16_copy_is_read_from_its_record():
    """The request ends with the page, which is therefore not being filled."""
    pair = Pair(random.Random(3), overlap=False)
    pair.send(list(range(4 * P)))
    (sent,) = pair.under_way
    last = pair.receiver.staged_rows(sent.decode.row, 4 * P)[-1]
    pair.receiver.staging.table[:, last, -PACKED_TAIL:] = sent.decode.fresh = 0
    pair.arrive(sent)
    pair.steps(1)  # the model compares every key and value
    assert int(pair.model.pool.page_slot[pair.model.row_pages(sent.decode, 4 * P)[-1]]) < 0


def test_window_of_is_the_tiers_window():
    for sinks, recent in ((0, 1), (1, 2), (2, 3)):
        model = Model(60, 30, 2, sinks, recent)
        for length in range(1, 12 * P, 13):
            index, exists, _ = model.tiers.window(torch.tensor([1]), torch.tensor([length]))
            assert index[exists].tolist() == window_of(length, sinks, recent)


def test_a_page_being_filled_without_a_bf16_copy_is_an_error():
    model = Model(20, 12, 2, 1, 2)
    handover = transfers(model, False)
    request = model.start(list(range(P + 5)))
    assert model.extend([(request, P + 5)])
    work = handover.computing(request.row, P + 5, 0)
    model.pool.page_slot[work.pages[1]] = -1
    handover.computed(work, model.tiers)
    assert model.tiers.counts().errors == 1


def test_a_window_of_another_length_is_refused():
    model = Model(20, 12, 2, 1, 2)
    handover = transfers(model, True)
    handover.staged_rows(1, 100)
    with pytest.raises(RuntimeError, match="100"):
        handover.staged_rows(1, 101)
    for row in range(2, 1 + ENTRIES):
        handover.staged_rows(row, 100)
    with pytest.raises(RuntimeError, match="without room"):
        handover.staged_rows(1 + ENTRIES, 100)


def test_requests_that_end_without_a_plan_do_not_keep_their_entries():
    """Requests of one token arrive and end before any plan; even so, their entries become free again."""
    pair = Pair(random.Random(5), overlap=False)
    for n in range(ENTRIES):
        pair.send(list(range(100 + n)))
    for sent in list(pair.under_way):
        pair.arrive(sent)
    assert pair.receiver.staging.available() == 0
    moving = pair.model.tiers.pending.reserve_move()
    pair.receiver.settle(pair.model.tiers)
    assert pair.receiver.staging.available() == 0, "not in the middle of an insertion"
    pair.model.tiers.pending.fill_move(moving, *[torch.zeros(0, dtype=torch.int64)] * 2)
    pair.receiver.settle(pair.model.tiers)
    assert pair.receiver.staging.available() == ENTRIES and not pair.model.tiers.pending
    assert pair.model.tiers.decode_needs_plan(torch.tensor([101]))
    assert int(pair.model.tiers.errors) == 0


def test_a_flush_gives_back_what_has_arrived():
    pair = Pair(random.Random(5), overlap=False)
    pair.send(list(range(100)))
    (sent,) = pair.under_way
    pair.arrive(sent)
    assert pair.receiver.staging.available() == ENTRIES - 1
    pair.model.tiers.reset()
    assert pair.receiver.staging.available() == ENTRIES


def test_entries():
    assert [entries_for(n) for n in (None, 1, 8, 1000)] == [MOST_ENTRIES, 2, 8, MOST_ENTRIES]
