"""Plans batches: applies the scheduler's events, gives BF16 pages to the pages to be written, sets ranges to read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_kvq.cache.fold import fold_pages
from sglang_kvq.cache.pending import (
    AllocatedPages,
    CopiedPages,
    Fill,
    FoldedPages,
    FreedPages,
    FreedRows,
    MovedBF16Pages,
    MovedBoundary,
    PendingOps,
    keep_alive,
)
from sglang_kvq.cache.tiers.boundary import move_boundary
from sglang_kvq.cache.tiers.fills import Fills
from sglang_kvq.cache.tiers.state import SINK_BONUS, SOFT_BONUS, TierState, Window
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError


def read_lens(prefix_lens: torch.Tensor | None, seq_lens: torch.Tensor) -> torch.Tensor:
    """Returns how many tokens each request reads from pages, int ``[batch]``; see ``TierManager._plan``."""
    return seq_lens if prefix_lens is None else torch.where(seq_lens - prefix_lens == 1, seq_lens, prefix_lens)


def _no_copies() -> None:
    """Does nothing, because no pages are copied to or from host memory."""


class TierManager(TierState):
    """Assigns BF16 pages in one ``PagePool``."""

    def _set_up(self) -> None:
        self.pending = PendingOps()
        self._fills = Fills(self, self._move_tokens)
        self._dirty = True
        self._forget = False  # True: forget everything before the next plan
        #: Makes the current stream wait for all copies of pages to and from host memory that were submitted before.
        self.wait_for_copies: Callable[[], None] = _no_copies
        #: Ids of the requests of the batch that runs. The caller sets them before each batch, because SGLang's view of
        #: a batch in a CUDA graph has none.
        self.requests: tuple[str, ...] = ()
        # For each batch of requests: the lengths with which its next decode step continues under a valid plan.
        self._next_lens: dict[tuple[str, ...], np.ndarray] = {}

    # -- the scheduler's side ------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets everything before the next plan, because the caller has dropped every page (``flush_cache``).

        Like every event, the reset is only recorded here, because a batch may still be running.
        """
        self.pending.clear()
        self._forget = self._dirty = True

    # -- the forward pass's side ---------------------------------------------------------------

    def decode_needs_plan(self, seq_lens: torch.Tensor) -> bool:
        """Returns whether a decode batch, of ``requests``, must be planned.

        Ranges, windows and page ids change only if a page fills or the next page begins. They also change after a
        prefill, or if the scheduler moves or frees pages. Lengths below 2 are padding. If the lengths do not continue
        an earlier batch token by token, the batch contains other requests. Lengths alone do not tell: with pipeline
        parallelism decode batches take turns, and two of them may have equal lengths.

        Args:
            seq_lens: int ``[batch]`` on the host.
        """
        lens, batch = seq_lens.numpy(), self.requests
        if self._dirty or self.pending:  # ``reset`` sets ``_dirty``
            self._next_lens.clear()
        expected = self._next_lens.get(batch)
        goes_on = expected is not None and np.array_equal(lens, expected)
        needed = not goes_on or bool(((lens % P <= 1) & (lens > 1)).any())
        if needed and self.soft_pages > 0:  # this batch's plan may shrink the windows of other batches
            self._next_lens.clear()
        self._next_lens[batch] = np.where(lens > 1, lens + 1, lens)
        return needed

    def plan_decode(self, rows: torch.Tensor, seq_lens: torch.Tensor, max_len: int) -> None:
        """Plans a decode step. rows, seq_lens: int64 ``[batch]``, the new token included; row 0 is padding."""
        self._plan(rows, None, seq_lens, max_len, None)
        self._dirty = False

    def plan_drafts(self, rows: torch.Tensor, seq_lens: torch.Tensor, max_len: int, count: int) -> None:
        """Plans the verification of ``count`` drafts of each request; ``seq_lens`` includes the drafts.

        The verification is a decode step that writes ``count`` tokens. Rejected drafts stay in the window, because
        ``attention.drafts.check_count`` allows fewer drafts than recent tokens. They are overwritten before their page
        leaves the window.
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
        """Plans a prefill.

        Args:
            rows, prefix_lens, seq_lens: int64 ``[batch]``.
            max_len: an upper bound of ``read_lens``.
            direct_ids: int64 ``[n]``, ids of the pages that the batch quantizes from activations.

        Returns:
            The pages of ``direct_ids``, int64 ``[n]``.
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

        A prefill reads the tokens stored before it. Decoding also reads its ``count`` new tokens from pages. A prefill
        request with one new token also reads that token, because it may be a decoding request
        (``--enable-mixed-chunk``).
        """
        stored, touched = (seq_lens - count, seq_lens) if prefix_lens is None else (prefix_lens, prefix_lens)
        self.apply_pending()
        self.steps += 1
        direct_pages = None if direct_ids is None else self.pages_of(direct_ids)
        live = rows > 0
        self.row_len[rows] = torch.where(live, seq_lens, 0)
        # First touch the pages that this batch reads, so that its old window loses BF16 copies last.
        self._touch(self.window(rows, touched))
        window = self.window(rows, seq_lens)
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

    # -- events ------------------------------------------------------------------------------------

    def apply_now(self) -> None:
        """Applies pending events between plans, on the stream that runs the layers.

        Does nothing while the pages of a move are not known yet (``PendingOps.has_open_move``).
        """
        if not self.pending.has_open_move:
            self.apply_pending()

    def apply_pending(self) -> None:
        """Applies the events that the scheduler recorded since the last plan, in order.

        If there are any and this is not a plan, the next decode step is planned.
        """
        self._dirty |= bool(self.pending)
        self._apply_reset()
        while self.pending:
            self._apply_until_fill()
            if fill := self.pending.take_fill(self.pool.device):
                self.moving = self.pending.moves()
                self._apply_fill(fill)
        self.moving = ()
        self._fills.place()

    def _apply_until_fill(self) -> None:
        """Applies the events before the next ``Fill``."""
        for event in self.pending.drain(self.pool.device):
            if isinstance(event, AllocatedPages):
                self.errors += self.live_places.allocate(event.pages)
            elif isinstance(event, FreedPages):
                self._apply_free(event.pages)
            elif isinstance(event, MovedBF16Pages):
                self._apply_move(*map(self.pages_of, event))
            elif isinstance(event, FreedRows):
                rows = torch.tensor(event.rows).to(self.pool.device, non_blocking=True)
                self.row_len.index_fill_(0, rows, 0)

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
        pages = self.pages_of(ids)
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
            self._fills.copy(event)
        elif isinstance(event, FoldedPages):
            self._fills.fold(event)
        elif isinstance(event, MovedBoundary):
            self._fills.place()  # first, because copies that wait name pages, which may move
            if event.first_slot < self.first_slot:  # pages may move
                self.wait_for_copies()
            move_boundary(self, event.first_slot)
        else:
            self._fills.arrive(event)

    def record_pages(self, pages: torch.Tensor) -> None:
        """Quantizes those of the whole pages int64 ``[n]`` that have no records, so that records can be copied out."""
        self.ensure_records(pages)

    def prepare_folds(self) -> None:
        """Compiles the kernels that folds need, so that no request waits for the compiler. Changes no state."""
        pool = self.pool
        page, tokens = (torch.arange(n, device=pool.device) for n in (1, P))  # folds page 0 into itself
        self._move_tokens(page, page, tokens.expand(pool.layers, pool.kv_heads, P).contiguous())

    def _move_tokens(self, source: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor) -> None:
        fold_pages(self.pool, source, target, tokens)

    # -- copies to and from host memory ----------------------------------------------------------

    def before_backup(self, ids: torch.Tensor) -> None:
        """Prepares pages for a copy of their records to host memory.

        Call this once, on the stream that runs the model, before the copy is submitted to another stream. That stream
        must then wait for this one. The caller must keep the pages from being freed until the copy is done, and set
        ``wait_for_copies``.

        Pending events are applied first, because a page may be the target of a pending copy or fold. Then pages that
        exist only in BF16 are quantized. They keep their BF16 copies, so requests read the same values as before.

        Args:
            ids: int64 ``[n]`` on the pool's device, page ids of whole pages of committed tokens. Their pages stay
                where they are until ``wait_for_copies`` has been called.

        Raises:
            KVQuantError: pages of a move are not known yet (``PendingOps.has_open_move``). Nothing has changed.
        """
        pages = self._apply_for_copy("before_backup", ids)
        self.ensure_records(pages)

    def before_load(self, ids: torch.Tensor) -> None:
        """Prepares pages for a copy of their records from host memory.

        Call this once, on the stream that runs the model, before the copy is submitted to another stream. That stream
        must then wait for this one. Everything that reads the pages' records must wait for the copy: attention, and
        plans that copy or fold the pages or restore their BF16 copies. Moves wait, too (``wait_for_copies``).

        Pending events are applied first, because the pages may just have been freed, and a copy of their old records
        may be pending. Then the pages count as quantized. A page that already has a record or a BF16 copy is in use,
        which is an error; ``errors`` counts such pages.

        Args:
            ids: int64 ``[n]`` on the pool's device, page ids that were just allocated. Their pages stay where they are
                until ``wait_for_copies`` has been called.

        Raises:
            KVQuantError: pages of a move are not known yet (``PendingOps.has_open_move``). Nothing has changed.
        """
        pages = self._apply_for_copy("before_load", ids)
        self.errors += (self.page_valid[pages] | (self.pool.page_slot[pages] >= 0)).sum()
        self.page_valid.index_fill_(0, pages, True)

    def _apply_for_copy(self, what: str, ids: torch.Tensor) -> torch.Tensor:
        """Applies pending events between plans; returns the pages of ``ids``. ``what`` names the caller in errors."""
        if self.pending.has_open_move:
            raise KVQuantError(
                f"{what}: an insertion into the tree is under way, whose pages are not known yet. Submit copies after "
                "it."
            )
        keep_alive([ids])
        self.apply_now()
        return self.pages_of(ids)

    def keep_first_tokens(self, pages: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keeps first tokens, BF16 ``[layers, n, 2, kv_heads, D]``, of pages int64 ``[n]`` loaded from elsewhere."""
        if self.sink_cache is not None:
            self.sink_cache.keep(
                pages, torch.ones_like(pages, dtype=torch.bool), tokens, self.pool.page_slot, self.steps
            )

    # -- what a batch writes and reads -----------------------------------------------------------

    def _touch(self, window: Window) -> None:
        index, _, pages = window
        slots = self.pool.page_slot[pages].clamp(min=0).long()
        self.slot_stamp[slots] = torch.where(index < self.sink_pages, self.steps + SINK_BONUS, self.steps)

    def _give_bf16_pages(
        self, rows: torch.Tensor, prefix_lens: torch.Tensor, window: Window, prefilling: bool
    ) -> torch.Tensor | None:
        """Assigns BF16 pages to the window pages that the batch writes, and to first pages that a prefill reads.

        Returns:
            First pages to restore, int64 ``[batch]``, 0 for none; None if there can be none. They are pinned from now
            on, like first pages that never lost their BF16 copies, so there is room for them too.
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

        # The batch may resume a page in its middle and also push this page out of the window. Such a page is written in
        # BF16 once more, and it keeps its BF16 copy until the next plan quantizes it.
        resumed = (prefix_lens // P)[:, None]
        is_resumed = (prefix_lens[:, None] % P > 0) & (rows > 0)[:, None]
        resumed_pages = self.pages_at(rows, resumed, is_resumed).flatten()
        resumed_slots = self.pool.page_slot[resumed_pages]
        self.errors += (resumed_slots < 0).sum()

        slots, levels = self.held()
        pinned = torch.cat([torch.where(levels > self.soft_pages, slots, 0), resumed_slots.long()])
        unmet = self.assign(pages, need, pinned, torch.stack([slots, levels * SOFT_BONUS]), spared)
        self.errors += unmet.sum()
        return restored

    def _set_ranges(
        self, rows: torch.Tensor, live: torch.Tensor, lens: torch.Tensor, max_len: int, more: torch.Tensor | int
    ) -> None:
        index, exists, pages = self.window(rows, lens, more)
        lost = exists & (self.pool.page_slot[pages] < 0)
        first_lost = torch.where(lost, index, 1 << 30).amin(1)
        after_lost = torch.where(lost, index + 1, 0).amax(1)
        sink_end = first_lost.clamp(max=self.sink_pages)
        history = self.history_pages(lens, more)
        # There is no history while all tokens fit into sinks and window.
        history_end = torch.maximum(torch.where(history > self.sink_pages, history, sink_end), after_lost)

        index = torch.arange(-(-max_len // P), device=rows.device).expand(len(rows), -1)
        exists = (index * P < lens[:, None]) & live[:, None]
        pages = self.pages_at(rows, index, exists)
        # The scheduler may rewrite ``req_to_token`` from here on, so layers read this copy.
        known = self.pool.row_pages[rows, : index.shape[1]]
        self.pool.row_pages[rows, : index.shape[1]] = torch.where(exists, pages.int(), known)
        in_history = exists & (index >= sink_end[:, None]) & (index < history_end[:, None])
        pages = torch.where(in_history, pages, 0).flatten()
        slots = self.pool.page_slot[pages].long()
        missing = in_history.flatten() & ~self.page_valid[pages]
        self.errors += (missing & (slots < 0)).sum()
        self.quantize_in(torch.where(missing, slots, 0))  # several requests may share a page
        # Row 0 is padding and stays at zero.
        self.pool.row_sink_end[rows] = torch.where(live, sink_end * P, 0).int()
        self.pool.row_history_end[rows] = torch.where(live, history_end * P, 0).int()
