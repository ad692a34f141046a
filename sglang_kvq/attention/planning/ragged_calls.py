"""Plans attention calls over one ragged buffer, which holds each request's BF16 prefix followed by its new tokens.

    request i:  [prefix_i; new_i]      causal attention aligns the last query with the last key.

The first call reads the new tokens and the part of the prefixes that fits the workspace. Further calls read the rest.
They are not causal, because every new token sees all of the rest, and their results are merged by log-sum-exp. Each
call reads a proportional part of every request's prefix, so it has work for the whole GPU. All calls but the last few
have equal shapes, so they share a library's plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TypeAlias

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend.gather_pages import PageRead

#: New tokens of a request that one program handles for one head.
TILE = 128
#: Approximate limit on groups of requests per batch: a group takes up to three plans, with 8 MiB of tables each.
MOST_GROUPS = 6
#: Bytes of new keys and values whose copy takes about as long as one more call (``extend_costs.H200``).
CALL_BYTES = 10 << 20
#: Most runs of requests without a prefix that attend in place in one batch, if others in the batch have a prefix.
MOST_RUNS = 6

#: A call's q_lens, kv_lens and causal.
CallShape: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], bool]


@dataclass
class Call:
    """One call, planned on the host.

    Attributes:
        q: range ``[begin, end)`` of the batch's new tokens that attend in this call.
        q_lens, kv_lens: lengths per request in the call.
        causal: True for the call with the new tokens; False for a call that reads only parts of prefixes.
        first: True for the first call with these queries, in which every query sees at least one key.
        last: True if no later call has any of the first call's queries.
        pages: int32 ``[n, 4]``, one ``gather.PageRead`` per row; empty if no prefix is read.
        positions: rows of the new tokens in the workspace; None if this call does not read new tokens, or reads them
            in place.
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
        """Key of the library's plan: calls of the same shape share a plan."""
        return tuple(self.q_lens), tuple(self.kv_lens), self.causal


def in_place_tokens(kv_heads: int, head_dim: int) -> int:
    """Returns the new tokens whose copy takes about as long as one more call; ``kv_heads`` counts this worker's."""
    return CALL_BYTES // (4 * kv_heads * head_dim)


def plan_calls(
    prefix_lens: list[int], new_lens: list[int], capacity: int, least_tiles: int, in_place: int
) -> list[Call]:
    """Returns the calls in order.

    Consecutive requests form a group while they fit the workspace together. A group that does not fit may still grow
    until it has ``least_tiles`` tiles. That is enough work for a call even if the call reads little of each prefix. A
    group's first call reads the new tokens and as much of the prefixes' ends as fits. If that call reads no prefix, it
    reads the new tokens in place. So a long run of requests without a prefix has groups of its own (``_ends``):
    copying its tokens would take longer than another call.

    Args:
        capacity: tokens of the workspace, whole pages.
        least_tiles: tiles of ``TILE`` new tokens of one request; raised if the batch has many.
        in_place: see ``in_place_tokens``.
    """
    calls: list[Call] = []
    tiles = [-(-new // TILE) for new in new_lens]
    least_tiles = max(least_tiles, sum(tiles) // MOST_GROUPS)
    ends = _ends(prefix_lens, new_lens, in_place)
    begin = query = 0
    while begin < len(new_lens):
        end = begin + 1
        while end < ends[begin]:
            mine = slice(begin, end + 1)
            fits = sum(prefix_lens[mine]) + sum(new_lens[mine]) <= capacity
            # New tokens must leave room for prefixes; one page of each request must be a small part of a call.
            room = sum(new_lens[mine]) <= capacity // 2 and (end - begin) * 4 * PAGE_SIZE < capacity
            if not (fits or (room and sum(tiles[begin:end]) < least_tiles)):
                break
            end += 1
        prefix, new = np.array(prefix_lens[begin:end]), np.array(new_lens[begin:end])
        calls += _plan_group(begin, prefix, new, query, capacity)
        begin, query = end, query + int(new.sum())
    return calls


def one_call(prefix_lens: list[int], new_lens: list[int]) -> Call:
    """Returns the only call of a batch that fits the workspace; it copies new tokens even if no prefix is stored."""
    prefix, new = np.array(prefix_lens), np.array(new_lens)
    call = _causal(0, np.zeros_like(prefix), prefix, new, 0)
    call.last = True
    if call.positions is None:
        call.positions = _positions(np.cumsum(prefix + new), new)
    return call


def _ends(prefix_lens: list[int], new_lens: list[int], in_place: int) -> list[int]:
    """Returns for each request the end of its section; a group lies in one section.

    A long run of requests without a prefix is a section, and so are the requests between two of them. A run in the
    middle of the batch must be twice as long, because it adds two calls.
    """
    least = max(in_place, sum(new_lens) // MOST_RUNS)
    sections: list[int] = []  # numbers of requests
    after_run, done = True, 0
    for stored, run in groupby(zip(prefix_lens, new_lens), key=lambda lens: lens[0] > 0):
        news = [new for _, new in run]
        calls = 2 if done > 0 and done + len(news) < len(new_lens) else 1
        alone = not stored and sum(news) >= calls * least
        if alone or after_run:
            sections.append(0)
        sections[-1] += len(news)
        after_run, done = alone, done + len(news)
    return [end for count, end in zip(sections, accumulate(sections)) for _ in range(count)]


def _plan_group(request: int, prefix: np.ndarray, new: np.ndarray, query: int, capacity: int) -> list[Call]:
    """Plans the calls of one group, whose first request is ``request`` and whose first query is ``query``."""
    start = np.zeros_like(prefix)
    room = max(capacity - int(new.sum()), 0)
    parts: list[tuple[np.ndarray, np.ndarray]] = []  # per further call: begins and ends in each prefix
    while (left := int((prefix - start).sum())) > room:
        if left <= capacity:
            parts.append((start, prefix))
            start = prefix
            break
        pages = (prefix - start) // PAGE_SIZE
        # At least one, because the parts of pages at the prefixes' ends may exceed the room that whole pages leave.
        rounds = max(-(-(int(pages.sum()) - room // PAGE_SIZE) // (capacity // PAGE_SIZE)), 1)
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
    """Returns how many pages of each prefix each of ``rounds`` calls reads; about ``room`` pages remain in total."""
    total = int(pages.sum())
    most = max(-(-(total - room) // rounds), 1)
    share = np.minimum(-(-pages * most // total), pages // rounds)
    return share if share.sum() <= capacity else pages * most // total


def _causal(request: int, start: np.ndarray, prefix: np.ndarray, new: np.ndarray, query: int) -> Call:
    """Plans the causal call, in which new tokens attend to themselves and the ends of their prefixes."""
    kv = prefix - start + new
    ends = np.cumsum(kv)
    pages = np.concatenate([_pages(request + i, *x) for i, x in enumerate(zip(start, prefix, ends - kv))])
    positions = _positions(ends, new) if len(pages) else None
    return Call((query, query + int(new.sum())), new.tolist(), kv.tolist(), True, True, False, pages, positions)


def _positions(ends: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns rows of the requests' new tokens, which are their last keys."""
    return np.concatenate([np.arange(end - n, end) for end, n in zip(ends, new)])


def _visible(request: int, start: np.ndarray, end: np.ndarray, new: np.ndarray, query: int) -> Call:
    """Plans a call in which new tokens attend to parts of their prefixes only.

    The call leaves out the first and last requests of the group that have no such part.
    """
    some = np.flatnonzero(end > start)
    mine = slice(some[0], some[-1] + 1)
    query += int(new[: mine.start].sum())
    new, kv = new[mine], (end - start)[mine]
    bounds = zip(start[mine], end[mine], np.cumsum(kv) - kv)
    pages = np.concatenate([_pages(request + mine.start + i, *x) for i, x in enumerate(bounds)])
    return Call((query, query + int(new.sum())), new.tolist(), kv.tolist(), False, False, False, pages, None)


def _pages(request: int, begin: int, end: int, at: int) -> np.ndarray:
    """Returns reads of a request's tokens ``[begin, end)`` into rows from ``at``; ``begin`` starts a page."""
    index = np.arange(begin // PAGE_SIZE, -(-end // PAGE_SIZE) if end > begin else begin // PAGE_SIZE)
    start = index * PAGE_SIZE
    reads = PageRead(
        request=np.full_like(index, request),
        index=index,
        first=at + start - begin,
        count=np.minimum(PAGE_SIZE, end - start),
    )
    return np.stack(reads, axis=1)
