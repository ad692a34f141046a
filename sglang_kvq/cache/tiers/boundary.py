"""Moves the boundary of a shared memory, after moving the pages or BF16 pages that are in the way."""

from __future__ import annotations

import torch

from sglang_kvq.cache.tiers.state import SOFT_BONUS, TierState

#: BF16 pages, and pages, that are copied at a time when the boundary moves: about 100 MB for a large model.
_COPIED_SLOTS, _COPIED_PAGES = 8, 64


def move_boundary(tiers: TierState, first_slot: int) -> None:
    """Makes ``first_slot`` the first slot of BF16 pages; first moves the BF16 pages or pages in that memory."""
    places, old, used, tiers.first_slot = tiers.live_places, tiers.first_slot, tiers.last_page, first_slot
    if first_slot > old:
        _vacate_slots(tiers, torch.arange(old, first_slot, device=tiers.pool.device))
    last = tiers.last_page
    if first_slot < old:
        source, target = places.crowded(last, used)
        tiers.errors += ((source > 0) & (target == 0)).sum()
        _move_pages(tiers, source, target)
        # The bytes of records may be NaN or infinite when they are read as BF16.
        tiers.pool.bf16_pages[:, first_slot:old].zero_()
    places.collect(last)


def _vacate_slots(tiers: TierState, slots: torch.Tensor) -> None:
    """Empties BF16 slots int64 ``[n]``, which become memory for pages.

    Pinned pages get other slots. Other pages of windows get other slots as far as some are in no window. The remaining
    pages are quantized and lose their BF16 copies.
    """
    held, levels = tiers.held()
    hardest = torch.zeros_like(tiers.slot_page).scatter_reduce_(0, held, levels, "amax")[slots]
    order = torch.sort(hardest, descending=True, stable=True).indices
    slots, hardest = slots[order], hardest[order]
    pages = tiers.slot_page[slots]
    pinned, soft = (pages > 0) & (hardest > tiers.soft_pages), (pages > 0) & (hardest > 0)
    hard_slots = torch.where(levels > tiers.soft_pages, held, 0)
    bonus = torch.stack([held, levels * SOFT_BONUS])
    tiers.errors += tiers.assign(pages, pinned, hard_slots, bonus).sum()
    tiers.assign(pages, soft & ~pinned, torch.cat([held, tiers.pool.page_slot[pages].long()]))
    new = tiers.pool.page_slot[pages].long()
    new = torch.where(soft & (new >= tiers.first_slot), new, 0)
    for some in torch.arange(len(slots), device=slots.device).split(_COPIED_SLOTS):
        tiers.pool.bf16_pages[:, new[some]] = tiers.pool.bf16_pages[:, slots[some]]
    tiers.slot_stamp[new] = tiers.slot_stamp[slots]
    lost = torch.where(new > 0, 0, pages)
    tiers.quantize((lost > 0) & ~tiers.page_valid[lost], slots, lost)
    tiers.page_valid.index_fill_(0, lost, True)
    tiers.pool.page_slot.index_fill_(0, lost, -1)
    tiers.pool.page_slot[0].fill_(0)
    tiers.slot_page.index_fill_(0, slots, 0)
    if tiers.sink_cache is not None:
        first, tokens = (lost > 0) & tiers.page_first[lost], tiers.pool.bf16_pages[:, slots, :, :, 0]
        tiers.sink_cache.keep(lost, first, tokens, tiers.pool.page_slot, tiers.steps)


def _move_pages(tiers: TierState, source: torch.Tensor, target: torch.Tensor) -> None:
    """Moves pages ``source`` int64 ``[n]`` with their records to free pages ``target``; pairs of 0 are skipped."""
    pool = tiers.pool
    for some in torch.arange(len(source), device=source.device).split(_COPIED_PAGES):
        for store in pool.stores:
            store.records[:, target[some]] = store.records[:, source[some]]
    slots = pool.page_slot[source].long()
    tiers.live_places.move(source, target)
    tiers.page_valid[target] = tiers.page_valid[source]
    pool.page_slot[target] = slots.int()
    tiers.slot_page[slots.clamp(min=0)] = target
    # Skipped pairs have written to the entries of page 0 and slot 0: reset them.
    pool.page_slot.index_fill_(0, source, -1)
    pool.page_slot[0].fill_(0)
    tiers.slot_page[0].fill_(0)
    tiers.page_valid.index_fill_(0, source, False)
    if tiers.sink_cache is not None:
        tiers.sink_cache.move(source, target)
        tiers.page_first[target] = tiers.page_first[source]
        tiers.page_first.index_fill_(0, source, False)
