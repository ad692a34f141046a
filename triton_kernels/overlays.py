"""Overlays for the pages a batch is about to write: one program, because each choice depends on those before.

In phases with barriers between them: the batch's rows, the windows that are pinned, a key for every slot, the
k-th least key by bisection, and the exchange. Without a page in need the first is all.
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.common import PAGE
from sglang_kvq.kernels.tiers import TierTables, page_at, window

#: Elements of a pass over rows' windows, and over slots.
_ELEMENTS = 4096
#: Key of a slot that must not be taken.
_NEVER = tl.constexpr(1 << 62)


def give_overlays(
    tables: TierTables,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    seq_lens: torch.Tensor,
    direct_pages: torch.Tensor | None,
    step: int,
) -> None:
    """What ``TierManager._plan`` does before it sets ranges; starts the list of what is to be quantized.

    rows, prefix_lens, seq_lens: int ``[batch]``; prefix_lens None for decoding: all but the new token. direct_pages:
    int64 ``[n]`` or None. step: of the plan, from 1.
    """
    shape, direct = tables.window(), rows[:0] if direct_pages is None else direct_pages
    _give[(1,)](
        rows, seq_lens if prefix_lens is None else prefix_lens, seq_lens, len(rows), direct, len(direct), step,
        tables.req_to_token, tables.req_to_token.stride(0), tables.page_slot, tables.page_valid,
        tables.slot_page, tables.slot_stamp, len(tables.slot_page), tables.row_len, len(tables.row_len),
        tables.errors, tables.written, tables.pinned, tables.keys, tables.wanted,
        tables.slots, tables.pages, tables.count,
        **shape,
        BONUS=tables.sink_bonus,
        DECODING=prefix_lens is None,
        ROWS=max(1, _ELEMENTS // shape["WIDTH"]),
        SLOTS=_ELEMENTS,
        num_warps=16,
    )  # fmt: skip


# Nothing that varies is specialised: plans run outside CUDA graphs, where a request would wait for the compiler.
@triton.jit(
    do_not_specialize=["rows", "prefix_lens", "seq_lens", "batch", "direct", "directs", "step"],
    do_not_specialize_on_alignment=["rows", "prefix_lens", "seq_lens", "direct"],
)
def _give(
    rows, prefix_lens, seq_lens, batch, direct, directs, step,
    table, table_row, page_slot, page_valid, slot_page, slot_stamp, slots, row_len, all_rows,
    errors, written, pinned, keys, wanted, out_slots, out_pages, out_count,
    SINK: tl.constexpr, RECENT: tl.constexpr, WIDTH: tl.constexpr, BONUS: tl.constexpr, DECODING: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    step = step.to(tl.int64)
    failed = tl.zeros([], tl.int64)
    needs = tl.zeros([], tl.int32)
    for start in range(0, batch, ROWS):
        i = start + tl.arange(0, ROWS)[:, None]
        row = tl.load(rows + i, mask=i < batch, other=0).to(tl.int32)
        length = tl.load(seq_lens + i, mask=i < batch, other=0).to(tl.int32)
        prefix = length - 1
        if not DECODING:
            prefix = tl.load(prefix_lens + i, mask=i < batch, other=0).to(tl.int32)
            # What the batch reads is touched too: if its old window must give way, it does so last.
            index, exists, page = window(table, table_row, row, prefix, SINK, RECENT, WIDTH)
            _touch(index, _slot_of(page_slot, page, exists), slot_stamp, step, SINK, BONUS)
        tl.store(row_len + row, length.to(tl.int64), mask=row > 0)
        index, exists, page = window(table, table_row, row, length, SINK, RECENT, WIDTH)
        slot = _slot_of(page_slot, page, exists)
        _touch(index, slot, slot_stamp, step, SINK, BONUS)

        need = tl.reshape((exists & (index >= prefix // PAGE) & (slot < 0)).to(tl.int32), [ROWS * WIDTH])
        entry = tl.reshape(page.to(tl.int64) * 2 + (index < SINK).to(tl.int64), [ROWS * WIDTH])
        tl.store(wanted + needs + tl.cumsum(need, 0) - 1, entry, mask=need > 0)
        needs += tl.sum(need, 0)

        # A page resumed in its middle that this batch also pushes out of the window is written in BF16 once more,
        # so it keeps its overlay until the next plan quantizes it.
        resumed = (row > 0) & (prefix % PAGE > 0)
        slot = _slot_of(page_slot, page_at(table, table_row, row, prefix // PAGE, resumed), resumed)
        failed += tl.sum(tl.sum((slot < 0).to(tl.int64), 1), 0)
        tl.store(pinned + slot, tl.full([ROWS, 1], 0, tl.int64) + step, mask=slot > 0)

    given_directly = tl.zeros([], tl.int64)
    for start in range(0, directs, SLOTS):
        i = start + tl.arange(0, SLOTS)
        page = tl.load(direct + i, mask=i < directs, other=0)  # 0 is padding's
        tl.store(page_valid + page, tl.full([SLOTS], 1, tl.uint8), mask=page > 0)
        given_directly += tl.sum((page > 0).to(tl.int64), 0)

    quantized = tl.zeros([], tl.int64)
    if needs > 0:
        tl.debug_barrier()
        for start in range(0, all_rows, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            length = tl.load(row_len + row, mask=row < all_rows, other=0).to(tl.int32)
            index, exists, page = window(table, table_row, row, length, SINK, RECENT, WIDTH)
            slot = _slot_of(page_slot, page, exists)
            tl.store(pinned + slot, tl.full([ROWS, WIDTH], 0, tl.int64) + step, mask=slot > 0)
        tl.debug_barrier()

        # Keys in the order of priority: free slots, then by stamp, sinks behind all others.
        least, most = tl.full([SLOTS], _NEVER, tl.int64), tl.full([SLOTS], 0, tl.int64)
        available = tl.full([SLOTS], 0, tl.int32)
        for start in range(0, slots, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            inside = slot < slots
            stamp = tl.load(slot_stamp + slot, mask=inside, other=0) + 1
            stamp = tl.where(stamp > BONUS, stamp - BONUS + step + 1, stamp)
            key = tl.where(tl.load(slot_page + slot, mask=inside, other=0) > 0, stamp, 0)
            free = inside & (slot > 0) & (tl.load(pinned + slot, mask=inside, other=0) != step)
            tl.store(keys + slot, tl.where(free, key, _NEVER), mask=inside)
            least = tl.where(free, tl.minimum(least, key), least)
            most = tl.where(free, tl.maximum(most, key), most)
            available += free.to(tl.int32)
        tl.debug_barrier()
        takes = tl.minimum(needs, tl.sum(available, 0))
        failed += needs - takes

        if takes > 0:
            # The least key that enough slots do not exceed.
            low, high = tl.min(least, 0), tl.max(most, 0)
            middle = low  # free slots, or the oldest, are often enough
            while low < high:
                enough = _slots_below(keys, middle + 1, slots, SLOTS) >= takes
                high = tl.where(enough, middle, high)
                low = tl.where(enough, low, middle + 1)
                middle = low + (high - low) // 2
            equals = takes - _slots_below(keys, low, slots, SLOTS)  # that many of those with this key, the first

            given = tl.zeros([], tl.int32)
            passed = tl.zeros([], tl.int32)
            for start in range(0, slots, SLOTS):
                slot = start + tl.arange(0, SLOTS)
                key = tl.load(keys + slot, mask=slot < slots, other=_NEVER)
                equal = (key == low).to(tl.int32)
                take = (key < low) | ((equal > 0) & (passed + tl.cumsum(equal, 0) <= equals))
                passed += tl.sum(equal, 0)
                entry = tl.load(wanted + given + tl.cumsum(take.to(tl.int32), 0) - 1, mask=take, other=0)
                given += tl.sum(take.to(tl.int32), 0)

                old = tl.load(slot_page + slot, mask=take, other=0)
                valid = tl.load(page_valid + old, mask=old > 0, other=1)
                lost = (valid == 0).to(tl.int32)
                place = quantized + tl.cumsum(lost, 0) - 1
                tl.store(out_slots + place, slot.to(tl.int64), mask=lost > 0)
                tl.store(out_pages + place, old, mask=lost > 0)
                quantized += tl.sum(lost, 0)
                tl.store(page_valid + old, tl.full([SLOTS], 1, tl.uint8), mask=old > 0)
                tl.store(page_slot + old, tl.full([SLOTS], -1, tl.int32), mask=old > 0)

                page = entry // 2
                tl.store(page_slot + page, slot, mask=take)
                tl.store(slot_page + slot, page, mask=take)
                tl.store(slot_stamp + slot, step + entry % 2 * BONUS, mask=take)

    tl.store(out_count, quantized)
    tl.store(written, tl.load(written) + quantized + given_directly)
    tl.store(errors, tl.load(errors) + failed)


@triton.jit
def _slot_of(page_slot, page, exists):
    """Slots of pages: -1 for none, 0 where the page does not exist."""
    return tl.load(page_slot + page, mask=exists, other=0)


@triton.jit
def _touch(index, slot, slot_stamp, step, SINK: tl.constexpr, BONUS: tl.constexpr):
    """Stamp the slots that there are."""
    tl.store(slot_stamp + slot, step + (index < SINK).to(tl.int64) * BONUS, mask=slot > 0)


@triton.jit
def _slots_below(keys, bound, slots, SLOTS: tl.constexpr):
    """How many slots have a key below that."""
    below = tl.full([SLOTS], 0, tl.int32)
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        below += (tl.load(keys + slot, mask=slot < slots, other=_NEVER) < bound).to(tl.int32)
    return tl.sum(below, 0)
