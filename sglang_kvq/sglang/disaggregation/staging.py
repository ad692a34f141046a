"""Staging memory for BF16 windows that are sent between two servers.

A transfer needs fixed addresses, but a page's BF16 slot may change. One *entry* holds the window of one request, page
by page, packed by ``PagePool.read_bf16``.
"""

from __future__ import annotations

from collections import deque

import torch

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.cache.pool import PACKED_TAIL, PagePool
from sglang_kvq.constants import PAGE_SIZE as P

#: Maximum number of windows in transfer at a time; SGLang lets later requests wait.
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
    """Returns the bytes of a ``Staging`` for ``entries`` windows of ``window_pages`` pages."""
    return entries * window_pages * (geometry.slot_bytes + 2 * PACKED_TAIL * torch.bfloat16.itemsize)


class Staging:
    """Entries for windows.

    Args:
        pool: the pool whose BF16 pages are staged.
        window_pages: pages of an entry.
        entries: number of entries.

    Attributes:
        table: BF16 ``[2, entries * window_pages, pool.packed_elements]``; axis 0 is K, V.
    """

    def __init__(self, pool: PagePool, window_pages: int, entries: int) -> None:
        self.window_pages, self.entries = window_pages, entries
        shape = (2, entries * window_pages, pool.packed_elements)
        self.table = torch.zeros(shape, dtype=torch.bfloat16, device=pool.device)
        self._free = deque(range(entries))  # the entry that was returned first is taken first
        #: Entries that were given back, in order; a launch that reads them may still run.
        self._read: deque[tuple[torch.cuda.Event, int]] = deque()

    def available(self) -> int:
        """Returns the number of entries that can be taken.

        It does not depend on the device, because all workers must admit the same requests.
        """
        return len(self._free) + len(self._read)

    def take(self) -> int:
        """Takes an entry and returns its number; waits until the device has read the window that was in it.

        Raises:
            RuntimeError: no entry is free.
        """
        if self._free:
            return self._free.popleft()
        if not self._read:
            raise RuntimeError("kv-quant: a request is transferred without room for its window. Please report this.")
        event, entry = self._read.popleft()
        event.synchronize()
        return entry

    def give_back(self, entry: int) -> None:
        """Frees an entry that launches on the current stream may still read."""
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
        """Returns pointers, bytes, and bytes per page of two buffers, keys and values.

        Their number is even because SGLang takes the first half for keys and the second half for values.
        """
        halves = list(self.table)
        return [x.data_ptr() for x in halves], [x.nbytes for x in halves], [x[0].nbytes for x in halves]
