"""The invariants of docs/design.md as one check, for tests and debug mode. Synchronises with the device."""

from __future__ import annotations

import torch

from sglang_kvq.cache.tiers import TierManager


def check_integrity(tiers: TierManager, free_pages: torch.Tensor | None = None) -> None:
    """Raise ``RuntimeError`` naming the first invariant that does not hold.

    Args:
        tiers: the manager to look into; pending events are applied first.
        free_pages: int64, pages the allocator considers free; None skips the checks that need it.
    """
    tiers.apply_pending()
    pool = tiers.pool
    page_slot, slot_page = pool.page_slot.long().cpu(), tiers.slot_page.cpu()
    valid = tiers.page_valid.cpu()

    def require(ok: bool, what: str) -> None:
        if not ok:
            raise RuntimeError(f"KV cache integrity: {what}")

    require(int(tiers.errors) == 0, f"{int(tiers.errors)} impossible requests were recorded on the device")
    require(page_slot[0] == 0 and slot_page[0] == 0, "page 0 or slot 0 is not reserved")
    owners = (page_slot[1:] > 0).nonzero().flatten() + 1
    require(
        torch.equal(slot_page[page_slot[owners]], owners), "a page points at an overlay slot that belongs to another"
    )
    used = int((slot_page > 0).sum())
    require(used == len(owners), f"{used} overlay slots are used but {len(owners)} pages have one")
    if free_pages is not None:
        free = free_pages.cpu()
        require(len(free.unique()) == len(free), "a page is in the free list twice")
        require(not (page_slot[free] >= 0).any(), "a free page still has an overlay slot")
        require(not valid[free].any(), "a free page still counts as quantised")
