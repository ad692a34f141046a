"""``TierManager`` on a GPU, or in Triton's interpreter for tests: makes the same decisions in few launches."""

from __future__ import annotations

import torch

from sglang_kvq.cache.fold import check_fold
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import SINK_BONUS, TierManager
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.device.codes import record_of
from sglang_kvq.kernels.quantize.fold_tokens import fold_pages
from sglang_kvq.kernels.quantize.keep_sink_tokens import keep_sink_tokens
from sglang_kvq.kernels.tiers.bf16_pages import give_bf16_pages
from sglang_kvq.kernels.tiers.events import apply_events
from sglang_kvq.kernels.tiers.ranges import set_ranges
from sglang_kvq.kernels.tiers.tables import Tables, TierTables


class TritonTierManager(TierManager):
    """Plans a batch in two launches, one more per record store, and two more for formats that keep first tokens.

    1. ``give_bf16_pages`` updates lengths and stamps, and finds pinned pages. It gives BF16 pages to pages about to be
       written, and first-token entries to pages that lost their BF16 copies.
    2. ``set_ranges`` sets the ranges that the batch reads from records.
    3. ``quantize_slots`` quantizes, in all layers, the pages that steps 1 and 2 found without a record.
    4. ``keep_sink_tokens`` copies the first tokens of pages that lost their BF16 copies.
    5. ``restore_pages`` rebuilds the first pages that a prefill reads, in the BF16 pages from step 1.

    If the scheduler has recorded events since the last plan, ``apply_events`` and its copies come first.
    """

    def _set_up(self) -> None:
        super()._set_up()
        pool, sink_cache, slots, rows = self.pool, self.sink_cache, len(self.slot_page), len(self.row_len)

        def zeros(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int64, device=pool.device)

        none, entries, lost = (
            zeros(1),
            1 if sink_cache is None else len(sink_cache.pages),
            1 if sink_cache is None else slots,
        )
        tables = Tables(
            req_to_token=pool.req_to_token,
            row_pages=pool.row_pages,
            page_slot=pool.page_slot,
            page_valid=self.page_valid.view(torch.uint8),
            slot_page=self.slot_page,
            slot_stamp=self.slot_stamp,
            places=pool.places,
            page_id=none.int() if self.places is None else self.places.ids,
            free_pages=none.int() if self.places is None else self.places.stack,
            free_count=none if self.places is None else self.places.count,
            row_len=self.row_len,
            row_sink_end=pool.row_sink_end,
            row_history_end=pool.row_history_end,
            errors=self.errors,
            written=self.records_written,
            prefix_read=self.prefix_read,
            held=zeros(slots),
            marked=zeros(slots),
            keys=zeros(slots),
            wanted=zeros(rows * (self.sink_pages + self.recent_pages + 1)),
            page_first=self.page_first.view(torch.uint8),
            first_page=none.int() if sink_cache is None else sink_cache.pages,
            sink_entry=none.int() if sink_cache is None else sink_cache.entry,
            first_stamp=none if sink_cache is None else sink_cache.stamp,
            first_keys=zeros(entries),
            claims=zeros(entries),
            lost_slots=zeros(lost),
            lost_pages=zeros(lost),
            lost_entries=zeros(lost).int(),
            lost_count=zeros(1),
            entryless=zeros(lost).int(),
            slots=zeros(2 * slots),
            pages=zeros(2 * slots),
            count=zeros(1),
            context=pool.req_to_token.stride(0),
            pages_row=pool.row_pages.stride(0),
            slot_count=slots,
            row_count=rows,
            first_count=entries,
        )
        self.tables = TierTables(
            tables,
            sink_pages=self.sink_pages,
            recent_pages=self.recent_pages,
            prefill_pages=self.prefill_pages,
            soft_pages=self.soft_pages,
            written_tokens=self.written,
            sink_bonus=SINK_BONUS,
            keeps_sink_tokens=sink_cache is not None,
            shares_memory=self.places is not None,
        )
        if pool.device.type == "cuda":
            self._compile()

    def _compile(self) -> None:
        """Plans a batch of padding, so that the first request does not wait for the compiler. Changes no state."""
        row = torch.zeros(1, dtype=torch.int64, device=self.pool.device)
        self.pending.free_rows([0])
        self.plan_extend(row, row, row + 1, PAGE_SIZE, row[:0])
        self.plan_decode(row, row + 1, 1)
        self.steps, self._dirty = 0, True

    def _plan(
        self,
        rows: torch.Tensor,
        prefix_lens: torch.Tensor | None,
        seq_lens: torch.Tensor,
        max_len: int,
        direct_ids: torch.Tensor | None,
        count: int = 1,
    ) -> torch.Tensor | None:
        self.apply_pending()
        self.steps += 1
        direct_pages = None if direct_ids is None else self.pages_of(direct_ids)
        tables, found = self.tables, self.tables.arguments
        restored = None
        if self.sink_cache is not None and prefix_lens is not None:
            restored = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
        give_bf16_pages(tables, rows, prefix_lens, seq_lens, direct_pages, self.steps, self.first_slot, count, restored)
        set_ranges(tables, rows, prefix_lens, seq_lens, max_len, self.steps)
        # BF16 pages that were just reassigned still hold the old content, because the batch writes them later.
        self.quantize_slots(found.slots, found.pages, found.count)
        if self.sink_cache is not None:
            lost = (found.lost_slots, found.lost_entries, found.lost_count)
            keep_sink_tokens(*lost, self.pool.bf16_pages, self.sink_cache.tokens)
        if self.restore_pages is not None and restored is not None and max_len >= PAGE_SIZE:
            self.restore_pages(restored)
        return direct_pages

    def _apply_until_fill(self) -> None:
        if packed := self.pending.pack(self.pool.device):
            apply_events(self.tables, *packed)

    def _move_tokens(self, source: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor) -> None:
        move_tokens(self.pool, source, target, tokens)


def move_tokens(pool: PagePool, source_pages: torch.Tensor, target_pages: torch.Tensor, tokens: torch.Tensor) -> None:
    """Runs ``cache.fold.fold_pages`` as a kernel: one launch for each kind of records."""
    check_fold(pool, source_pages, target_pages, tokens)
    tokens = tokens.contiguous()
    for store in pool.stores:
        record = record_of(store.format, pool.page_stride)
        fold_pages(store.records, record, store.layer_ids, source_pages, target_pages, tokens, pool.head_dim)
