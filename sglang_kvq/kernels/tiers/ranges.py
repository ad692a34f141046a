"""Sets the ranges that a batch reads from records and lists missing records there, in parallel over rows and pages."""

from functools import cache

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.common import PAGE
from sglang_kvq.kernels.device.launch import Constants, start_kernel
from sglang_kvq.kernels.tiers.tables import TierTables, Window, history_pages, page_at, window

#: Pages per program.
_PAGES = 1024


def set_ranges(
    tables: TierTables,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    seq_lens: torch.Tensor,
    max_len: int,
    step: int,
) -> None:
    """Sets ranges like ``TierManager._set_ranges``; appends pages to be quantized to the list.

    rows, prefix_lens, seq_lens: int ``[batch]``. Requests of a prefill read ``prefix_lens`` tokens, and those with one
    new token ``seq_lens``. If ``prefix_lens`` is None, all read ``seq_lens``. max_len: upper bound of these numbers.
    step: number of the plan.
    """
    # Outside kernels, triton.cdiv takes as long as half a launch.
    grid = (rows.shape[0], max(1, -(-max_len // (PAGE.value * _PAGES))))
    lens, window = (seq_lens, tables.window) if prefix_lens is None else (prefix_lens, tables.prefill_window)
    constants = _constants(window, prefix_lens is not None, _PAGES)
    start_kernel(_ranges, grid, rows, lens, seq_lens, step, tables.fixed, constants=constants)


@cache
def _constants(window: Window, prefill: bool, pages: int) -> Constants:
    return Constants(WINDOW=window, PAGES=pages, PREFILL=prefill, num_warps=4)


@triton.jit(
    do_not_specialize=["rows", "lens", "seq_lens", "step"],
    do_not_specialize_on_alignment=["rows", "lens", "seq_lens"],
)
def _ranges(rows, lens, seq_lens, step, t, WINDOW: tl.constexpr, PAGES: tl.constexpr, PREFILL: tl.constexpr):
    """Program (i, j), for pages j PAGES .. of request i: sets the range, copies page ids and lists missing records."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int32)
    if row > 0:
        stored = tl.load(lens + tl.program_id(0)).to(tl.int32)
        new = tl.load(seq_lens + tl.program_id(0)).to(tl.int32) - stored
        length = stored + tl.where(new == 1, 1, 0)
        sink_end, history_end = _range_of(t, row, length, tl.where(new > 1, WINDOW.MORE, 0), WINDOW)
        if tl.program_id(1) == 0:
            tl.store(t.row_sink_end + row, sink_end * PAGE)
            tl.store(t.row_history_end + row, history_end * PAGE)
            if PREFILL:
                in_records = (history_end - sink_end) * PAGE
                tl.atomic_add(t.prefix_read, (stored - in_records).to(tl.int64))
                tl.atomic_add(t.prefix_read + 1, in_records.to(tl.int64))

        index = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
        exists = index * PAGE < length
        page = page_at(t, row, index, exists)
        # The scheduler may rewrite the rows from here on, so layers read this copy.
        tl.store(t.row_pages + row.to(tl.int64) * t.pages_row + index, page, mask=exists)
        inside = exists & (index >= sink_end) & (index < history_end)
        missing = inside & (tl.load(t.page_valid + page, mask=inside, other=1) == 0)
        if tl.sum(missing.to(tl.int32), 0) > 0:
            _list_missing(t, page, missing, step, PAGES)


@triton.jit
def _range_of(t, row, length, more, WINDOW: tl.constexpr):
    """Returns begin and end of the history, in pages; it includes window pages that have lost their BF16 copies."""
    index, exists, page = window(t, row, length, WINDOW, more)
    lost = tl.load(t.page_slot + page, mask=exists, other=0) < 0
    sink_end = tl.minimum(tl.min(tl.min(tl.where(lost, index, WINDOW.SINK), 1), 0), WINDOW.SINK)
    after_lost = tl.max(tl.max(tl.where(lost, index + 1, 0), 1), 0)
    history = history_pages(length, WINDOW, more)
    # There is no history while everything fits into sinks and window.
    return sink_end, tl.maximum(tl.where(history > WINDOW.SINK, history, sink_end), after_lost)


@triton.jit
def _list_missing(t, page, missing, step, PAGES: tl.constexpr):
    """Lists pages whose records have to be made from their BF16 copies."""
    slot = tl.load(t.page_slot + page, mask=missing, other=0)
    failed = tl.sum((slot < 0).to(tl.int64), 0)
    if failed > 0:
        tl.atomic_add(t.errors, failed)
    # Several requests may share a page: the first to mark its slot lists it.
    missing = slot > 0
    now = tl.full([PAGES], 0, tl.int64) + step
    before = tl.atomic_xchg(t.marked + slot, now, mask=missing)
    fresh = missing & (before != now)
    count = tl.sum(fresh.to(tl.int64), 0)
    entry = tl.atomic_add(t.count, count) + tl.cumsum(fresh.to(tl.int32), 0) - 1
    tl.store(t.slots + entry, slot.to(tl.int64), mask=fresh)
    tl.store(t.pages + entry, page.to(tl.int64), mask=fresh)
    tl.atomic_add(t.written, count)
    tl.store(t.page_valid + page, tl.full([PAGES], 1, tl.uint8), mask=missing)
