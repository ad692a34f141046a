"""Room in which BF16 windows of requests lie between two servers: BF16 slots change, and a transfer needs addresses.

One *entry* holds the window of one request, page by page, packed by ``PagePool.read_bf16``.
"""

from __future__ import annotations

from collections import deque

import torch

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.cache.pool import PACKED_TAIL, PagePool
from sglang_kvq.constants import PAGE_SIZE as P

#: Most requests whose windows are on their way at a time; SGLang lets later ones wait.
MOST_ENTRIES = 32


def window_of(tokens: int, sink_pages: int, recent_pages: int) -> list[int]:
    """Returns the places of a request's window pages, ascending: sinks, recent pages and the page being filled.

    The tiers pin the same pages (``TierState.window``).
    """
    begin = max(tokens // P - recent_pages, sink_pages)
    places = [*range(sink_pages), *range(begin, begin + recent_pages + 1)]
    return [place for place in places if place * P < tokens]


def entries_for(requests: int | None) -> int:
    """Returns the number of entries for ``--max-running-requests``."""
    return MOST_ENTRIES if requests is None else max(2, min(requests, MOST_ENTRIES))


def staging_bytes(geometry: KVGeometry, window_pages: int, entries: int) -> int:
    """Returns the bytes of ``Staging`` for windows of so many pages."""
    return entries * window_pages * (geometry.slot_bytes + 2 * PACKED_TAIL * torch.bfloat16.itemsize)


class Staging:
    """Entries for windows.

    Args:
        pool: whose BF16 pages are staged.
        window_pages: pages of an entry.
        entries: windows that fit.

    Attributes:
        table: BF16 ``[2, entries * window_pages, pool.packed_elements]``; axis 0 is K, V.
    """

    def __init__(self, pool: PagePool, window_pages: int, entries: int) -> None:
        self.window_pages, self.entries = window_pages, entries
        shape = (2, entries * window_pages, pool.packed_elements)
        self.table = torch.zeros(shape, dtype=torch.bfloat16, device=pool.device)
        self._free = deque(range(entries))  # the one given back first is taken first
        self._read: deque[tuple[torch.cuda.Event, int]] = deque()

    def available(self) -> int:
        """Returns the number of entries that can be taken now."""
        while self._read and self._read[0][0].query():
            self._free.append(self._read.popleft()[1])
        return len(self._free)

    def take(self) -> int:
        """Removes an entry from the free ones.

        Raises:
            RuntimeError: there is none.
        """
        if not self.available():
            raise RuntimeError("kv-quant: a request is transferred without room for its window; please report this.")
        return self._free.popleft()

    def give_back(self, entry: int) -> None:
        """Returns an entry that the current stream may still read."""
        if self.table.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._read.append((event, entry))
        else:
            self._free.append(entry)

    def rows(self, entry: int, pages: int) -> range:
        """Returns the rows of ``table`` that hold an entry's first ``pages`` pages."""
        return range(entry * self.window_pages, entry * self.window_pages + pages)

    def buffers(self) -> tuple[list[int], list[int], list[int]]:
        """Returns pointers, bytes, and bytes of a page, of keys and of values: an even number, so that SGLang's halves
        of K and V fit.
        """
        halves = list(self.table)
        return [x.data_ptr() for x in halves], [x.nbytes for x in halves], [x[0].nbytes for x in halves]
