"""Choice of the pages that a request reads of its history: sinks, the windows nearest to its question, the recent end.

A server sees tokens and no turns, so it looks for windows of whole pages.
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

#: Pages of a window.
WINDOW_PAGES = 2
#: Windows that ``Choice.matches`` has at most.
MATCHES = 16


@dataclass(frozen=True)
class Match:
    """A window that the last question read: tokens ``start`` to ``end`` (excluded), and its cosine to the question."""

    start: int
    end: int
    score: float


@dataclass(frozen=True, eq=False)
class Question:
    """A question as it is looked for.

    Attributes:
        row: its embedding, float32 ``[D]``; zeros for one without words.
    """

    text: str
    row: np.ndarray


@dataclass(frozen=True, eq=False)
class Choice:
    """The pages that are read of a history.

    Attributes:
        pages: int64 ``[plan.pages]``, ascending.
        matches: windows among them, the nearest to the question first.
    """

    pages: np.ndarray
    matches: tuple[Match, ...]


def choose(question: Question, index: PageIndex, plan: Plan, *, size: int, sinks: int, recent: int) -> Choice:
    """Sinks, the most recent pages, and the windows that are nearest to the question (``rank_windows``).

    A question without words is near nothing: then the most recent pages are read. Takes 50 ms for 100,000 tokens.

    Args:
        index: of the history's pages.
        size: pages of a window.
        sinks: first pages that are read in any case, if there is room for them beside a window.
        recent: last pages that are read in any case.
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
    """Token spans ``[start, end)`` of all runs of ``pages`` whole pages, one page after the other.

    They overlap, so that what is said across two pages is whole in some window. A history of fewer whole pages is one
    window; one of none has none. More tokens append windows and change none, except the one of a short history.

    Raises:
        KVQuantError: fewer than one page, or than no tokens.
    """
    if pages < 1 or tokens < 0:
        raise KVQuantError(f"windows of {pages} pages in {tokens} tokens: give 1 page or more, 0 tokens or more.")
    whole = tokens // PAGE_SIZE
    size = min(pages, whole)
    return [(n * PAGE_SIZE, (n + size) * PAGE_SIZE) for n in range(whole - size + 1)] if whole else []


def rank_windows(
    question: str, row: np.ndarray, pages: np.ndarray, index: Lexical, size: int = WINDOW_PAGES
) -> np.ndarray:
    """Windows of pages, the first to be read first, by embeddings and letters: int64 ``[windows]``.

    Numbers are those of ``windows(tokens, size)``. A page is embedded and indexed once; a window's embedding is the
    mean of its pages', its terms are theirs together.

    Args:
        row: the question's embedding, float32 ``[D]``.
        pages: of the whole pages in order, float32 ``[pages, D]``.
        index: of the same pages' texts.

    Raises:
        KVQuantError: embeddings of as many pages as the index does not have, or a size below 1.
    """
    if len(pages) != len(index):
        raise KVQuantError(f"embeddings of {len(pages)} pages beside an index of {len(index)}: give both of the same.")
    both = index.scores(question, size), unit(runs(pages, size)) @ row
    return np.argsort(-fuse(*both), kind="stable")


def fuse(*scores: np.ndarray) -> np.ndarray:
    """Scores by several measures as one: float64 ``[items]``, the sum of each measure's standardized scores.

    Measures of any scale go together, such as cosines of embeddings and ``Lexical.scores``. Where only a few stand
    out by one, it decides about these.

    Args:
        scores: float ``[items]`` each; a measure that tells nothing apart counts nothing.

    Raises:
        KVQuantError: none, or of different lengths.
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
    """Page numbers in order, int64 ``[min(budget, pages)]``: always as many as the budget allows.

    Args:
        ranked: token spans ``[start, end)`` of the history's segments, the most wanted first. A segment whose pages do
            not all fit gives those that do, its first ones first. Rest of the budget after all: the most recent pages.
        tokens: of the history.
        budget: pages in all.
        page: tokens of a page.
        sink_pages, recent_pages: always there, at both ends.

    Raises:
        KVQuantError: a budget that sinks and tail alone exceed, or a span outside the history.
    """
    count = -(-tokens // page)
    always = {*range(min(sink_pages, count)), *range(max(count - recent_pages, 0), count)}
    if budget < min(sink_pages + recent_pages, count):
        raise KVQuantError(
            f"{budget} pages: sinks ({sink_pages}) and recent pages ({recent_pages}) alone need more; raise the budget."
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
