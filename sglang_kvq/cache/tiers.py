"""Assignment of BF16 pages to pages, and of each request's ranges to the pool they are read from.

Where records and BF16 pages share one memory (``cache.shared``), SGLang's page ids name no memory: a table gives each a
page. Everything else here counts pages.

All state lives on the device and every decision is a tensor operation, so a step never waits for the host. The
scheduler only *records* events on pages (``PendingOps``). The next forward pass applies them, in order, on the stream
that runs the model. So demotion is safe under overlap scheduling: no page loses its BF16 copy while an earlier batch
still reads it.

Rules (docs/design.md has the reasons):

* A request's *window* is its sink pages, its last ``recent_tokens`` (rounded up to whole pages) and the page being
  filled. Of rows in use, sinks, the last ``kept_pages`` recent pages and the pages being written are pinned. Every
  other BF16 copy may be taken: first those in no window, least recently used first, sinks last; then recent pages of
  rows in use, those farthest from the end first, so that all windows shrink evenly.
* Taking a BF16 copy quantizes its page first if the page has no valid record yet. So pressure never loses a token.
* A page that begins a sequence keeps its first token when its BF16 copy is taken, if the format requires it
  (``cache.sink_token_cache``). A prefill that reads such a page restores its BF16 copy from its record and that token.
* A request reads records in one range ``[sink_end, history_end)``. Pages in it without a valid record are quantized
  before the batch runs. If a window page has lost its BF16 copy (a prefix hit long after), the range's end moves past
  it.
* A prefill of more than one token also reads BF16 pages up to ``prefill_pages`` further back. Pages that recently left
  the window mostly still have one, with the values as written. Nothing is pinned for that.

This is the CPU path and the oracle of ``triton_tiers``, which decides the same on a GPU in a few launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from sglang_kvq.cache.fold import fold_pages
from sglang_kvq.cache.pending import (
    AllocatedPages,
    ArrivedRequest,
    CopiedPages,
    Fill,
    FoldedPages,
    FreedPages,
    MovedBF16Pages,
    MovedBoundary,
    PendingOps,
    keep_alive,
)
from sglang_kvq.cache.pool import PACKED_TAIL, PagePool
from sglang_kvq.cache.select_smallest import hand_out
from sglang_kvq.cache.shared.places import Places
from sglang_kvq.cache.sink_token_cache import SinkTokenCache
from sglang_kvq.constants import NEVER
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError

#: Added to the stamp of a sink's BF16 copy, so that it is taken after every window page.
SINK_BONUS = 1 << 40
#: Added once for each step towards the end of a window, to the key of a page in the window of a row in use.
SOFT_BONUS = 1 << 41
#: BF16 pages, and pages, that are copied at a time when the boundary moves: about 100 MB of a large model.
_COPIED_SLOTS, _COPIED_PAGES = 8, 64

QuantizeSlots: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
RestorePages: TypeAlias = Callable[[torch.Tensor], None]
#: Page index, whether it exists, page id, each ``[rows, window]``.
Window: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def read_lens(prefix_lens: torch.Tensor | None, seq_lens: torch.Tensor) -> torch.Tensor:
    """Returns the lengths that a batch reads from pages; int ``[batch]`` each. See ``TierManager._plan``."""
    return seq_lens if prefix_lens is None else torch.where(seq_lens - prefix_lens == 1, seq_lens, prefix_lens)


@dataclass
class TierCounts:
    """A snapshot for metrics and tests, read on the host."""

    slots_total: int
    slots_used: int
    pages_quantized: int  #: pages that have a valid record now
    records_written: int  #: pages quantized since the start
    errors: int
    pages_lost: int  #: pages of running requests' windows that are read from records: their BF16 pages were taken
    prefix_bf16: int  #: tokens before their own that prefills have read in BF16 since the start
    prefix_quantized: int  #: and from records


@dataclass
class _CopiedBF16Pages:
    """BF16 content for copies of pages int64 ``[n]``: ``bf16_pages`` ``[layers, n, 2, kv_heads, PAGE_SIZE, D]``.

    wanted: bool ``[n]``; False if the source had none, or if the page no longer is this copy. bonus: int64 ``[n]``,
    added to the stamps of their BF16 copies.
    """

    pages: torch.Tensor
    wanted: torch.Tensor
    bf16_pages: torch.Tensor
    bonus: torch.Tensor


@dataclass
class _CopiedSinkToken:
    """A first token ``[layers, 1, 2, kv_heads, D]`` for the page ``pages`` int64 ``[1]``, in case it gets no BF16 copy.

    wanted: bool ``[1]``; False if the source's is unknown, or if the page no longer is this copy.
    """

    pages: torch.Tensor
    wanted: torch.Tensor
    token: torch.Tensor


class TierManager:
    """Assigns BF16 pages in one ``PagePool``.

    Args:
        pool: the manager updates its ``page_slot``, ``row_sink_end`` and ``row_history_end``.
        sink_pages, recent_pages: the window, in pages.
        quantize_slots: ``AttentionOps.quantize_slots`` of the backend in use.
        restore_pages: the backend's ``restore_pages``; None keeps no first tokens.
        prefill_pages: pages before the window that a prefill reads from BF16 pages if these still exist.
        kept_pages: recent pages that a row in use never loses; None: all.
        written: tokens that a step writes, 1 or the number of drafts; their pages are never lost.
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
        self.quantize_slots = quantize_slots
        self.restore_pages = restore_pages
        #: Kept first tokens; None if the format does not need them, or if the first page is no sink.
        self.sink_cache = pool.sink_cache if restore_pages is not None and sink_pages else None
        self.pending = PendingOps()
        device, rows = pool.device, pool.req_to_token.shape[0]
        self.slot_page = torch.zeros(pool.slots + 1, dtype=torch.int64, device=device)  # 0: free
        self.slot_stamp = torch.zeros(pool.slots + 1, dtype=torch.int64, device=device)
        self.page_valid = torch.zeros(pool.pages + 1, dtype=torch.bool, device=device)
        #: Pages that begin a sequence, if first tokens are kept.
        self.page_first = torch.zeros(1 if self.sink_cache is None else pool.pages + 1, dtype=torch.bool, device=device)
        #: The pages that page ids have; None where ids are pages.
        self.places = None if pool.arena is None else Places(pool)
        #: The first slot that BF16 pages may have.
        self.first_slot = 1 if pool.arena is None else pool.arena.first_slot(pool.arena.pages)
        self.row_len = torch.zeros(rows, dtype=torch.int64, device=device)
        self.errors = torch.zeros((), dtype=torch.int64, device=device)
        self.records_written = torch.zeros((), dtype=torch.int64, device=device)
        #: Tokens before their own that prefills have read: in BF16, from records.
        self.prefix_read = torch.zeros(2, dtype=torch.int64, device=device)
        self.steps = 0
        self._copies: list[_CopiedBF16Pages] = []  # from the events being applied
        self._copied_sink_tokens: list[_CopiedSinkToken] = []
        self._dirty = True
        self._forget = False  # forget everything before the next plan
        self._next_lens: np.ndarray | None = None  # lengths that continue the last decode batch
        self._set_up()

    def _set_up(self) -> None:
        """Allocates the state that a subclass adds."""

    # -- the scheduler's side ------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets everything before the next plan: the caller has dropped every page (``flush_cache``).

        Like every other event it is only recorded here, because a batch may still be running.
        """
        self.pending.clear()
        self._forget = self._dirty = True

    # -- the forward pass's side ---------------------------------------------------------------

    def decode_needs_plan(self, seq_lens: torch.Tensor) -> bool:
        """Tells if a decode batch must be planned; ``seq_lens`` int ``[batch]`` is on the host.

        Ranges, windows and page ids change only when a page fills or the next one begins. They also change after a
        prefill, or when the scheduler moves or frees pages. Lengths below 2 are padding. A batch that does not continue
        the last one token by token contains other requests.
        """
        lens = seq_lens.numpy()
        goes_on = self._next_lens is not None and np.array_equal(lens, self._next_lens)
        self._next_lens = np.where(lens > 1, lens + 1, lens)
        if self._dirty or self.pending or not goes_on:  # ``reset`` sets ``_dirty``
            return True
        return bool(((lens % P <= 1) & (lens > 1)).any())

    def plan_decode(self, rows: torch.Tensor, seq_lens: torch.Tensor, max_len: int) -> None:
        """Plans a decode step. rows, seq_lens int64 ``[batch]`` (the new token counted); row 0 is padding."""
        self._plan(rows, None, seq_lens, max_len, None)
        self._dirty = False

    def plan_drafts(self, rows: torch.Tensor, seq_lens: torch.Tensor, max_len: int, count: int) -> None:
        """Plans the verification of ``count`` drafts of each request, which ``seq_lens`` includes.

        This is a decode step that writes ``count`` tokens. Rejected drafts stay in the window, because
        ``attention.drafts.check_count`` limits drafts to the number of recent tokens. They are overwritten before the
        window leaves their page.
        """
        self._plan(rows, None, seq_lens, max_len, None, count)
        self._dirty = True

    def plan_extend(
        self,
        rows: torch.Tensor,
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        max_len: int,
        direct_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Plans a prefill. Tensors int64 ``[batch]``; the pages of ``direct_ids`` are quantized from activations.

        Args:
            max_len: an upper bound of ``read_lens``.
            direct_ids: page ids int64 ``[n]``.

        Returns:
            their pages, int64 ``[n]``.
        """
        direct_pages = self._plan(rows, prefix_lens, seq_lens, max_len, direct_ids)
        self._dirty = True
        return direct_ids if direct_pages is None else direct_pages

    def _plan(
        self,
        rows: torch.Tensor,
        prefix_lens: torch.Tensor | None,
        seq_lens: torch.Tensor,
        max_len: int,
        direct_ids: torch.Tensor | None,
        count: int = 1,
    ) -> torch.Tensor | None:
        """Plans a batch; ``prefix_lens`` None means decoding. Returns the pages of ``direct_ids``.

        A prefill reads the tokens stored before it. Decoding also reads its ``count`` new tokens, and so may a request
        of a prefill with one new token, because ``--enable-mixed-chunk`` puts decoding requests among them.
        """
        stored, touched = (seq_lens - count, seq_lens) if prefix_lens is None else (prefix_lens, prefix_lens)
        self.apply_pending()
        self.steps += 1
        direct_pages = None if direct_ids is None else self._pages_of(direct_ids)
        live = rows > 0
        self.row_len[rows] = torch.where(live, seq_lens, 0)
        # Touch the pages that this batch reads first: its old window must then give way last.
        self._touch(self._window(rows, touched))
        window = self._window(rows, seq_lens)
        if self.sink_cache is not None:
            self.page_first.index_fill_(0, window[2][:, 0], True)
        restored = self._give_bf16_pages(rows, stored, window, prefix_lens is not None)
        self._touch(window)
        if direct_pages is not None:
            self.page_valid.index_fill_(0, direct_pages, True)
            self.records_written += (direct_pages > 0).sum()  # 0 in a batch of padding only
        more = 0 if prefix_lens is None else torch.where(seq_lens - prefix_lens > 1, self.prefill_pages, 0)
        self._set_ranges(rows, live, read_lens(prefix_lens, seq_lens), max_len, more)
        if prefix_lens is not None:
            in_records = torch.where(live, self.pool.row_history_end[rows] - self.pool.row_sink_end[rows], 0)
            in_bf16 = torch.where(live, prefix_lens, 0) - in_records
            self.prefix_read += torch.stack([in_bf16.sum(), in_records.sum()])
        if self.restore_pages is not None and restored is not None and max_len >= P:
            self.restore_pages(restored)
        return direct_pages

    def _pages_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the pages of page ids int64 ``[n]``."""
        return ids if self.places is None else self.pool.places[ids].long()

    def apply_now(self) -> None:
        """Applies pending events between plans, on the stream that runs the layers; the next decode step is planned.

        Does nothing while pages of a move are not known yet (``PendingOps.has_open_move``).
        """
        if not self.pending.has_open_move:
            self._dirty |= bool(self.pending)
            self.apply_pending()

    def apply_pending(self) -> None:
        """Applies the scheduler's events since the last plan, in their order."""
        self._apply_reset()
        for event in self.pending.drain(self.pool.device):
            if isinstance(event, AllocatedPages):
                self.errors += self.live_places.allocate(event.pages)
            elif isinstance(event, FreedPages):
                self._apply_free(event.pages)
            elif isinstance(event, MovedBF16Pages):
                self._apply_move(*map(self._pages_of, event))
            elif isinstance(event, Fill):
                self._apply_fill(event)
            else:
                self.row_len.index_fill_(0, event.rows, 0)
        self._place_copies()

    def _apply_reset(self) -> None:
        if not self._forget:
            return
        self._forget = False
        if self.sink_cache is not None:
            self.sink_cache.clear()
            self.page_first.fill_(False)
        if self.places is not None:
            self.places.clear(self.last_page)
        for tensor in (self.slot_page, self.slot_stamp, self.row_len):
            tensor.zero_()
        for tensor in (self.pool.row_sink_end, self.pool.row_history_end):
            tensor.zero_()
        self.page_valid.fill_(False)
        self.pool.page_slot.fill_(-1)
        self.pool.page_slot[0].fill_(0)

    def _apply_free(self, ids: torch.Tensor) -> None:
        pages = self._pages_of(ids)
        if self.places is not None:
            self.places.free(ids)
        slots = self.pool.page_slot[pages].clamp(min=0).long()
        # fill_ and index_fill_ everywhere: assigning a Python number by index waits for the device.
        self.slot_page.index_fill_(0, slots, 0)
        self.pool.page_slot.index_fill_(0, pages, -1)
        self.pool.page_slot[0].fill_(0)
        self.page_valid.index_fill_(0, pages, False)
        if self.sink_cache is not None:
            self.sink_cache.free(pages)
            self.page_first.index_fill_(0, pages, False)

    def _apply_move(self, own: torch.Tensor, kept: torch.Tensor) -> None:
        slots = self.pool.page_slot[own].long()
        ok = (own != kept) & (kept > 0) & (slots > 0) & (self.pool.page_slot[kept] < 0)
        own, kept, slots = (torch.where(ok, x, 0) for x in (own, kept, slots))
        self.slot_page[slots] = kept
        self.pool.page_slot.index_fill_(0, own, -1)
        self.pool.page_slot[kept] = slots.int()
        self.pool.page_slot[0].fill_(0)

    def _apply_fill(self, event: Fill) -> None:
        if isinstance(event, CopiedPages):
            self._apply_copy(event)
        elif isinstance(event, FoldedPages):
            self._apply_fold(event)
        elif isinstance(event, MovedBoundary):
            self._apply_boundary(event.first_slot)
        else:
            self._apply_arrival(event)

    def _apply_copy(self, event: CopiedPages) -> None:
        """Copies records now, so that a copy never needs its source again; keeps BF16 copies for ``_place_copies``."""
        source, target = self._pages_of(event.source), self._pages_of(event.target)
        windows = event.windows
        slots = self._record_sources(source)
        for records in self.pool.records:
            records[target] = records[source]
        self._filled(source, target, windows, slots, torch.ones_like(source[:1], dtype=torch.bool))

    def _apply_fold(self, event: FoldedPages) -> None:
        """Moves chosen tokens' records; keeps the BF16 pages of whole pages for ``_place_copies``."""
        source, target = self._pages_of(event.source), self._pages_of(event.target)
        tokens, sinks = event.tokens, event.sinks
        slots = self._record_sources(source)
        inside = (tokens >= 0) & (tokens < len(source) * P)
        whole = torch.arange(P, device=tokens.device) + sinks[:, None] * P
        self.errors += (~inside).sum() + (tokens.unflatten(-1, (-1, P))[:, :, sinks] != whole).sum()
        self._move_tokens(source, target, torch.where(inside, tokens, 0))
        self._filled(source, target, sinks, slots, (sinks == 0).any().view(1))  # the first page, if copied whole

    def _apply_arrival(self, event: ArrivedRequest) -> None:
        """Takes a request over: its window gets BF16 pages at once, for a page being filled lies nowhere else.

        Its row is in use from here on, and rows in use have room for their windows.
        """
        self._dirty = True
        self.row_len[event.rows] = event.lens
        self.page_valid.index_fill_(0, event.pages, True)
        if self.sink_cache is not None:
            self.page_first.index_fill_(0, torch.where(event.places == 0, event.window, 0), True)
        packed = event.source[:, event.at]
        filling = (event.places + 1) * P > event.lens
        need = ((packed[0, :, -PACKED_TAIL] > 0) | filling) & (self.pool.page_slot[event.window] < 0)
        unmet = self._assign(event.window, need, self._held()[0])
        self.errors += unmet.sum()
        slots = torch.where(need & ~unmet, self.pool.page_slot[event.window].clamp(min=0).long(), 0)
        self.pool.write_bf16(slots, packed)
        self.slot_stamp[slots] = self.steps + torch.where(event.places < self.sink_pages, SINK_BONUS, 0)
        event.done()

    def record_pages(self, pages: torch.Tensor) -> None:
        """Quantizes whole pages int64 ``[n]`` that have no records, so that these can be copied out.

        Events may have been applied for it, so the next batch is planned.
        """
        self._record_sources(pages)
        self._dirty = True

    def prepare_folds(self) -> None:
        """Compiles the kernels that folds need, so that no request waits for the compiler. Changes nothing."""
        pool = self.pool
        page, tokens = (torch.arange(n, device=pool.device) for n in (1, P))  # page 0 to itself
        self._move_tokens(page, page, tokens.expand(pool.layers, pool.kv_heads, P).contiguous())

    def _move_tokens(self, source: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor) -> None:
        fold_pages(self.pool, source, target, tokens)

    def _record_sources(self, source: torch.Tensor) -> torch.Tensor:
        """Quantizes pages int64 ``[n]`` that have no records; returns their BF16 slots, -1 for none."""
        slots = self.pool.page_slot[source].long()
        missing = ~self.page_valid[source]
        self.errors += (missing & (slots <= 0)).sum()
        self._quantize_in(torch.where(missing, slots, 0))
        return slots

    def _filled(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        windows: torch.Tensor,
        slots: torch.Tensor,
        first: torch.Tensor,
    ) -> None:
        """Notes the BF16 content that pages ``target``, which have records now, may receive.

        Pages at ``windows`` are whole copies of pages ``source``, whose BF16 slots are ``slots``, -1 for none. So is
        the first page if ``first``, bool ``[1]``, is True.
        """
        self.page_valid.index_fill_(0, target, True)
        copies: list[_CopiedBF16Pages | _CopiedSinkToken] = [*self._copies, *self._copied_sink_tokens]
        for copy in copies:  # a page may have been freed and be another copy now
            copy.wanted &= ~torch.isin(copy.pages, target)
        if self.sink_cache is not None:
            self._copy_first(self.sink_cache, source[:1], target[:1], slots[:1], first)
        slots = slots[windows].clamp(min=0)
        bonus = torch.where(windows < self.sink_pages, SINK_BONUS, 0)
        self._copies.append(_CopiedBF16Pages(target[windows], slots > 0, self.pool.bf16_pages[:, slots], bonus))

    def _copy_first(
        self,
        sink_cache: SinkTokenCache,
        source: torch.Tensor,
        target: torch.Tensor,
        slot: torch.Tensor,
        wanted: torch.Tensor,
    ) -> None:
        """Notes the first token of page ``source`` for ``target``: from its BF16 copy in ``slot``, its entry or a copy.

        Each int64 ``[1]``; wanted: bool ``[1]``.
        """
        there = slot > 0
        bf16_page = self.pool.bf16_pages[:, slot.clamp(min=0), :, :, 0]
        token = torch.where(there, bf16_page, sink_cache.tokens[:, sink_cache.entries(source)])
        known = there | sink_cache.kept(source)
        for copy in self._copied_sink_tokens:
            mine = copy.wanted & (copy.pages == source)
            token, known = torch.where(mine, copy.token, token), known | mine
        self._copied_sink_tokens.append(_CopiedSinkToken(target, wanted & known, token))
        self.page_first.index_fill_(0, torch.where(wanted, target, 0), True)

    def _place_copies(self) -> None:
        """Gives copies BF16 pages without pinning any; runs after all events, when the pinned slots are known."""
        copies, self._copies = self._copies, []
        for copy in copies:
            self._assign(copy.pages, copy.wanted & self.page_valid[copy.pages], self._held()[0])
            slots = torch.where(copy.wanted, self.pool.page_slot[copy.pages].clamp(min=0).long(), 0)
            self.pool.bf16_pages[:, slots] = copy.bf16_pages
            self.slot_stamp[slots] = self.steps + copy.bonus
        if self.sink_cache is not None:
            self._keep_copied(self.sink_cache)

    def _keep_copied(self, sink_cache: SinkTokenCache) -> None:
        """Keeps first tokens of copies without a BF16 copy. A copy with a BF16 copy takes no entry from another
        page."""
        copies, self._copied_sink_tokens = self._copied_sink_tokens, []
        for copy in copies:
            needed = copy.wanted & self.page_valid[copy.pages] & (self.pool.page_slot[copy.pages] < 0)
            sink_cache.keep(copy.pages, needed, copy.token, self.pool.page_slot, self.steps)

    def _quantize_in(self, slots: torch.Tensor) -> None:
        """Quantizes the pages in these BF16 pages, int64 ``[n]``, 0 for none, each once even if it is repeated."""
        marked = torch.zeros_like(self.slot_page, dtype=torch.bool)
        marked.index_fill_(0, slots.clamp(min=0), True)
        marked[0].fill_(False)
        self._quantize(marked, torch.arange(len(marked), device=slots.device), self.slot_page)
        self.page_valid.index_fill_(0, torch.where(marked, self.slot_page, 0), True)

    # -- one memory for records and BF16 pages -----------------------------------------------------

    @property
    def last_page(self) -> int:
        """The last page that lies before the first slot."""
        return self.pool.pages if self.pool.arena is None else self.pool.arena.last_page(self.first_slot)

    @property
    def live_places(self) -> Places:
        """The ids of pages.

        Raises:
            KVQuantError: ids are pages here.
        """
        if self.places is None:
            raise KVQuantError("Page ids are pages here: nothing allocates them, and no boundary moves.")
        return self.places

    def _apply_boundary(self, first_slot: int) -> None:
        """Gives memory to pages, or to BF16 pages, and first moves what lies there."""
        self._place_copies()  # they name pages
        places, old, used, self.first_slot = self.live_places, self.first_slot, self.last_page, first_slot
        if first_slot > old:
            self._vacate_slots(torch.arange(old, first_slot, device=self.pool.device))
        self._dirty = True
        last = self.last_page
        if first_slot < old:
            source, target = places.crowded(last, used)
            self.errors += ((source > 0) & (target == 0)).sum()
            self._move_pages(source, target)
            # What the codes of a record look like in BF16 need not be a number.
            self.pool.bf16_pages[:, first_slot:old].zero_()
        places.collect(last)

    def _vacate_slots(self, slots: torch.Tensor) -> None:
        """Empties BF16 slots int64 ``[n]``, which no page may have any more.

        Pinned pages get other slots, those of windows too if nobody's window has them. The rest are quantized.
        """
        held, levels = self._held()
        hardest = torch.zeros_like(self.slot_page).scatter_reduce_(0, held, levels, "amax")[slots]
        order = torch.sort(hardest, descending=True, stable=True).indices
        slots, hardest = slots[order], hardest[order]
        pages = self.slot_page[slots]
        pinned, soft = (pages > 0) & (hardest > self._soft_pages), (pages > 0) & (hardest > 0)
        hard_slots = torch.where(levels > self._soft_pages, held, 0)
        bonus = torch.stack([held, levels * SOFT_BONUS])
        self.errors += self._assign(pages, pinned, hard_slots, bonus).sum()
        self._assign(pages, soft & ~pinned, torch.cat([held, self.pool.page_slot[pages].long()]))
        new = torch.where(soft, self.pool.page_slot[pages].clamp(min=0).long(), 0)
        new = torch.where(new >= self.first_slot, new, 0)
        for some in torch.arange(len(slots), device=slots.device).split(_COPIED_SLOTS):
            self.pool.bf16_pages[:, new[some]] = self.pool.bf16_pages[:, slots[some]]
        self.slot_stamp[new] = self.slot_stamp[slots]
        lost = torch.where(new > 0, 0, pages)
        self._quantize((lost > 0) & ~self.page_valid[lost], slots, lost)
        self.page_valid.index_fill_(0, lost, True)
        self.pool.page_slot.index_fill_(0, lost, -1)
        self.pool.page_slot[0].fill_(0)
        self.slot_page.index_fill_(0, slots, 0)
        if self.sink_cache is not None:
            first, tokens = (lost > 0) & self.page_first[lost], self.pool.bf16_pages[:, slots, :, :, 0]
            self.sink_cache.keep(lost, first, tokens, self.pool.page_slot, self.steps)

    def _move_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Moves pages ``source`` int64 ``[n]`` with their records to free pages ``target``; 0 for none in both."""
        pool = self.pool
        for some in torch.arange(len(source), device=source.device).split(_COPIED_PAGES):
            for store in pool.stores:
                store.records[:, target[some]] = store.records[:, source[some]]
        slots = pool.page_slot[source].long()
        self.live_places.move(source, target)
        self.page_valid[target] = self.page_valid[source]
        pool.page_slot[target] = slots.int()
        self.slot_page[slots.clamp(min=0)] = target
        # Pages that nothing had moved from or to share page 0 here.
        pool.page_slot.index_fill_(0, source, -1)
        pool.page_slot[0].fill_(0)
        self.slot_page[0].fill_(0)
        self.page_valid.index_fill_(0, source, False)
        if self.sink_cache is not None:
            self.sink_cache.move(source, target)
            self.page_first[target] = self.page_first[source]
            self.page_first.index_fill_(0, source, False)

    # -- copies to and from host memory ----------------------------------------------------------

    def before_backup(self, pages: torch.Tensor) -> None:
        """Prepares pages for a copy of their records to host memory.

        Call it on the stream that runs the model, once, before the copy is submitted to another stream. That stream
        must then wait for this one. Until the copy is done, the caller keeps the pages from being freed.

        Pending events come first: a page may be the target of a copy or fold that waits among them. Then pages that
        exist only in BF16 are quantized. They keep their BF16 copies, so that nothing reads other values than before.

        Args:
            pages: int64 ``[n]`` on the pool's device, whole pages of committed tokens.

        Raises:
            KVQuantError: pages of a move are not known yet (``PendingOps.has_open_move``). Nothing has changed.
        """
        self._apply_for_copy("before_backup", pages)
        self._record_sources(pages)

    def before_load(self, pages: torch.Tensor) -> None:
        """Prepares pages for a copy of their records from host memory.

        Call it on the stream that runs the model, once, before the copy is submitted to another stream. That stream
        must then wait for this one. Whatever reads the pages' records waits for the copy: attention, and plans that
        apply a copy or fold of them or restore their BF16 pages.

        Pending events come first: the pages may just have been freed, with a copy of their old records still waiting.
        Then they count as quantized. Pages that already have records or a BF16 copy are in use: ``errors`` counts them.

        Args:
            pages: int64 ``[n]`` on the pool's device, just allocated.

        Raises:
            KVQuantError: pages of a move are not known yet (``PendingOps.has_open_move``). Nothing has changed.
        """
        self._apply_for_copy("before_load", pages)
        self.errors += (self.page_valid[pages] | (self.pool.page_slot[pages] >= 0)).sum()
        self.page_valid.index_fill_(0, pages, True)

    def _apply_for_copy(self, what: str, pages: torch.Tensor) -> None:
        """Applies pending events between plans; the next decode step is planned, as if they were still pending."""
        if self.pending.has_open_move:
            raise KVQuantError(
                f"{what}: an insertion into the tree is under way, whose pages are not known yet. Submit copies after "
                "it."
            )
        keep_alive([pages])
        self.apply_now()

    def keep_first_tokens(self, pages: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keeps first tokens BF16 ``[layers, n, 2, kv_heads, D]`` of pages int64 ``[n]`` that come from elsewhere."""
        if self.sink_cache is not None:
            self.sink_cache.keep(
                pages, torch.ones_like(pages, dtype=torch.bool), tokens, self.pool.page_slot, self.steps
            )

    # -- windows ---------------------------------------------------------------------------------

    def _history_pages(self, lens: torch.Tensor, more: torch.Tensor | int = 0) -> torch.Tensor:
        """Returns the end of the history in pages for ``lens`` tokens, if every BF16 copy exists; more: recent
        pages."""
        return torch.clamp((lens // P) - self.recent_pages - more, min=self.sink_pages)

    def _pages_at(self, rows: torch.Tensor, index: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
        """Returns page ids of the rows' page indices ``[n, m]``, 0 where they do not exist."""
        token = torch.where(exists, index * P, 0)
        ids = self.pool.req_to_token[rows[:, None], token].long() // P
        return torch.where(exists, self.pool.places[ids].long(), 0)

    def _window(self, rows: torch.Tensor, lens: torch.Tensor, more: torch.Tensor | int = 0) -> Window:
        """Returns the window of rows ``[n]`` at ``lens`` tokens: page index, exists, page id, each ``[n, window]``.

        more: further recent pages; int64 ``[n]``, at most ``prefill_pages``, or 0.
        """
        device = rows.device
        begin = self._history_pages(lens, more)[:, None]
        count = self.recent_pages + 1 + (0 if isinstance(more, int) else self.prefill_pages)
        sinks = torch.arange(self.sink_pages, device=device).expand(len(rows), -1)
        index = torch.cat([sinks, begin + torch.arange(count, device=device)], dim=1)
        exists = (index * P < lens[:, None]) & (rows > 0)[:, None]
        return index, exists, self._pages_at(rows, index, exists)

    def _touch(self, window: Window) -> None:
        index, _, pages = window
        slots = self.pool.page_slot[pages].clamp(min=0).long()
        self.slot_stamp[slots] = torch.where(index < self.sink_pages, self.steps + SINK_BONUS, self.steps)

    # -- giving BF16 pages to pages about to be written ---------------------------------------------

    def _give_bf16_pages(
        self, rows: torch.Tensor, prefix_lens: torch.Tensor, window: Window, prefilling: bool
    ) -> torch.Tensor | None:
        """Assigns BF16 pages to the window pages that the batch writes, and to first pages that a prefill reads.

        Returns:
            first pages to restore, int64 ``[batch]``, 0 for none; None if there can be none. They are pinned from now
            on, like pages that never lost their BF16 copy, so they fit as well.
        """
        index, exists, pages = window
        lost = self.pool.page_slot[pages] < 0
        need = exists & (index >= (prefix_lens // P)[:, None]) & lost
        restored = spared = None
        if self.sink_cache is not None and prefilling:
            first = pages[:, 0]
            back = self.sink_cache.first_of_each(first, (prefix_lens >= P) & lost[:, 0])  # requests may share a page
            need[:, 0] |= back
            restored = torch.where(back, first, 0)
            spared = torch.zeros_like(self.sink_cache.pages, dtype=torch.bool)
            spared.index_fill_(0, self.sink_cache.entries(restored), True)
        need, pages = need.flatten(), pages.flatten()

        # A page that this batch resumes in its middle and pushes out of the window is written in BF16 once more. It
        # keeps its BF16 copy until the next plan quantizes it.
        resumed = (prefix_lens // P)[:, None]
        is_resumed = (prefix_lens[:, None] % P > 0) & (rows > 0)[:, None]
        resumed_pages = self._pages_at(rows, resumed, is_resumed).flatten()
        resumed_slots = self.pool.page_slot[resumed_pages]
        self.errors += (resumed_slots < 0).sum()

        slots, levels = self._held()
        pinned = torch.cat([torch.where(levels > self._soft_pages, slots, 0), resumed_slots.long()])
        unmet = self._assign(pages, need, pinned, torch.stack([slots, levels * SOFT_BONUS]), spared)
        self.errors += unmet.sum()
        return restored

    @property
    def _soft_pages(self) -> int:
        """Recent pages of a row that others may take."""
        return self.recent_pages - self.kept_pages

    def _held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the BF16 slots of the windows of rows in use, and how hard they are to take; int64 ``[n]`` each.

        Levels rise with the pages towards the end of a window. Those above ``_soft_pages`` are pinned. Slot 0 is none.
        """
        all_rows = torch.arange(len(self.row_len), device=self.row_len.device)
        lens = self.row_len[:, None]
        index, _, pages = self._window(all_rows, self.row_len)
        pinned = (index < self.sink_pages) | (index >= (lens - self.written).clamp(min=0) // P - self.kept_pages)
        levels = torch.where(pinned, self._soft_pages, index - lens // P + self.recent_pages) + 1
        return self.pool.page_slot[pages].clamp(min=0).long().flatten(), levels.flatten()

    def _assign(
        self,
        pages: torch.Tensor,
        need: torch.Tensor,
        pinned: torch.Tensor,
        held: torch.Tensor | None = None,
        spared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gives BF16 pages to pages int64 ``[n]`` that ``need`` one, least recently used first, never a pinned slot.

        Keeps first tokens of the pages that lose their BF16 copy, but not in entries that are ``spared``. held: int64
        ``[2, m]``, slots of windows and what to add to their keys; the largest of a slot counts.

        Returns:
            bool ``[n]``: True for pages that got none.
        """
        priority = torch.where(self.slot_page > 0, self.slot_stamp, -1)
        if held is not None:
            priority += torch.zeros_like(priority).scatter_reduce_(0, held[0], held[1], "amax")
        priority.index_fill_(0, pinned.clamp(min=0).long(), NEVER)
        priority[: self.first_slot].fill_(NEVER)
        # Admission sizes guarantee a BF16 copy, so a page without one is an error.
        slots, given = hand_out(priority, need)
        old = torch.where(given, self.slot_page[slots], 0)
        self._quantize((old > 0) & ~self.page_valid[old], slots, old)
        self.page_valid.index_fill_(0, old, True)
        self.pool.page_slot.index_fill_(0, old, -1)
        takers = torch.where(given, pages, 0)
        self.pool.page_slot[takers] = slots.int()
        self.pool.page_slot[0].fill_(0)
        self.slot_page[slots] = takers
        if self.sink_cache is not None:  # lost first tokens are still in the BF16 pages: the batch writes later
            first, tokens = (old > 0) & self.page_first[old], self.pool.bf16_pages[:, slots, :, :, 0]
            self.sink_cache.keep(old, first, tokens, self.pool.page_slot, self.steps, spared)
        return need & ~given

    # -- what the batch reads ------------------------------------------------------------------------

    def _set_ranges(
        self, rows: torch.Tensor, live: torch.Tensor, lens: torch.Tensor, max_len: int, more: torch.Tensor | int
    ) -> None:
        index, exists, pages = self._window(rows, lens, more)
        lost = exists & (self.pool.page_slot[pages] < 0)
        first_lost = torch.where(lost, index, 1 << 30).amin(1)
        after_lost = torch.where(lost, index + 1, 0).amax(1)
        sink_end = first_lost.clamp(max=self.sink_pages)
        history = self._history_pages(lens, more)
        # There is no history while everything fits into sinks and window.
        history_end = torch.maximum(torch.where(history > self.sink_pages, history, sink_end), after_lost)

        index = torch.arange(-(-max_len // P), device=rows.device).expand(len(rows), -1)
        exists = (index * P < lens[:, None]) & live[:, None]
        pages = self._pages_at(rows, index, exists)
        # The scheduler may rewrite the rows from here on, so layers read this copy.
        known = self.pool.row_pages[rows, : index.shape[1]]
        self.pool.row_pages[rows, : index.shape[1]] = torch.where(exists, pages.int(), known)
        in_history = exists & (index >= sink_end[:, None]) & (index < history_end[:, None])
        pages = torch.where(in_history, pages, 0).flatten()
        slots = self.pool.page_slot[pages].long()
        missing = in_history.flatten() & ~self.page_valid[pages]
        self.errors += (missing & (slots < 0)).sum()
        self._quantize_in(torch.where(missing, slots, 0))  # several requests may share a page
        # Row 0 is padding and stays at zero.
        self.pool.row_sink_end[rows] = torch.where(live, sink_end * P, 0).int()
        self.pool.row_history_end[rows] = torch.where(live, history_end * P, 0).int()

    def _quantize(self, mask: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Quantizes the masked (slot, page) pairs, compacted without asking the host for their number."""
        at = torch.where(mask, torch.cumsum(mask, 0) - 1, len(mask))
        compact = slots.new_zeros(2, len(mask) + 1)
        compact[0, at], compact[1, at] = slots, pages
        count = mask.sum()
        self.records_written += count
        self.quantize_slots(compact[0, :-1], compact[1, :-1], count.view(1))

    # -- looking inside ---------------------------------------------------------------------------------

    def count(self) -> torch.Tensor:
        """Returns the fields of ``TierCounts`` except the first, int64 ``[7]`` on the device; does not wait for it."""
        used, valid = (self.slot_page > 0).sum(), self.page_valid[1:].sum()
        counts = torch.stack([used, valid, self.records_written, self.errors, self._pages_lost()])
        return torch.cat([counts, self.prefix_read])

    def _pages_lost(self) -> torch.Tensor:
        """Returns how many pages of rows' windows are read from records."""
        history = self._history_pages(self.row_len)
        whole = self.row_len // P
        sinks = (whole.clamp(max=self.sink_pages) - self.pool.row_sink_end // P).clamp(min=0)
        recent = (self.pool.row_history_end // P - history).clamp(min=0)
        return torch.where(self.row_len > 0, sinks + recent, 0).sum()

    def counts(self) -> TierCounts:
        """Returns the counters. Synchronises with the device."""
        return TierCounts(self.pool.slots, *self.count().tolist())
