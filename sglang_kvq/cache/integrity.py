"""Checks the invariants of the tiers' tables between batches, in tests and on an idle server.

docs/design.md lists the invariants and the check of each. The check waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE


def check_integrity(tiers: TierManager, free_pages: torch.Tensor | None = None, *, idle: bool = False) -> None:
    """Raises a ``RuntimeError`` that names the first violated invariant.

    Args:
        tiers: the manager to check. Pending events are applied first, so no batch may be running on the device.
        free_pages: int64, the page ids that the allocator considers free; None skips the checks that need them.
        idle: True if no request is running; then every page that is not free must have been written.
    """
    tiers.apply_pending()
    pool = tiers.pool
    page_slot, slot_page = pool.page_slot.long().cpu(), tiers.slot_page.cpu()
    valid = tiers.page_valid.cpu()

    def require(ok: bool | torch.Tensor, what: str) -> None:
        if not ok:
            raise RuntimeError(f"KV cache integrity: {what}")

    require(int(tiers.errors) == 0, f"{int(tiers.errors)} impossible operations were recorded on the device")
    require(page_slot[0] == 0 and slot_page[0] == 0, "page 0 or slot 0 is not reserved")
    require(tiers.row_len[0] == 0 and not pool.row_pages[0].any(), "row 0, which is for padding, holds tokens")
    owners = (page_slot[1:] > 0).nonzero().flatten() + 1
    require(torch.equal(slot_page[page_slot[owners]], owners), "a page points at a BF16 slot that belongs to another")
    used = int((slot_page > 0).sum())
    require(used == len(owners), f"{used} BF16 slots are used but {len(owners)} pages have one")
    kept = torch.zeros(0, dtype=torch.int64)
    if pool.sink_cache is not None:
        cache = pool.sink_cache
        at = cache.pages.nonzero().flatten()
        held = cache.pages[at].long()
        kept = held.cpu()
        require(torch.equal(cache.entries(held), at), "a first token is kept in an entry that is not its page's")
        require(int((cache.entry > 0).sum()) == len(at), "a page has an entry for its first token that is free")
    if free_pages is None:
        return
    free = free_pages.cpu()
    require(len(free.unique()) == len(free), "a page is in the free list twice")
    if tiers.places is not None:
        free = _free_pages(tiers, free, require)
    require(not (page_slot[free] >= 0).any(), "a free page still has a BF16 slot")
    require(not valid[free].any(), "a free page still counts as quantized")
    require(not torch.isin(kept, free).any(), "the first token of a free page is still kept")
    if tiers.sink_cache is not None:
        require(not tiers.page_first.cpu()[free].any(), "a free page still counts as the first of a sequence")
    taken = torch.ones(len(valid), dtype=torch.bool)
    taken[0], taken[free] = False, False
    lost = (taken & ~valid & (page_slot <= 0)).nonzero().flatten()
    if idle:
        require(len(lost) == 0, f"page {lost[:1].tolist()} of {len(lost)} is neither free nor in a record nor in BF16")
    for row, length in enumerate(tiers.row_len.tolist()):
        ids = pool.req_to_token[row, : length // PAGE_SIZE * PAGE_SIZE : PAGE_SIZE].long().cpu() // PAGE_SIZE
        require(taken[pool.places.cpu()[ids].long()].all(), f"row {row}, which is in use, has a page that is free")


def _free_pages(
    tiers: TierManager, free_ids: torch.Tensor, require: Callable[[bool | torch.Tensor, str], None]
) -> torch.Tensor:
    """Checks the table of page ids in a shared memory; returns the pages that no id has."""
    table, ids, last = tiers.pool.places.cpu().long(), tiers.live_places.ids.cpu().long(), tiers.last_page
    require(not table[free_ids].any(), "an id that is free has a page")
    used = torch.ones(len(table), dtype=torch.bool)
    used[0], used[free_ids] = False, False
    pages = table[used]
    require((pages > 0).all(), "an id in use has no page")
    require(not (pages > last).any(), "a page lies among the BF16 pages")
    require(torch.equal(ids[pages], used.nonzero().flatten()), "a page belongs to another id than its own")
    require(int((ids > 0).sum()) == len(pages), "a page belongs to an id that does not have it")
    stack = tiers.live_places.stack[: int(tiers.live_places.count)].long().cpu()
    free = (ids[1 : last + 1] == 0).nonzero().flatten() + 1
    require(torch.equal(stack.sort().values, free), "the stack of free pages is not what no id has")
    require(not (tiers.slot_page[: tiers.first_slot] > 0).any(), "a BF16 page lies among the pages")
    return (ids == 0).nonzero().flatten()[1:]
