"""What the scheduler did to pages and rows since the last plan, applied in its order by one program."""

import torch
import triton
import triton.language as tl

from sglang_kvq.cache.pending import FREE, MOVE
from sglang_kvq.kernels.tiers import TierTables

#: Pages or rows that are handled at a time.
_BLOCK = 1024


def apply_events(tables: TierTables, spans: torch.Tensor, ids: torch.Tensor, events: int) -> None:
    """What ``TierManager`` does in ``_apply_free``, ``_apply_move`` and ``_apply_rows``.

    spans, ids: as ``PendingOps.pack`` gives them; events: how many spans there are.
    """
    _apply[(1,)](
        spans, ids, events,
        tables.page_slot, tables.page_valid, tables.slot_page, tables.row_len,
        FREE=FREE,
        MOVE=MOVE,
        BLOCK=_BLOCK,
        num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["spans", "ids", "events"], do_not_specialize_on_alignment=["spans", "ids"])
def _apply(
    spans, ids, events, page_slot, page_valid, slot_page, row_len,
    FREE: tl.constexpr, MOVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pages repeat within an event at most: then some lanes find it applied already, or do the same."""
    for event in range(events):
        kind = tl.load(spans + event * 3)
        start = tl.load(spans + event * 3 + 1)
        count = tl.load(spans + event * 3 + 2).to(tl.int32)
        for first in range(0, count, BLOCK):
            i = first + tl.arange(0, BLOCK)
            inside = i < count
            if kind == FREE:
                page = tl.load(ids + start + i, mask=inside, other=0)
                slot = tl.load(page_slot + page, mask=page > 0, other=0)
                tl.store(slot_page + slot, tl.full([BLOCK], 0, tl.int64), mask=slot > 0)
                tl.store(page_slot + page, tl.full([BLOCK], -1, tl.int32), mask=page > 0)
                tl.store(page_valid + page, tl.full([BLOCK], 0, tl.uint8), mask=page > 0)
            elif kind == MOVE:
                page = tl.load(ids + start + i, mask=inside, other=0)
                kept = tl.load(ids + start + count + i, mask=inside, other=0)
                slot = tl.load(page_slot + page, mask=(page != kept) & (kept > 0), other=0)
                moves = slot > 0
                moves &= tl.load(page_slot + kept, mask=moves, other=0) < 0
                tl.store(slot_page + slot, kept, mask=moves)
                tl.store(page_slot + page, tl.full([BLOCK], -1, tl.int32), mask=moves)
                tl.store(page_slot + kept, slot, mask=moves)
            else:
                row = tl.load(spans + start + i, mask=inside, other=0)
                tl.store(row_len + row, tl.full([BLOCK], 0, tl.int64), mask=inside)
        tl.debug_barrier()
