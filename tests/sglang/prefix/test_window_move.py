"""The move that is recorded when the tree's pages replace a request's own: the right pages, without waiting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.pending import MovedBF16Pages, PendingOps
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang.prefix.tree import _WindowMove
from tests import device_waits


@pytest.fixture
def tiers():
    return SimpleNamespace(sink_pages=1, recent_pages=4, pending=PendingOps())


def table(first: int, device: str) -> torch.Tensor:
    """Returns one row whose pages are first, first + 1, ..."""
    pages = torch.arange(first, first + 20, device=device)
    return (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten()[None].int()


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (63, []),
        (64, [0]),
        (200, [0, 1, 2]),
        (64 * 6 + 5, [0, 1, 2, 3, 4, 5]),
        (64 * 12, [0, 7, 8, 9, 10, 11]),
    ],
)
def test_sinks_and_window_are_moved(tiers, length, expected):
    row = table(100, "cpu")
    move = _WindowMove(tiers, row, 0, length)
    row[:] = table(500, "cpu")
    move.finish()
    moves = list(tiers.pending.drain(torch.device("cpu")))
    if not expected:
        assert not moves
        return
    ((own, kept),) = moves
    assert (
        isinstance(moves[0], MovedBF16Pages)
        and own.tolist() == [100 + i for i in expected]
        and kept.tolist() == [500 + i for i in expected]
    )


@pytest.mark.gpu
def test_recording_does_not_wait_for_the_device(tiers):
    """A wait here would delay the previous batch's result by a whole prefill."""
    row, kept = table(100, "cuda"), table(500, "cuda")[0]
    with device_waits.refused():
        _WindowMove(tiers, row, 0, 64 * 12).finish(kept)
    assert tiers.pending
