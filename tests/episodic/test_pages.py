"""Always as many pages as the budget: sinks and tail, then the segments' in their order."""

from __future__ import annotations

import pytest

from sglang_kvq.episodic.pages import choose_pages
from sglang_kvq.errors import KVQuantError


def pages(ranked: list[tuple[int, int]], budget: int, tokens: int = 620, sinks: int = 1, recent: int = 2) -> list[int]:
    return choose_pages(ranked, tokens, budget, page=64, sink_pages=sinks, recent_pages=recent).tolist()


def test_pages_of_segments_in_their_order() -> None:
    assert pages([(64 * 5, 64 * 6)], 4) == [0, 5, 8, 9]
    assert pages([(64 * 5 - 1, 64 * 5 + 1)], 5) == [0, 4, 5, 8, 9]
    # The second segment has room for its first page only.
    assert pages([(200, 250), (300, 500)], 5) == [0, 3, 4, 8, 9]


def test_the_rest_goes_to_recent_pages() -> None:
    assert pages([(0, 64)], 6) == [0, 5, 6, 7, 8, 9]
    assert pages([], 3) == [0, 8, 9]


def test_a_budget_for_everything() -> None:
    assert pages([(300, 310)], 10) == pages([], 99) == list(range(10))
    assert pages([], 5, tokens=100) == [0, 1]


def test_bad_input_is_refused() -> None:
    with pytest.raises(KVQuantError, match="2 pages: sinks"):
        pages([], 2)
    with pytest.raises(KVQuantError, match="tokens 600 to 700 in a history of 620"):
        pages([(600, 700)], 5)
