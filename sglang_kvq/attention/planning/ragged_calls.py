"""Plans calls of attention that each have a BF16 prefix followed by its new tokens, in one ragged buffer.

    request i:  [prefix_i; new_i]      causal attention aligns the last tokens of both sides

One call reads what fits the workspace. Further calls read the rest. They are not causal, because all of the rest is
visible, and their results are merged by log-sum-exp. Each call reads a proportional part of every request's prefix, so
it has work for the whole GPU. All but the last few have equal shapes, so they share a library's plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend.gather_pages import PageRead

#: New tokens of a request per program and head.
TILE = 128
#: Approximate limit on groups of requests per batch: each takes up to three plans, with 8 MiB of tables each.
MOST_GROUPS = 6

#: A call's q_lens, kv_lens and causal.
CallShape: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], bool]


@dataclass
class Call:
    """One call, planned on the host.

    Attributes:
        q: range ``[begin, end)`` of the new tokens that attend, in the batch.
        q_lens, kv_lens: lengths per request in the call.
        causal: False for the beginning of a longer prefix.
        first: True for the first call with these queries; it gives every query a key.
        last: True if no later call has any of the queries of the first one.
        pages: int32 ``[n, 4]``, a ``gather.PageRead`` each; empty if no prefix is read.
        positions: rows of the new tokens in the workspace; None if this call lacks them or uses them in place.
    """

    q: tuple[int, int]
    q_lens: list[int]
    kv_lens: list[int]
    causal: bool
    first: bool
    last: bool
    pages: np.ndarray
    positions: np.ndarray | None

    @property
    def gathers(self) -> bool:
        return len(self.pages) > 0

    @property
    def alone(self) -> bool:
        """True if no other call has these queries."""
        return self.first and self.last

    @property
    def shape(self) -> CallShape:
        """Key of the plan: calls of the same shape share one."""
        return tuple(self.q_lens), tuple(self.kv_lens), self.causal


def plan_calls(prefix_lens: list[int], new_lens: list[int], capacity: int, least_tiles: int = 1) -> list[Call]:
    """Plans the calls, in order; ``capacity`` is the workspace in tokens, whole pages.

    Consecutive requests form a group while they fit the workspace together. Beyond that, a group grows until it has
    ``least_tiles`` (``TILE`` new tokens of a request each; more if the batch has many). That is enough work for a call
    even if it reads little of each prefix. A group's first call has the new tokens and as much as fits of the prefixes'
    ends. New tokens without any prefix in that call are used in place.
    """
    calls: list[Call] = []
    tiles = [-(-new // TILE) for new in new_lens]
    least_tiles = max(least_tiles, sum(tiles) // MOST_GROUPS)
    begin = query = 0
    while begin < len(new_lens):
        end = begin + 1
        while end < len(new_lens):
            mine = slice(begin, end + 1)
            fits = sum(prefix_lens[mine]) + sum(new_lens[mine]) <= capacity
            # New tokens must leave room for prefixes, and one page per request must be a small part of a call.
            room = sum(new_lens[mine]) <= capacity // 2 and (end - begin) * 4 * PAGE_SIZE < capacity
            if not (fits or (room and sum(tiles[begin:end]) < least_tiles)):
                break
            end += 1
        prefix, new = np.array(prefix_lens[begin:end]), np.array(new_lens[begin:end])
        calls += _plan_group(begin, prefix, new, query, capacity)
        begin, query = end, query + int(new.sum())
    return calls


def _plan_group(request: int, prefix: np.ndarray, new: np.ndarray, query: int, capacity: int) -> list[Call]:
    """Plans the calls of requests ``request ...``, whose queries are ``query ...``."""
    start = np.zeros_like(prefix)
    room = max(capacity - int(new.sum()), 0)
    parts: list[tuple[np.ndarray, np.ndarray]] = []  # bounds in each prefix
    while (left := int((prefix - start).sum())) > room:
        if left <= capacity:
            parts.append((start, prefix))
            start = prefix
            break
        pages = (prefix - start) // PAGE_SIZE
        rounds = -(-(int(pages.sum()) - room // PAGE_SIZE) // (capacity // PAGE_SIZE))
        share = _shares(pages, rounds, room // PAGE_SIZE, capacity // PAGE_SIZE)
        for _ in range(rounds):
            end = start + share * PAGE_SIZE
            parts.append((start, end))
            start = end
    calls = [_causal(request, start, prefix, new, query)]
    calls += [_visible(request, *part, new, query) for part in parts]
    calls[-1].last = True
    return calls


def _shares(pages: np.ndarray, rounds: int, room: int, capacity: int) -> np.ndarray:
    """Returns the pages of each prefix that each of ``rounds`` calls reads, leaving about ``room`` pages in total."""
    total = int(pages.sum())
    most = -(-(total - room) // rounds)
    share = np.minimum(-(-pages * most // total), pages // rounds)
    return share if share.sum() <= capacity else pages * most // total


def _causal(request: int, start: np.ndarray, prefix: np.ndarray, new: np.ndarray, query: int) -> Call:
    """Plans the call of new tokens over themselves and the ends of their prefixes."""
    kv = prefix - start + new
    ends = np.cumsum(kv)
    pages = np.concatenate([_pages(request + i, *x) for i, x in enumerate(zip(start, prefix, ends - kv))])
    positions = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, new)]) if len(pages) else None
    return Call((query, query + int(new.sum())), new.tolist(), kv.tolist(), True, True, False, pages, positions)


def _visible(request: int, start: np.ndarray, end: np.ndarray, new: np.ndarray, query: int) -> Call:
    """Plans a call of new tokens over parts of their prefixes; leaves out requests at either end without a part."""
    some = np.flatnonzero(end > start)
    mine = slice(some[0], some[-1] + 1)
    query += int(new[: mine.start].sum())
    new, kv = new[mine], (end - start)[mine]
    bounds = zip(start[mine], end[mine], np.cumsum(kv) - kv)
    pages = np.concatenate([_pages(request + mine.start + i, *x) for i, x in enumerate(bounds)])
    return Call((query, query + int(new.sum())), new.tolist(), kv.tolist(), False, False, False, pages, None)


def _pages(request: int, begin: int, end: int, at: int) -> np.ndarray:
    """Returns the pages of a request's tokens ``[begin, end)``, to rows ``at ...``; ``begin`` starts a page."""
    index = np.arange(begin // PAGE_SIZE, -(-end // PAGE_SIZE) if end > begin else begin // PAGE_SIZE)
    start = index * PAGE_SIZE
    reads = PageRead(
        request=np.full_like(index, request),
        index=index,
        first=at + start - begin,
        count=np.minimum(PAGE_SIZE, end - start),
    )
    return np.stack(reads, axis=1)
