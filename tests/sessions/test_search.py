"""Windows are ranked by meaning and letters, and a choice has as many pages as the budget."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.embedding import unit
from sglang_kvq.sessions.index import Lexical, NewPages, PageIndex
from sglang_kvq.sessions.planning import Plan
from sglang_kvq.sessions.search import MATCHES, Question, choose, choose_pages, fuse, rank_windows, windows


def spans(tokens: int, size: int) -> list[tuple[int, int]]:
    found = windows(tokens, size)
    assert all(start % PAGE_SIZE == end % PAGE_SIZE == 0 and end <= tokens for start, end in found)
    return [(start // PAGE_SIZE, end // PAGE_SIZE) for start, end in found]


def test_runs_of_whole_pages() -> None:
    assert spans(5 * PAGE_SIZE - 1, 2) == [(0, 2), (1, 3), (2, 4)]
    assert spans(3 * PAGE_SIZE, 1) == [(0, 1), (1, 2), (2, 3)]


def test_short_histories() -> None:
    assert spans(3 * PAGE_SIZE, 3) == spans(3 * PAGE_SIZE, 4) == [(0, 3)]
    assert windows(PAGE_SIZE - 1) == windows(0) == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_growth_appends(size: int) -> None:
    for tokens in range(size * PAGE_SIZE, 9 * PAGE_SIZE, 32):
        assert windows(tokens + 32, size)[: len(windows(tokens, size))] == windows(tokens, size)


def test_windows_of_bad_numbers_are_refused() -> None:
    with pytest.raises(KVQuantError, match="windows of 0 pages"):
        windows(640, 0)


def chosen(ranked: list[tuple[int, int]], budget: int, tokens: int = 620, sinks: int = 1, recent: int = 2) -> list[int]:
    return choose_pages(ranked, tokens, budget, page=64, sink_pages=sinks, recent_pages=recent).tolist()


def test_pages_of_segments_in_their_order() -> None:
    assert chosen([(64 * 5, 64 * 6)], 4) == [0, 5, 8, 9]
    assert chosen([(64 * 5 - 1, 64 * 5 + 1)], 5) == [0, 4, 5, 8, 9]
    # There is room only for the second segment's first page.
    assert chosen([(200, 250), (300, 500)], 5) == [0, 3, 4, 8, 9]


def test_the_rest_goes_to_recent_pages() -> None:
    assert chosen([(0, 64)], 6) == [0, 5, 6, 7, 8, 9]
    assert chosen([], 3) == [0, 8, 9]


def test_a_budget_for_everything() -> None:
    assert chosen([(300, 310)], 10) == chosen([], 99) == list(range(10))
    assert chosen([], 5, tokens=100) == [0, 1]


def test_bad_budgets_and_spans_are_refused() -> None:
    with pytest.raises(KVQuantError, match="2 pages: sinks"):
        chosen([], 2)
    with pytest.raises(KVQuantError, match="tokens 600 to 700 in a history of 620"):
        chosen([(600, 700)], 5)


def test_windows_by_meaning_and_letters() -> None:
    texts = ["we sailed", "along the coast", "and ate", "some bread", "in the harbour"]
    index = Lexical()
    index.add(texts)
    pages = unit(np.array([[1, 0], [1, 1], [0, 1], [-1, 0], [0, -1]], dtype=np.float32))
    row = np.array([1, 0], dtype=np.float32)
    for size in (1, 2, 3, 9):
        wide = [" ".join(texts[n : n + size]) for n in range(max(1, len(texts) - size + 1))]
        means = unit(np.stack([pages[n : n + size].sum(0) for n in range(len(wide))]))
        joined = Lexical()
        joined.add(wide)
        wanted = np.argsort(-fuse(means @ row, joined.scores("coast")), kind="stable")
        assert rank_windows("coast", row, pages, index, size).tolist() == wanted.tolist()
    assert rank_windows("coast", row, pages, index)[0] in (0, 1)
    with pytest.raises(KVQuantError, match="embeddings of 4 pages, but an index of 5"):
        rank_windows("coast", row, pages[:4], index)


def test_a_choice_shows_the_windows_that_it_read() -> None:
    rows, index = unit(np.random.default_rng(0).standard_normal((40, 8))), PageIndex()
    index.add(NewPages.made(rows, [f"page {n}" for n in range(40)]))
    rows, plan = index.rows(), Plan(41 * PAGE_SIZE, 40 * PAGE_SIZE, pages=8)

    def choice(row: np.ndarray, sinks: int = 1) -> tuple[list[int], list[tuple[int, int]], list[float]]:
        found = choose(Question("something", row), index, plan, size=2, sinks=sinks, recent=2)
        spans = [(match.start // PAGE_SIZE, match.end // PAGE_SIZE) for match in found.matches]
        return found.pages.tolist(), spans, [match.score for match in found.matches]

    pages, shown, scores = choice(rows[20])
    assert len(pages) == 8 and {0, 38, 39} < set(pages) and {19, 20, 21} & set(pages)
    best = rank_windows("something", rows[20], rows, index.letters)[:MATCHES].tolist()
    assert shown == [(n, n + 2) for n in best if n in pages] and len(shown) < MATCHES
    np.testing.assert_allclose(scores, [unit(rows[a:b].mean(0)) @ rows[20] for a, b in shown], rtol=1e-5)
    # Sinks leave room for one window.
    pages, shown, _ = choice(rows[20], sinks=9)
    assert pages[:4] == [0, 1, 2, 3] and pages[4] + 1 == pages[5] == shown[0][0] + 1
    # A question without words is near to nothing.
    assert choice(np.zeros(8, np.float32)) == ([0, *range(33, 40)], [], [])


def test_fusion_is_of_standardized_scores() -> None:
    cosines, words = np.array([0.9, 0.5, 0.7, 0.1], dtype=np.float32), np.array([0.0, 30.0, 20.0, 0.0])
    wanted = sum((of - np.mean(of)) / np.std(of) for of in (cosines.astype(np.float64), words))
    np.testing.assert_allclose(fuse(cosines, words), wanted, rtol=1e-5)
    np.testing.assert_allclose(fuse(100 * cosines - 7, words / 9), wanted, rtol=1e-4)
    np.testing.assert_allclose(fuse(cosines, np.full(4, 3.0), words), wanted, rtol=1e-5)
    assert not fuse(np.full(3, 0.1, dtype=np.float32)).any() and len(fuse(np.empty(0))) == 0


def test_fusion_of_nothing_is_refused() -> None:
    with pytest.raises(KVQuantError, match="fusing scores of \\[\\] items"):
        fuse()
    with pytest.raises(KVQuantError, match="fusing scores of \\[2, 3\\] items"):
        fuse(np.zeros(2), np.zeros(3))
