"""Tiers prepare pages before they are copied to host memory and before they are loaded."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from tests.cache.scheduler_model import Model, Request
from tests.cache.test_tiers import generate, model, prefill


def ids(*pages: int) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int64)


def started(**more) -> tuple[Model, Request, torch.Tensor]:
    """Returns a published request of five and a half pages; its sink and two recent pages are only in BF16."""
    m = model(**more)
    request = prefill(m, list(range(5 * P + 30)))
    pages = ids(*m.row_pages(request, 5 * P))
    assert m.tiers.page_valid[pages].tolist() == [False, True, True, False, False]
    return m, request, pages


def records_of(m: Model, request: Request, page: int) -> torch.Tensor:
    """Returns the expected record of page ``page`` of the request's tokens."""
    k, v = request.expected(page * P, page * P + P).permute(1, 0, 2)[:, None, None]
    return m.format.quantize_pages(k, v)[0]


def test_pages_in_bf16_alone_are_quantized_for_a_backup_and_stay_in_bf16():
    m, request, pages = started()
    m.pool.records[0][pages[1]] = 0xEE  # a valid record is not written again
    before, written = m.pool.bf16_pages.clone(), int(m.tiers.records_written)
    slots = m.pool.page_slot.clone()
    m.tiers.before_backup(pages)
    assert m.tiers.page_valid[pages].all() and int(m.tiers.records_written) == written + 3
    assert torch.equal(m.pool.page_slot, slots) and torch.equal(m.pool.bf16_pages.nan_to_num(), before.nan_to_num())
    assert (m.pool.records[0][pages[1]] == 0xEE).all()
    for i in (0, 3, 4):
        assert torch.equal(m.pool.records[0][pages[i]], records_of(m, request, i))
    assert int(m.tiers.errors) == 0


def test_what_is_read_does_not_change_with_a_backup():
    m, request, pages = started()
    generate(m, request, 1)
    ranges = m.pool.row_sink_end.clone(), m.pool.row_history_end.clone()
    m.tiers.before_backup(pages)
    generate(m, request, 2)  # ``Model.decode`` compares every token that it reads
    assert torch.equal(m.pool.row_sink_end, ranges[0]) and torch.equal(m.pool.row_history_end, ranges[1])


def test_a_copy_that_waits_is_backed_up_filled():
    m, request, pages = started()
    target = ids(*m.take_pages(2))
    m.tiers.pending.copy_pages(pages[[0, 1]], target, ids())
    m.tiers.before_backup(target)
    assert m.tiers.page_valid[target].all()
    for i in (0, 1):
        assert torch.equal(m.pool.records[0][target[i]], records_of(m, request, i))
    assert int(m.tiers.errors) == 0


def test_a_copy_of_what_a_load_overwrites_comes_first():
    """A pending copy whose source was freed runs before a load that was given the source's page."""
    m, request, pages = started()
    m.leave(request, publish=True)
    (target,) = m.take_pages(1)
    source = pages[1:2]
    m.tiers.pending.copy_pages(source, ids(target), ids())
    m.tiers.pending.free_pages(source)
    m.tiers.before_load(source)
    m.pool.records[0][source] = 0xEE
    assert m.tiers.page_valid[source].all() and not m.tiers.pending
    assert torch.equal(m.pool.records[0][target], records_of(m, request, 1))
    m.tiers.apply_pending()
    assert m.tiers.page_valid[source].all() and int(m.tiers.errors) == 0


@pytest.mark.parametrize("page, counted", [(0, 1), (1, 1), (4, 1), (None, 0)], ids=["sink", "record", "recent", "free"])
def test_a_load_into_a_page_in_use_is_an_error(page, counted):
    m, _, pages = started()
    m.tiers.before_load(ids(*m.take_pages(1)) if page is None else pages[page : page + 1])
    assert int(m.tiers.errors) == counted


def test_a_backup_of_a_page_that_was_never_written_is_an_error():
    m, _, pages = started()
    m.tiers.before_backup(torch.cat([pages, ids(*m.take_pages(2))]))
    assert int(m.tiers.errors) == 2


@pytest.mark.parametrize("prepare", [TierManager.before_backup, TierManager.before_load])
def test_nothing_is_copied_while_a_move_is_open(prepare):
    m, request, pages = started()
    m.land()
    tiers = m.tiers
    tiers.pending.free_rows([request.row])
    ticket = tiers.pending.reserve_move()
    valid = tiers.page_valid.clone()
    with pytest.raises(KVQuantError, match=f"^{prepare.__name__}: an insertion into the tree is under way"):
        prepare(tiers, pages)
    assert tiers.pending.has_open_move and torch.equal(tiers.page_valid, valid) and tiers.row_len[request.row] > 0
    tiers.pending.fill_move(ticket, ids(), ids())
    assert not tiers.pending.has_open_move
    tiers.before_backup(pages)
    assert not tiers.pending and tiers.row_len[request.row] == 0


@pytest.mark.parametrize("what", ["nothing", "check", "backup", "load"])
@pytest.mark.parametrize("event", [False, True], ids=["no-event", "event"])
def test_events_applied_between_plans_still_make_the_next_step_plan(event, what):
    m, request, pages = started()
    generate(m, request, 1)
    lens = torch.tensor([request.stored])
    assert m.tiers.decode_needs_plan(lens + 1) is False
    (free,) = m.take_pages(1)
    if event:
        m.tiers.pending.free_pages(ids(free))
    if what == "check":
        check_integrity(m.tiers)
    elif what == "backup":
        m.tiers.before_backup(pages)
    elif what == "load":
        m.tiers.before_load(ids(free))
    assert m.tiers.decode_needs_plan(lens + 2) is event
