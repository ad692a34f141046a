"""Chooses the pages that a request reads of its history: sinks, windows nearest to the question, and recent pages.

The server sees tokens, not turns, so the search is for windows of whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.embedding import unit
from sglang_kvq.sessions.index import Lexical, PageIndex, runs
from sglang_kvq.sessions.planning import Plan

#: Default number of pages of a window.
WINDOW_PAGES = 2
#: Most windows in ``Choice.matches``.
MATCHES = 16


@dataclass(frozen=True)
class Match:
    """A window that the last request read: tokens ``start`` to ``end`` (excluded), and its cosine to the question."""

    start: int
    end: int
    score: float


@dataclass(frozen=True, eq=False)
class Question:
    """A question in the form that the search takes.

    Attributes:
        row: embedding of the question, float32 ``[D]``; zeros if the question has no words.
    """

    text: str
    row: np.ndarray


@dataclass(frozen=True, eq=False)
class Choice:
    """The pages of a history that a request reads.

    Attributes:
        pages: int64 ``[plan.pages]``, ascending.
        matches: windows whose first pages are among them, the nearest to the question first.
    """

    pages: np.ndarray
    matches: tuple[Match, ...]


def choose(question: Question, index: PageIndex, plan: Plan, *, size: int, sinks: int, recent: int) -> Choice:
    """Chooses sinks, the most recent pages, and the windows nearest to the question (``rank_windows``).

    For a question without words, the most recent pages are chosen instead of windows. Takes 50 ms for 100,000 tokens.

    Args:
        index: the index of the history's pages.
        size: pages of a window.
        sinks: number of first pages that are always read, as far as there is room for them besides one window.
        recent: number of last pages that are always read.
    """
    spans, rows = windows(plan.history, size), index.rows()
    order = np.empty(0, np.int64)
    if question.row.any() and spans:
        order = rank_windows(question.text, question.row, rows, index.letters, size)
    pages = choose_pages(
        (spans[at] for at in order),
        plan.history,
        plan.pages,
        page=PAGE_SIZE,
        sink_pages=min(sinks, plan.pages - recent - size),
        recent_pages=recent,
    )
    read = set(pages.tolist())
    shown = [spans[at] for at in order[:MATCHES] if spans[at][0] // PAGE_SIZE in read]
    near = (unit(rows[a // PAGE_SIZE : b // PAGE_SIZE].mean(0)) @ question.row for a, b in shown)
    return Choice(pages, tuple(Match(a, b, float(score)) for (a, b), score in zip(shown, near)))


def windows(tokens: int, pages: int = WINDOW_PAGES) -> list[tuple[int, int]]:
    """Returns the token spans ``[start, end)`` of all windows of ``pages`` whole pages; each begins a page later.

    Windows overlap, so that text across a page boundary is whole in some window. A history of fewer whole pages is one
    window; a history without a whole page has none. If tokens are appended, windows are appended and none changes,
    except the single window of a short history.

    Raises:
        KVQuantError: ``pages`` is below 1 or ``tokens`` below 0.
    """
    if pages < 1 or tokens < 0:
        raise KVQuantError(f"windows of {pages} pages in {tokens} tokens: must be at least 1 and 0.")
    whole = tokens // PAGE_SIZE
    size = min(pages, whole)
    return [(n * PAGE_SIZE, (n + size) * PAGE_SIZE) for n in range(whole - size + 1)] if whole else []


def rank_windows(
    question: str, row: np.ndarray, pages: np.ndarray, index: Lexical, size: int = WINDOW_PAGES
) -> np.ndarray:
    """Returns the windows of pages, best first, ranked by embeddings and letters: int64 ``[windows]``.

    The numbers are indices into ``windows(tokens, size)``. Each page is embedded and indexed once. A window's embedding
    is the mean of its pages' embeddings; its terms are the terms of all its pages.

    Args:
        row: the question's embedding, float32 ``[D]``.
        pages: embeddings of the whole pages in order, float32 ``[pages, D]``.
        index: the index of the same pages' texts.

    Raises:
        KVQuantError: ``pages`` and ``index`` have different lengths, or ``size`` is below 1.
    """
    if len(pages) != len(index):
        raise KVQuantError(
            f"embeddings of {len(pages)} pages, but an index of {len(index)}: give both for the same pages."
        )
    both = index.scores(question, size), unit(runs(pages, size)) @ row
    return np.argsort(-fuse(*both), kind="stable")


def fuse(*scores: np.ndarray) -> np.ndarray:
    """Combines scores by several measures: returns the sum of each measure's standardized scores, float64 ``[items]``.

    Measures may have any scale, such as cosines of embeddings and ``Lexical.scores``. If only a few items stand out by
    one measure, this measure decides about them.

    Args:
        scores: float ``[items]`` each; a measure with equal scores for all items has no effect.

    Raises:
        KVQuantError: there are no scores, or their lengths differ.
    """
    if not scores or len({len(of) for of in scores}) != 1:
        raise KVQuantError(f"fusing scores of {[len(of) for of in scores]} items: give one or more of equal length.")
    total = np.zeros(len(scores[0]))
    for of in scores:
        if len(of) and np.ptp(of) > 0:
            total += (of - of.mean(dtype=np.float64)) / of.std(dtype=np.float64)
    return total


def choose_pages(
    ranked: Iterable[tuple[int, int]], tokens: int, budget: int, *, page: int, sink_pages: int, recent_pages: int
) -> np.ndarray:
    """Returns the chosen page numbers in order, int64 ``[min(budget, pages)]``; uses the whole budget.

    Args:
        ranked: token spans ``[start, end)`` of the history's segments, the most wanted first. If a segment does not fit
            whole, its first pages are chosen. If budget is left after all segments, the most recent pages are chosen.
        tokens: number of tokens of the history.
        budget: number of pages to choose.
        page: tokens of a page.
        sink_pages, recent_pages: number of first and last pages that are always chosen.

    Raises:
        KVQuantError: sinks and recent pages alone exceed the budget, or a span is outside the history.
    """
    count = -(-tokens // page)
    always = {*range(min(sink_pages, count)), *range(max(count - recent_pages, 0), count)}
    if budget < min(sink_pages + recent_pages, count):
        raise KVQuantError(
            f"{budget} pages: sinks ({sink_pages}) and recent pages ({recent_pages}) alone need more. Raise the budget."
        )
    if budget >= count:
        return np.arange(count)
    chosen = set(always)
    for start, end in ranked:
        if len(chosen) == budget:
            break
        if not 0 <= start < end <= tokens:
            raise KVQuantError(f"a segment of tokens {start} to {end} in a history of {tokens}.")
        for number in range(start // page, (end - 1) // page + 1):
            if len(chosen) < budget:
                chosen.add(number)
    for number in range(count - 1, -1, -1):
        if len(chosen) < budget:
            chosen.add(number)
    return np.array(sorted(chosen), dtype=np.int64)
