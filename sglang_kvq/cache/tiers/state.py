"""The tables of the tiers and their basic operations: compute windows, assign slots to pages, write records.

``manager.TierManager`` calls these operations. All tables are on the device, and every decision is a tensor operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sglang_kvq.cache.pending import MovedBF16Pages
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.select_smallest import hand_out
from sglang_kvq.cache.shared.places import Places
from sglang_kvq.constants import NEVER
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError

#: Added to the stamp of a sink's BF16 copy, so that outside the windows of rows in use, sinks are taken last.
SINK_BONUS = 1 << 40
#: Added to the key of a page in the window of a row in use, times the page's level (``TierState.held``).
SOFT_BONUS = 1 << 41

QuantizeSlots: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
RestorePages: TypeAlias = Callable[[torch.Tensor], None]
#: The pages of windows: index in the request, whether the page exists, and the page, each ``[rows, window]``.
Window: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class TierCounts:
    """A snapshot for metrics and tests, read on the host."""

    slots_used: int
    pages_quantized: int  #: pages that have a valid record now
    records_written: int  #: pages quantized since the start
    errors: int
    pages_lost: int  #: window pages of running requests that are read from records, because they lost their BF16 copies
    prefix_bf16: int  #: stored prefix tokens that prefills have read in BF16 since the start
    prefix_quantized: int  #: stored prefix tokens that prefills have read from records since the start


class TierState:
    """Tables of one ``PagePool``: each page's slot and its last use, which pages have records, and rows in use.

    Args:
        pool: the pool; its ``page_slot``, ``row_sink_end`` and ``row_history_end`` are updated too.
        sink_pages, recent_pages: the window, in pages.
        quantize_slots: ``AttentionOps.quantize_slots`` of the backend in use.
        restore_pages: ``AttentionOps.restore_pages`` of the backend in use; with None, no first tokens are kept.
        prefill_pages: pages before the window that a prefill reads in BF16 if their BF16 copies still exist.
        kept_pages: recent pages whose BF16 copies a row in use never loses; None: all.
        written: tokens that a step writes, 1 or the number of drafts; their pages never lose their BF16 copies.
    """

    def __init__(
        self,
        pool: PagePool,
        sink_pages: int,
        recent_pages: int,
        quantize_slots: QuantizeSlots,
        restore_pages: RestorePages | None = None,
        prefill_pages: int = 0,
        kept_pages: int | None = None,
        written: int = 1,
    ) -> None:
        self.pool = pool
        self.sink_pages, self.recent_pages, self.prefill_pages = sink_pages, recent_pages, prefill_pages
        self.kept_pages, self.written = recent_pages if kept_pages is None else kept_pages, written
        self.quantize_slots, self.restore_pages = quantize_slots, restore_pages
        #: Kept first tokens; None if the format does not need them, or if the first page is no sink.
        self.sink_cache = None if restore_pages is None or not sink_pages else pool.sink_cache
        device, rows = pool.device, pool.req_to_token.shape[0]
        self.slot_page = torch.zeros(pool.slots + 1, dtype=torch.int64, device=device)  # 0: free
        self.slot_stamp = torch.zeros(pool.slots + 1, dtype=torch.int64, device=device)
        self.page_valid = torch.zeros(pool.pages + 1, dtype=torch.bool, device=device)
        #: Pages that begin a sequence, if first tokens are kept.
        self.page_first = torch.zeros(1 if self.sink_cache is None else pool.pages + 1, dtype=torch.bool, device=device)
        #: The table from page ids to pages; None if ids are pages.
        self.places = None if pool.arena is None else Places(pool)
        #: The first slot that a BF16 page may have.
        self.first_slot = 1 if pool.arena is None else pool.arena.first_slot(pool.arena.pages)
        self.row_len = torch.zeros(rows, dtype=torch.int64, device=device)
        self.errors = torch.zeros((), dtype=torch.int64, device=device)
        self.records_written = torch.zeros((), dtype=torch.int64, device=device)
        #: Stored prefix tokens that prefills have read: in BF16, and from records.
        self.prefix_read = torch.zeros(2, dtype=torch.int64, device=device)
        #: Moves of BF16 copies that rows already show, but that come after the event that is applied now.
        self.moving: Sequence[MovedBF16Pages] = ()
        self.steps = 0
        self._set_up()

    def _set_up(self) -> None:
        """Allocates the state that a subclass adds."""

    @property
    def last_page(self) -> int:
        """The last page that fits before the first slot."""
        return self.pool.pages if self.pool.arena is None else self.pool.arena.last_page(self.first_slot)

    @property
    def live_places(self) -> Places:
        """The table from page ids to pages.

        Raises:
            KVQuantError: ids are pages in this pool.
        """
        if self.places is None:
            raise KVQuantError("Page ids are pages here: nothing allocates them, and no boundary moves.")
        return self.places

    def pages_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Converts page ids int64 ``[n]`` to pages."""
        return ids if self.places is None or ids.shape[0] == 0 else self.pool.places[ids].long()

    # -- windows ------------------------------------------------------------------------------------

    def history_pages(self, lens: torch.Tensor, more: torch.Tensor | int = 0) -> torch.Tensor:
        """Returns the end of the history, in pages, of requests with ``lens`` tokens, if every BF16 copy exists.

        more: further recent pages before the window that are read in BF16.
        """
        return torch.clamp((lens // P) - self.recent_pages - more, min=self.sink_pages)

    def pages_at(self, rows: torch.Tensor, index: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
        """Returns the pages at indices ``[n, m]`` of the rows ``[n]``, 0 where no page exists."""
        token = torch.where(exists, index * P, 0)
        ids = self.pool.req_to_token[rows[:, None], token].long() // P
        return torch.where(exists, self.pool.places[ids].long(), 0)

    def window(self, rows: torch.Tensor, lens: torch.Tensor, more: torch.Tensor | int = 0) -> Window:
        """Returns the window of rows ``[n]`` with ``lens`` tokens: page index, exists, page, each ``[n, window]``.

        more: further recent pages before the window; int64 ``[n]``, at most ``prefill_pages``, or 0.
        """
        device = rows.device
        begin = self.history_pages(lens, more)[:, None]
        count = self.recent_pages + 1 + (0 if isinstance(more, int) else self.prefill_pages)
        sinks = torch.arange(self.sink_pages, device=device).expand(len(rows), -1)
        index = torch.cat([sinks, begin + torch.arange(count, device=device)], dim=1)
        exists = (index * P < lens[:, None]) & (rows > 0)[:, None]
        return index, exists, self.pages_at(rows, index, exists)

    @property
    def soft_pages(self) -> int:
        """Number of recent pages of a row in use whose BF16 copies may be taken."""
        return self.recent_pages - self.kept_pages

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the BF16 slots of the windows of rows in use, and the level of each; int64 ``[n]`` each.

        Slots of low level are taken first. Levels rise towards the end of a window; slots whose level is above
        ``soft_pages`` are pinned. Slot 0 means no slot.
        """
        all_rows = torch.arange(len(self.row_len), device=self.row_len.device)
        lens = self.row_len[:, None]
        index, _, pages = self.window(all_rows, self.row_len)
        pages = self._before_moves(pages)
        pinned = (index < self.sink_pages) | (index >= (lens - self.written).clamp(min=0) // P - self.kept_pages)
        levels = torch.where(pinned, self.soft_pages, index - lens // P + self.recent_pages) + 1
        return self.pool.page_slot[pages].clamp(min=0).long().flatten(), levels.flatten()

    def _before_moves(self, pages: torch.Tensor) -> torch.Tensor:
        """Replaces those of pages to which ``moving`` will move BF16 copies by the pages that have the copies now."""
        if not self.moving:
            return pages
        slots = self.pool.page_slot
        holder = torch.arange(len(slots), device=slots.device)
        for own, kept in self._moves():
            own = holder[own]
            waits = (slots[own] > 0) & (slots[kept] < 0) & (holder[kept] == kept)
            holder = holder.index_put((torch.where(waits, kept, 0),), torch.where(waits, own, 0))
        return holder[pages]

    def gives_way(self, pages: torch.Tensor) -> torch.Tensor:
        """Returns bool ``[n]``: pages that ``moving`` replaces by pages that have BF16 copies already."""
        found = torch.zeros_like(pages, dtype=torch.bool)
        for own, kept in self._moves():
            there = (own != kept) & (self.pool.page_slot[kept] > 0)
            found |= ((pages[:, None] == own) & there).any(1)
        return found

    def _moves(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the pages of each of ``moving``: int64 ``[n]`` that are replaced, and those that replace them."""
        for move in self.moving:
            yield tuple(self.pages_of(ids.to(self.pool.device, non_blocking=True)) for ids in move)

    # -- slots for pages, records for pages ---------------------------------------------------------

    def assign(
        self,
        pages: torch.Tensor,
        need: torch.Tensor,
        pinned: torch.Tensor,
        held: torch.Tensor | None = None,
        spared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gives BF16 pages to those of ``pages`` that ``need`` one; takes the least recently used slots.

        Pages that lose their BF16 copies are quantized if they have no record, and their first tokens are kept.

        Args:
            pages: int64 ``[n]``; need: bool ``[n]``.
            pinned: slots that are never taken.
            held: int64 ``[2, m]``, slots of windows, and numbers to add to their keys; of a repeated slot, the largest
                number counts.
            spared: bool, first-token entries that are not reused; see ``SinkTokenCache.keep``.

        Returns:
            bool ``[n]``: True for pages that need a BF16 page and got none.
        """
        priority = torch.where(self.slot_page > 0, self.slot_stamp, -1)
        if held is not None:
            priority += torch.zeros_like(priority).scatter_reduce_(0, held[0], held[1], "amax")
        priority.index_fill_(0, pinned.clamp(min=0).long(), NEVER)
        priority[: self.first_slot].fill_(NEVER)
        # Admission guarantees enough BF16 pages, so callers count a page that gets none as an error.
        slots, given = hand_out(priority, need)
        old = torch.where(given, self.slot_page[slots], 0)
        self.quantize((old > 0) & ~self.page_valid[old], slots, old)
        self.page_valid.index_fill_(0, old, True)
        self.pool.page_slot.index_fill_(0, old, -1)
        takers = torch.where(given, pages, 0)
        self.pool.page_slot[takers] = slots.int()
        self.pool.page_slot[0].fill_(0)
        self.slot_page[slots] = takers
        if self.sink_cache is not None:  # the BF16 pages still hold these first tokens, because the batch writes later
            first, tokens = (old > 0) & self.page_first[old], self.pool.bf16_pages[:, slots, :, :, 0]
            self.sink_cache.keep(old, first, tokens, self.pool.page_slot, self.steps, spared)
        return need & ~given

    def quantize(self, mask: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Quantizes the BF16 pages of the masked (slot, page) pairs; the host does not read the number of pairs."""
        at = torch.where(mask, torch.cumsum(mask, 0) - 1, len(mask))
        compact = slots.new_zeros(2, len(mask) + 1)
        compact[0, at], compact[1, at] = slots, pages
        count = mask.sum()
        self.records_written += count
        self.quantize_slots(compact[0, :-1], compact[1, :-1], count.view(1))

    def quantize_in(self, slots: torch.Tensor) -> None:
        """Quantizes the pages in BF16 slots int64 ``[n]``, 0 for none; a repeated slot is quantized once."""
        marked = torch.zeros_like(self.slot_page, dtype=torch.bool)
        marked.index_fill_(0, slots.clamp(min=0), True)
        marked[0].fill_(False)
        self.quantize(marked, torch.arange(len(marked), device=slots.device), self.slot_page)
        self.page_valid.index_fill_(0, torch.where(marked, self.slot_page, 0), True)

    def ensure_records(self, source: torch.Tensor) -> torch.Tensor:
        """Quantizes those of pages int64 ``[n]`` that have no records; returns all their BF16 slots, -1 for none."""
        slots = self.pool.page_slot[source].long()
        missing = ~self.page_valid[source]
        self.errors += (missing & (slots <= 0)).sum()
        self.quantize_in(torch.where(missing, slots, 0))
        return slots

    # -- looking inside -----------------------------------------------------------------------------

    def count(self) -> torch.Tensor:
        """Returns the fields of ``TierCounts``, int64 ``[7]``, without waiting for the device."""
        used, valid = (self.slot_page > 0).sum(), self.page_valid[1:].sum()
        counts = torch.stack([used, valid, self.records_written, self.errors, self._pages_lost()])
        return torch.cat([counts, self.prefix_read])

    def _pages_lost(self) -> torch.Tensor:
        """Returns how many window pages of rows in use are read from records."""
        history = self.history_pages(self.row_len)
        whole = self.row_len // P
        sinks = (whole.clamp(max=self.sink_pages) - self.pool.row_sink_end // P).clamp(min=0)
        recent = (self.pool.row_history_end // P - history).clamp(min=0)
        return torch.where(self.row_len > 0, sinks + recent, 0).sum()

    def counts(self) -> TierCounts:
        """Returns the counters. Waits for the device."""
        return TierCounts(*self.count().tolist())
