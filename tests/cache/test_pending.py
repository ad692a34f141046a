"""Events of the scheduler are packed for one copy and one kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_kvq.cache.pending import CopiedPages, FoldedPages, PendingOps
from sglang_kvq.cache.transfer import to_device
from sglang_kvq.constants import EVENT_FREE, EVENT_MOVE, EVENT_ROWS

CPU = torch.device("cpu")


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_frees_in_a_row_are_one_and_rows_come_last():
    pending = PendingOps()
    pending.free_pages(ids(1, 2))
    pending.free_rows([7])
    pending.free_pages(ids(3).int())
    place, none = pending.reserve_move(), pending.reserve_move()
    pending.free_pages(ids(4))
    pending.free_rows([8, 9])
    pending.fill_move(place, ids(5, 6), ids(15, 16))
    spans, pages, events = pending.pack(CPU)
    assert none and not pending and pages.dtype == torch.int64
    assert spans[: 3 * events].view(-1, 3).tolist() == [
        [EVENT_FREE, 0, 3],
        [EVENT_MOVE, 3, 2],
        [EVENT_FREE, 7, 1],
        [EVENT_ROWS, 12, 3],
    ]
    assert pages.tolist() == [1, 2, 3, 5, 6, 15, 16, 4]
    assert spans[12:].tolist() == [7, 8, 9]


def test_moves_in_a_row_stay_apart():
    """Moves are not joined, because a later one may name pages of an earlier one."""
    pending = PendingOps()
    for own, kept in ((ids(1, 2), ids(3, 4)), (ids(3), ids(5))):
        pending.fill_move(pending.reserve_move(), own, kept)
    spans, pages, events = pending.pack(CPU)
    assert spans.view(-1, 3).tolist() == [[EVENT_MOVE, 0, 2], [EVENT_MOVE, 4, 1]] and events == 2
    assert pages.tolist() == [1, 2, 3, 4, 3, 5]


def test_nothing_and_a_move_that_was_none_pack_to_nothing():
    pending = PendingOps()
    assert pending.pack(CPU) is None
    pending.reserve_move()
    pending.free_rows([])
    pending.free_pages(ids())
    assert pending.pack(CPU) is None and not pending


def test_rows_alone():
    pending = PendingOps()
    pending.free_rows([3, 4])
    spans, pages, events = pending.pack(CPU)
    assert spans.tolist() == [EVENT_ROWS, 3, 2, 3, 4] and not pages.numel() and events == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_parts_of_one_copy_start_where_kernels_expect_them(dtype):
    parts = [np.arange(3), np.empty(0, np.int64), np.array([7]), np.arange(4), np.arange(5)]
    tensors = to_device(parts, CPU, dtype)
    assert all(x.dtype is dtype for x in tensors)
    assert [x.tolist() for x in tensors] == [x.tolist() for x in parts]
    assert all((x.data_ptr() - tensors[0].data_ptr()) % 16 == 0 for x in tensors)


def test_a_copy_waits_for_what_came_before_it():
    pending = PendingOps()
    pending.free_pages(ids(1))
    pending.copy_pages(ids(2, 3), ids(12, 13), ids(0))
    pending.free_pages(ids(2))
    assert pending.take_fill(CPU) is None
    spans, pages, _ = pending.pack(CPU)
    assert spans.tolist() == [EVENT_FREE, 0, 1] and pages.tolist() == [1]
    copy = pending.take_fill(CPU)
    assert [x.tolist() for x in copy] == [[2, 3], [12, 13], [0]]
    spans, pages, _ = pending.pack(CPU)
    assert spans.tolist() == [EVENT_FREE, 0, 1] and pages.tolist() == [2] and not pending


def test_a_fold_waits_for_what_came_before_it_and_keeps_its_shape():
    pending = PendingOps()
    pending.free_rows([3])
    pending.fold_pages(ids(2, 3), ids(12), torch.arange(128).view(1, 2, 64), ids(0))
    pending.copy_pages(ids(4), ids(14), ids())
    assert pending.take_fill(CPU) is None
    spans, _, _ = pending.pack(CPU)
    assert spans.tolist() == [EVENT_ROWS, 3, 1, 3] and pending.pack(CPU) is None
    fold = pending.take_fill(CPU)
    assert isinstance(fold, FoldedPages) and fold.tokens.shape == (1, 2, 64)
    assert [x.tolist() for x in (fold.source, fold.target, fold.sinks)] == [[2, 3], [12], [0]]
    assert isinstance(pending.take_fill(CPU), CopiedPages) and not pending


def test_a_fold_into_no_pages_is_none():
    pending = PendingOps()
    pending.fold_pages(ids(2), ids(), torch.empty(1, 1, 0).long(), ids())
    assert not pending
