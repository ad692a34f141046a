"""What a batch reads from records, and which of these records are missing: in parallel over rows and pages."""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.common import PAGE
from sglang_kvq.kernels.tiers import TierTables, history_pages, page_at, window

#: Pages that a program looks at.
_PAGES = 1024


def set_ranges(tables: TierTables, rows: torch.Tensor, lens: torch.Tensor, max_len: int, step: int) -> None:
    """What ``TierManager._set_ranges`` does; what is to be quantized is appended to the list.

    rows, lens: int ``[batch]``, tokens that each request reads; max_len: none has more. step: of the plan.
    """
    pages = triton.cdiv(max_len, PAGE.value)
    _ranges[(len(rows), max(1, triton.cdiv(pages, _PAGES)))](
        rows, lens, step,
        tables.req_to_token, tables.req_to_token.stride(0), tables.row_pages, tables.row_pages.stride(0),
        tables.page_slot, tables.page_valid, tables.row_sink_end, tables.row_history_end,
        tables.errors, tables.written, tables.marked, tables.slots, tables.pages, tables.count,
        **tables.window(),
        PAGES=_PAGES,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "lens", "step"], do_not_specialize_on_alignment=["rows", "lens"])
def _ranges(
    rows, lens, step, table, table_row, row_pages, pages_row, page_slot, page_valid, row_sink_end, row_history_end,
    errors, written, marked, out_slots, out_pages, out_count,
    SINK: tl.constexpr, RECENT: tl.constexpr, WIDTH: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, j): pages j PAGES .. of request i."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int32)
    if row > 0:
        length = tl.load(lens + tl.program_id(0)).to(tl.int32)
        index, exists, page = window(table, table_row, row, length, SINK, RECENT, WIDTH)
        lost = tl.load(page_slot + page, mask=exists, other=0) < 0
        sink_end = tl.minimum(tl.min(tl.min(tl.where(lost, index, SINK), 1), 0), SINK)
        after_lost = tl.max(tl.max(tl.where(lost, index + 1, 0), 1), 0)
        history = history_pages(length, SINK, RECENT)
        # No history proper while everything fits into sinks and window.
        history_end = tl.maximum(tl.where(history > SINK, history, sink_end), after_lost)
        if tl.program_id(1) == 0:
            tl.store(row_sink_end + row, sink_end * PAGE)
            tl.store(row_history_end + row, history_end * PAGE)

        index = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
        exists = index * PAGE < length
        page = page_at(table, table_row, row, index, exists)
        # The scheduler may rewrite the rows from here on; the layers read what is there now.
        tl.store(row_pages + row.to(tl.int64) * pages_row + index, page, mask=exists)
        inside = exists & (index >= sink_end) & (index < history_end)
        missing = inside & (tl.load(page_valid + page, mask=inside, other=1) == 0)
        if tl.sum(missing.to(tl.int32), 0) > 0:
            slot = tl.load(page_slot + page, mask=missing, other=0)
            failed = tl.sum((slot < 0).to(tl.int64), 0)
            if failed > 0:
                tl.atomic_add(errors, failed)
            # Several requests may share a page: whoever marks its slot first lists it.
            missing = slot > 0
            now = tl.full([PAGES], 0, tl.int64) + step
            before = tl.atomic_xchg(marked + slot, now, mask=missing)
            fresh = missing & (before != now)
            count = tl.sum(fresh.to(tl.int64), 0)
            place = tl.atomic_add(out_count, count) + tl.cumsum(fresh.to(tl.int32), 0) - 1
            tl.store(out_slots + place, slot.to(tl.int64), mask=fresh)
            tl.store(out_pages + place, page.to(tl.int64), mask=fresh)
            tl.atomic_add(written, count)
            tl.store(page_valid + page, tl.full([PAGES], 1, tl.uint8), mask=missing)
