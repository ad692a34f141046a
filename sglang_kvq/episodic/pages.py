"""Choice of the pages of a stored history that enter a request: sinks, ranked segments, the recent tail."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglang_kvq.errors import KVQuantError


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
