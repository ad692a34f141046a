"""The order in which BF16 copies are taken if running requests may lose recent pages."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat

PAGES = 9


class Rows:
    """Three rows of nine pages, with a sink page and three recent ones; row r's page i is 9 (r - 1) + i + 1."""

    def __init__(self, slots: int, **more: int) -> None:
        ids = torch.arange(3 * PAGES).view(3, PAGES) + 1
        table = torch.zeros(4, PAGES * P, dtype=torch.int32)
        table[1:] = (ids[:, :, None] * P + torch.arange(P)).flatten(1)
        pool = PagePool.allocate([PageFormat(64, 64, 1, 1)], kv_heads=1, pages=27, slots=slots, req_to_token=table)
        self.tiers = TierManager(pool, 1, 3, lambda *batch: None, None, **more)

    def prefill(self, row: int, begin: int, end: int) -> None:
        """Stores pages ``begin`` to ``end``; pages before the window are quantized directly."""
        direct = [9 * (row - 1) + i + 1 for i in range(max(begin, 1), end - 3)]
        rows, lens = torch.tensor([row]), torch.tensor([end * P])
        self.tiers.plan_extend(rows, torch.tensor([begin * P]), lens, end * P, torch.tensor(direct, dtype=torch.int64))

    def held(self, row: int) -> list[int]:
        """Returns indices of the row's pages that have BF16 copies."""
        slots = self.tiers.pool.page_slot[9 * (row - 1) + 1 : 9 * row + 1]
        return (slots > 0).nonzero().flatten().tolist()


@pytest.fixture
def full() -> Rows:
    """Returns rows of which 1 and 2 hold all BF16 pages: a sink page and three recent ones each."""
    rows = Rows(slots=8, kept_pages=0)
    rows.prefill(1, 0, 5)
    rows.prefill(2, 0, 5)
    assert rows.held(1) == rows.held(2) == [0, 2, 3, 4]
    return rows


def test_windows_shrink_evenly_from_their_far_ends(full):
    full.prefill(3, 0, 2)
    assert (full.held(1), full.held(2), full.held(3)) == ([0, 3, 4], [0, 3, 4], [0, 1])
    full.prefill(3, 2, 4)  # takes its own page 1, which is the farthest, then a page next to the end
    assert full.held(3) == [0, 2, 3] and sorted([full.held(1), full.held(2)]) == [[0, 3, 4], [0, 4]]
    assert int(full.tiers.errors) == 0


def test_what_finished_requests_left_goes_first(full):
    full.tiers.pending.free_rows([2])
    full.prefill(3, 0, 2)
    assert (full.held(1), full.held(2)) == ([0, 2, 3, 4], [0, 4])


def test_sinks_and_the_pages_being_written_stay(full):
    full.prefill(3, 0, 4)
    assert (full.held(1), full.held(2), full.held(3)) == ([0, 4], [0, 4], [0, 1, 2, 3])
    assert int(full.tiers.errors) == 0
    full.prefill(3, 4, 8)  # needs three more and takes its own: pages left behind or not written now
    assert (full.held(1), full.held(2), full.held(3)) == ([0, 4], [0, 4], [0, 5, 6, 7])
    assert int(full.tiers.errors) == 0


@pytest.mark.parametrize("kept, left", [(1, [0, 3, 4]), (2, [0, 2, 3, 4]), (None, [0, 2, 3, 4])])
def test_pages_that_are_kept(kept, left):
    rows = Rows(slots=8, kept_pages=kept)
    rows.prefill(1, 0, 5)
    rows.prefill(2, 0, 5)
    rows.prefill(3, 0, 3)
    assert rows.held(1) == rows.held(2) == left
    assert int(rows.tiers.errors) == 3 - (2 if kept == 1 else 0)


def test_pages_of_drafts_stay():
    """A step of 70 tokens may write to three pages, because it begins before the length that the row counts."""
    rows = Rows(slots=8, kept_pages=0, written=70)
    rows.prefill(1, 0, 5)
    rows.prefill(2, 0, 5)
    rows.prefill(3, 0, 2)
    assert rows.held(1) == rows.held(2) == [0, 3, 4]
