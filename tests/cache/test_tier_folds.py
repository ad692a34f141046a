"""The plan after a fold or copy gives the filled pages correct records and BF16 copies."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_kvq.constants import PAGE_SIZE as P
from tests.cache.scheduler_model import Model, Request
from tests.cache.test_tiers import model, prefill

SINK = list(range(P))


def chosen(count: int, length: int, seed: int = 0) -> list[int]:
    """Returns a sink page's tokens, then random tokens of the other pages in their order."""
    return [*SINK, *sorted(random.Random(seed).sample(range(P, length), count - P))]


def go_on(m: Model, names: list[int], tail: int = 100) -> Request:
    """Starts a request on the kept tokens of a fold; the model checks its reads against the chosen tokens."""
    request = m.start([*names, *[9] * tail])
    assert request.stored == len(names)
    assert m.extend([(request, tail)])
    return request


def target(m: Model, names: list[int]) -> list[int]:
    return [m.tree[tuple(names[:end])] for end in range(P, len(names) + 1, P)]


def test_sinks_are_bf16_pages_and_the_rest_is_records():
    m = model(slots=14, rows=2)
    request = prefill(m, list(range(600)), publish=False)
    names = m.fold(request, chosen(4 * P, 8 * P), publish=False)
    m.tiers.apply_pending()
    pages = target(m, names)
    assert m.tiers.page_valid[pages].all()
    assert (m.pool.page_slot[pages] > 0).tolist() == [True, False, False, False]
    follower = go_on(m, names)
    assert int(m.pool.row_sink_end[follower.row]) == P and int(m.pool.row_history_end[follower.row]) == 4 * P
    m.check()


def test_a_page_that_is_freed_and_filled_again_has_the_later_content():
    """Both copies come before one plan; only the source of the first has a BF16 copy."""
    m = model()
    request = prefill(m, list(range(5 * P + 30)))
    first, second = (torch.tensor([page]) for page in m.row_pages(request, 2 * P))
    page = torch.tensor(m.take_pages(1))
    for source in (first, second):
        m.tiers.pending.free_pages(page)
        m.tiers.pending.copy_pages(source, page, torch.tensor([0]))
    m.tiers.apply_pending()
    assert (m.pool.page_slot[torch.cat([first, second, page])] > 0).tolist() == [True, False, False]
    assert torch.equal(m.pool.records[0][page], m.pool.records[0][second])


def test_without_room_for_a_bf16_page_the_record_serves():
    """If windows pin every slot, the record of the fold serves; it does not matter whose windows they are."""
    m = model(slots=8, rows=2)
    request = prefill(m, list(range(600)), publish=False)
    prefill(m, [5] * 600, publish=False)
    held, pages = m.tiers.slot_page.clone(), m.take_pages(3)
    assert (held[1:] > 0).all()
    source, tokens = torch.tensor(m.row_pages(request, 8 * P)), torch.tensor(chosen(3 * P, 8 * P))
    m.tiers.pending.fold_pages(source, torch.tensor(pages), tokens[None, None], torch.tensor([0]))
    m.tiers.apply_pending()
    assert m.tiers.page_valid[pages].all() and (m.pool.page_slot[pages] < 0).all() and int(m.tiers.errors) == 0
    assert torch.equal(m.tiers.slot_page, held)


@pytest.mark.parametrize("kind", ["fold", "copy"])
def test_the_sink_of_a_fold_or_copy_keeps_its_bf16_page_longer_than_window_pages(kind):
    """Idle conversations have younger window pages, and a new one takes those BF16 pages before the sink's."""
    m = Model(60, 8, 2, 1, 2)
    source = prefill(m, list(range(5 * P)), publish=kind == "copy")
    if kind == "fold":
        names = m.fold(source, chosen(3 * P, 5 * P), publish=False)
    else:
        waiting = m.select(tuple(source.tokens), [0, 1, 2], [7])
        names = waiting.tokens[: 3 * P]
        m.leave(waiting, publish=False)
        m.leave(source, publish=False)
    m.tiers.apply_pending()
    (page, *_), own = target(m, names), [7] * (5 * P)
    assert int(m.pool.page_slot[page]) > 0, "the setting: the sink has a BF16 copy"
    if kind == "copy":
        m.release([m.tree.pop(key) for key in [key for key in m.tree if key[0] == 0]])
    for text in (own, [8] * (5 * P)):
        m.leave(prefill(m, text), publish=True)
    prefill(m, [9] * (5 * P))
    others = [m.tree[tuple(own[:end])] for end in range(P, 5 * P + 1, P)]
    assert (m.pool.page_slot[others] > 0).tolist().count(True) <= 2, "the setting: some of its pages gave way"
    assert int(m.pool.page_slot[page]) > 0
    m.check()


def test_what_has_no_record_is_quantized_first_and_once():
    m = model(slots=14, rows=2)
    request = prefill(m, list(range(5 * P + 3)), publish=False)
    pages = m.row_pages(request, 5 * P)
    missing = int((~m.tiers.page_valid[pages]).sum())
    before = int(m.tiers.records_written)
    names = m.fold(request, chosen(3 * P, 5 * P), publish=True)
    m.tiers.apply_pending()
    assert missing >= 3 and int(m.tiers.records_written) == before + missing
    assert m.tiers.page_valid[pages].all(), "they stay in the tree"
    go_on(m, names)


def test_sources_may_be_freed_and_filled_again_before_the_plan():
    """The second fold writes to pages that the first one reads; the plan comes after both."""
    m = model(pages=18, slots=14, rows=2)
    first, second = prefill(m, list(range(6 * P)), publish=False), prefill(m, [3] * (6 * P), publish=False)
    old = set(m.row_pages(first, 6 * P))
    names = m.fold(first, chosen(3 * P, 6 * P), publish=False)
    m.free.sort(key=lambda page: page not in old)
    again = m.fold(second, chosen(4 * P, 6 * P, seed=1), publish=False)
    assert set(target(m, again)) < old and m.tiers.pending
    for kept in (names, again):
        m.leave(go_on(m, kept), publish=False)
    m.check()


def test_a_fold_of_a_fold_moves_the_same_codes():
    m = model(pages=60, slots=14, rows=2)
    names = m.fold(prefill(m, list(range(700)), publish=False), chosen(4 * P, 10 * P), publish=False)
    request = go_on(m, names, 5 * P)
    m.tiers.apply_pending()
    written = int(m.tiers.records_written)
    whole = [page for page in m.row_pages(request, 9 * P) if not m.tiers.page_valid[page]]
    again = m.fold(request, chosen(4 * P, 9 * P, seed=2), publish=False)
    m.tiers.apply_pending()
    assert int(m.tiers.records_written) == written + len(whole), "no token is quantized again"
    go_on(m, again)
    m.check()


def test_a_target_that_is_freed_before_the_plan_keeps_no_bf16_page():
    m = model(slots=14, rows=2)
    names = m.fold(prefill(m, list(range(600)), publish=False), chosen(2 * P, 8 * P), publish=False)
    for end in (2 * P, P):
        m.release([m.tree.pop(tuple(names[:end]))])
    m.check()
    assert m.tiers.counts().slots_used == 0


def test_pages_without_content_are_counted():
    m = model(slots=14, rows=2)
    nothing, page = m.take_pages(2)
    m.tiers.pending.fold_pages(
        torch.tensor([nothing]), torch.tensor([page]), torch.arange(P)[None, None], torch.tensor([0])
    )
    m.tiers.apply_pending()
    assert int(m.tiers.errors) == 1
