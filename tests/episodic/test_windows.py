"""Every run of whole pages is a window, once, and growth only appends."""

from __future__ import annotations

import pytest

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.episodic.windows import windows
from sglang_kvq.errors import KVQuantError


def pages(tokens: int, size: int) -> list[tuple[int, int]]:
    found = windows(tokens, size)
    assert all(start % PAGE_SIZE == end % PAGE_SIZE == 0 and end <= tokens for start, end in found)
    return [(start // PAGE_SIZE, end // PAGE_SIZE) for start, end in found]


def test_runs_of_whole_pages() -> None:
    assert pages(5 * PAGE_SIZE - 1, 2) == [(0, 2), (1, 3), (2, 4)]
    assert pages(3 * PAGE_SIZE, 1) == [(0, 1), (1, 2), (2, 3)]


def test_short_histories() -> None:
    assert pages(3 * PAGE_SIZE, 3) == pages(3 * PAGE_SIZE, 4) == [(0, 3)]
    assert windows(PAGE_SIZE - 1) == windows(0) == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_growth_appends(size: int) -> None:
    for tokens in range(size * PAGE_SIZE, 9 * PAGE_SIZE, 32):
        assert windows(tokens + 32, size)[: len(windows(tokens, size))] == windows(tokens, size)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(KVQuantError, match="windows of 0 pages"):
        windows(640, 0)
