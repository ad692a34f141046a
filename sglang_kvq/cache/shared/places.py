"""Pages of SGLang's page ids in a shared memory: a table, and a stack of free pages; all on the device.

An id gets a page when it leaves the allocator and gives it back when it returns, so what an id's tokens lie in may move
in between. The scheduler counts ids in use and never uses more than there are pages (``cache.shared.split``).

This is the reference implementation. ``kernels.tiers.events`` does the same for allocated and freed ids.
"""

from __future__ import annotations

import torch

from sglang_kvq.cache.pool import PagePool


class Places:
    """The ids of pages, and the free pages, of one pool with an arena; updates the pool's ``places``.

    Attributes:
        ids: int32 ``[pages + 1]``, the id that has a page; 0 for none.
        stack: int32 ``[pages + 1]``, of which the first ``count``, int64 ``[1]``, are the free pages.
    """

    def __init__(self, pool: PagePool) -> None:
        if pool.arena is None:
            raise ValueError("a pool without an arena has no places")
        self.table = pool.places
        self.ids = torch.zeros_like(self.table)
        self.stack = torch.zeros_like(self.table)
        self.count = torch.zeros(1, dtype=torch.int64, device=self.table.device)
        self.collect(pool.arena.pages)

    def clear(self, last_page: int) -> None:
        """Takes all pages from all ids; those up to ``last_page`` are free."""
        self.table.zero_()
        self.ids.zero_()
        self.collect(last_page)

    def collect(self, last_page: int) -> None:
        """Makes the stack of the free pages up to ``last_page``, the first one on top."""
        free = self.ids[1 : last_page + 1] == 0
        self.count.copy_(free.sum())
        at = torch.where(free, self.count - torch.cumsum(free, 0), len(self.stack) - 1)
        self.stack[at] = torch.arange(1, last_page + 1, dtype=torch.int32, device=free.device)

    def allocate(self, ids: torch.Tensor) -> torch.Tensor:
        """Gives ids int64 ``[n]``, all different, the pages on top of the stack; returns how many got none."""
        at = self.count - 1 - torch.arange(len(ids), device=ids.device)
        pages = torch.where(at < 0, 0, self.stack[at.clamp(min=0)])
        self.table[ids] = pages
        self.ids[pages.long()] = ids.int()
        self.ids[0].fill_(0)
        missing = (at < 0).sum()
        self.count += missing - len(ids)
        return missing

    def free(self, ids: torch.Tensor) -> None:
        """Takes the pages of ids int64 ``[n]``, all different, back; ids without one have nothing to give."""
        pages = self.table[ids].long()
        had = pages > 0
        at = torch.where(had, self.count - 1 + torch.cumsum(had, 0), len(self.stack) - 1)
        self.stack[at] = pages.int()
        self.count += had.sum()
        self.ids.index_fill_(0, pages, 0)
        self.table.index_fill_(0, ids, 0)

    def crowded(self, last_page: int, last_used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the used pages behind ``last_page`` int64 ``[n]``, 0 for free ones, and free pages before it.

        A used page has its own free page, or 0 if there are too few. No page behind ``last_used`` is used.
        """
        behind = torch.arange(last_page + 1, last_used + 1, device=self.ids.device)
        source = torch.where(self.ids[behind] > 0, behind, 0)
        free = self.ids[: last_page + 1] == 0
        free[0].fill_(False)
        rank = torch.cumsum(free, 0) - 1
        room = torch.zeros(len(self.ids) + 1, dtype=torch.int64, device=self.ids.device)
        room[torch.where(free, rank, len(room) - 1)] = torch.arange(last_page + 1, device=self.ids.device)
        nth = torch.cumsum(source > 0, 0) - 1
        return source, torch.where((source > 0) & (nth < free.sum()), room[nth.clamp(min=0)], 0)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Gives the ids of pages ``source`` int64 ``[n]`` the pages ``target`` instead; 0 for none in both."""
        ids = self.ids[source].long()
        self.table[ids] = target.int()
        self.table[0].fill_(0)
        self.ids[target] = ids.int()
        self.ids.index_fill_(0, source, 0)
