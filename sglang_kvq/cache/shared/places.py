"""Table from SGLang's page ids to pages of a shared memory, and a stack of free pages; all on the device.

An id gets a page when it leaves the allocator, and loses that page when it returns. In between, the id may get another
page, because the boundary moves. The scheduler counts the ids in use and never uses more ids than there are pages
(``cache.shared.split``).

This is the reference implementation. ``kernels.tiers.events`` does the same for allocated and freed ids.
"""

from __future__ import annotations

import torch

from sglang_kvq.cache.pool import PagePool


class Places:
    """The ids of pages and the free pages of a pool with an arena; also updates the pool's ``places``.

    Attributes:
        table: the pool's ``places``, the page of each id.
        ids: int32 ``[pages + 1]``, the id of each page; 0 for none.
        stack: int32 ``[pages + 1]``; the first ``count`` entries are the free pages.
        count: int64 ``[1]``, number of free pages.
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
        """Takes all pages from their ids; the pages up to ``last_page`` are then free."""
        self.table.zero_()
        self.ids.zero_()
        self.collect(last_page)

    def collect(self, last_page: int) -> None:
        """Rebuilds the stack from the free pages up to ``last_page``, with the first one on top."""
        free = self.ids[1 : last_page + 1] == 0
        self.count.copy_(free.sum())
        at = torch.where(free, self.count - torch.cumsum(free, 0), len(self.stack) - 1)
        self.stack[at] = torch.arange(1, last_page + 1, dtype=torch.int32, device=free.device)

    def allocate(self, ids: torch.Tensor) -> torch.Tensor:
        """Gives the pages on top of the stack to ids int64 ``[n]``, all different; returns how many ids got none."""
        at = self.count - 1 - torch.arange(len(ids), device=ids.device)
        pages = torch.where(at < 0, 0, self.stack[at.clamp(min=0)])
        self.table[ids] = pages
        self.ids[pages.long()] = ids.int()
        self.ids[0].fill_(0)
        missing = (at < 0).sum()
        self.count += missing - len(ids)
        return missing

    def free(self, ids: torch.Tensor) -> None:
        """Takes back the pages of ids int64 ``[n]``, all different; ids without a page are skipped."""
        pages = self.table[ids].long()
        had = pages > 0
        at = torch.where(had, self.count - 1 + torch.cumsum(had, 0), len(self.stack) - 1)
        self.stack[at] = pages.int()
        self.count += had.sum()
        self.ids.index_fill_(0, pages, 0)
        self.table.index_fill_(0, ids, 0)

    def crowded(self, last_page: int, last_used: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the used pages after ``last_page``, and for each a free page up to ``last_page``; int64 ``[n]`` each.

        Entries of free pages after ``last_page`` are 0. If there are too few free pages, the target is 0. No page after
        ``last_used`` is in use.
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
        """Gives the ids of pages ``source`` int64 ``[n]`` the pages ``target`` instead; pairs of 0 are skipped."""
        ids = self.ids[source].long()
        self.table[ids] = target.int()
        self.table[0].fill_(0)
        self.ids[target] = ids.int()
        self.ids.index_fill_(0, source, 0)
