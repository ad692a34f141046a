"""A prefill with quantized pages reads whole pages outside the window from records, each quantized once."""

from __future__ import annotations

import pytest
import torch

from benchmarks.research.episodes.prefill import RECENT, prefill
from benchmarks.research.tests import helpers
from sglang_kvq.constants import PAGE_SIZE

HISTORY = helpers.tokens(900)


@pytest.mark.parametrize("chunk", [64, 200, 512, 2048])
def test_pages_are_quantized_once_when_they_leave_the_window(chunk: int) -> None:
    """Here quantizing doubles: layer 0's keys, which do not depend on attention, show how often it happened."""
    runner, calls = helpers.runner(), []

    def double(layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((layer, first, k.shape[2]))
        return 2 * k, 2 * v

    exact, _ = prefill(runner, HISTORY, chunk=chunk)
    found, _ = prefill(runner, HISTORY, chunk=chunk, round_trip=double)
    left = (len(HISTORY) - RECENT) // PAGE_SIZE * PAGE_SIZE
    for ours, theirs in ((found.k, exact.k), (found.v, exact.v)):
        torch.testing.assert_close(ours[0][:, :, :left], 2 * theirs[0][:, :, :left])
        torch.testing.assert_close(ours[0][:, :, left:], theirs[0][:, :, left:])
    assert sum(n for layer, _, n in calls if layer == 1) == left
    assert all(first % PAGE_SIZE == 0 and n % PAGE_SIZE == 0 for _, first, n in calls)
    if chunk < left:
        # Later chunks read the quantized pages.
        assert not torch.allclose(found.k[1][:, :, -1], exact.k[1][:, :, -1], atol=1e-3)


def test_a_chunk_reads_its_window_exactly() -> None:
    """No page leaves the window before the second chunk, so the test checks reading alone."""
    runner = helpers.runner()

    def lose(layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(k), torch.zeros_like(v)

    size = RECENT + PAGE_SIZE - 1
    exact, _ = prefill(runner, HISTORY[: size + 40], chunk=size)
    found, _ = prefill(runner, HISTORY[: size + 40], chunk=size, round_trip=lose)
    torch.testing.assert_close(found.k[2][:, :, size:], exact.k[2][:, :, size:])
