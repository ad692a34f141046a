"""A tier manager that plans in torch, paired with one that plans with kernels; both must agree after every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_kvq.cache.pending import ArrivedRequest, Fill, MovedBF16Pages, MovedBoundary
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.sink_token_cache import SinkTokenCache
from sglang_kvq.cache.tiers import QuantizeSlots, RestorePages, TierManager
from sglang_kvq.cache.triton_tiers import TritonTierManager
from tests.kernels.scene import DEVICE


def tables(tiers: TierManager) -> dict[str, torch.Tensor]:
    """Returns everything that a plan changes, on the host, except slot 0's stamp and page 0's record."""
    pool = tiers.pool
    state = {
        "page_slot": pool.page_slot,
        "slot_page": tiers.slot_page,
        "slot_stamp": tiers.slot_stamp[1:],
        "page_valid": tiers.page_valid[1:],
        "row_len": tiers.row_len,
        "row_sink_end": pool.row_sink_end,
        "row_history_end": pool.row_history_end,
        "row_pages": pool.row_pages,
        "errors": tiers.errors,
        "records_written": tiers.records_written,
        "prefix_read": tiers.prefix_read,
    }
    if pool.sink_cache is not None:
        kept = pool.sink_cache.pages
        state |= {
            "first_page": kept,
            "sink_entry": pool.sink_cache.entry,
            "sink_cache": pool.sink_cache.tokens[:, kept > 0],
        }
        state |= {"first_stamp": pool.sink_cache.stamp[kept > 0], "page_first": tiers.page_first[1:]}
    if tiers.places is not None:
        places = tiers.places
        state |= {"places": pool.places, "ids": places.ids[1:], "free_count": places.count}
        state |= {"free_pages": places.stack[: int(places.count)]}
    return {name: tensor.cpu() for name, tensor in state.items()}


def assert_same(got: TierManager, want: TierManager) -> None:
    got, want = tables(got), tables(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), f"{name}: {got[name].tolist()} instead of {tensor.tolist()}"


class TwinTierManager(TierManager):
    """A drop-in for ``TierManager`` on the CPU. At the end of a plan it quantizes the pages that the kernels listed.

    Attributes:
        plans, quantized, filled, restored: counts of comparisons, so that a test can check that some were made;
            ``filled`` counts pages that were copied or filled with chosen tokens, whose records are compared too.
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
        wanted, got = [], []  # (slot, page) pairs that this plan quantizes
        to_restore, restored = [], []  # pages at the end of a plan, as their BF16 copies may be quantized then
        self._restore = restore_pages

        def pairs(slots: torch.Tensor, pages: torch.Tensor, count: torch.Tensor) -> list[tuple[int, int]]:
            return list(zip(slots[: int(count)].tolist(), pages[: int(count)].tolist()))

        def quantize(*batch: torch.Tensor) -> None:
            got.extend(pairs(*batch))
            quantize_slots(*(x.cpu() for x in batch))
            pages = batch[1][: int(batch[2])]
            for own, there in zip(stores, pool.stores):
                own.records[:, pages] = there.records[:, pages.cpu()].to(DEVICE)
            self.quantized += len(pages)

        self.plans = self.quantized = self.filled = self.restored = 0
        keeps = restore_pages is not None
        restore = (lambda pages: to_restore.extend(pages.tolist())) if keeps else None
        more = (prefill_pages, kept_pages, written)
        super().__init__(pool, sink_pages, recent_pages, lambda *x: wanted.extend(pairs(*x)), restore, *more)
        names = ("bf16_pages", "places", "req_to_token", "row_pages", "page_slot", "row_sink_end", "row_history_end")
        own = {name: getattr(pool, name).to(DEVICE, copy=True) for name in names}
        stores = tuple(
            replace(x, layer_ids=x.layer_ids.to(DEVICE), records=x.records.to(DEVICE, copy=True)) for x in pool.stores
        )
        if pool.sink_cache is not None:
            own["sink_cache"] = SinkTokenCache(*(x.to(DEVICE, copy=True) for x in vars(pool.sink_cache).values()))
        theirs = replace(pool, stores=stores, **own)
        if pool.arena is not None:  # the kernels' pool has one memory as well
            sizes = {"pages": pool.pages, "slots": pool.slots, "arena": pool.arena}
            table = own["req_to_token"]
            theirs = PagePool.allocate(pool.formats, kv_heads=pool.kv_heads, req_to_token=table, **sizes)
            stores = theirs.stores
        restore = (lambda pages: restored.extend(pages.tolist())) if keeps else None
        self.kernels = TritonTierManager(theirs, sink_pages, recent_pages, quantize, restore, *more)
        self.wanted, self.got = wanted, got
        self.to_restore, self.restored_there = to_restore, restored

    def reset(self) -> None:
        super().reset()
        self.kernels.reset()
        assert_same(self.kernels, self)

    def apply_pending(self) -> None:
        """Applies recorded events, each moved boundary alone, so that both managers have moved before they write."""
        events = self.pending._events
        if len(events) > 1 and any(isinstance(event, MovedBoundary) for event in events):
            at = next(i for i, event in enumerate(events) if isinstance(event, MovedBoundary))
            for some, later in ((events[:at], []), (events[at : at + 1], events[at + 1 :]), (events[at + 1 :], [])):
                self.pending._events = some
                with pytest.MonkeyPatch.context() as patch:
                    if later:  # the boundary alone: windows whose moves come later must still stay
                        moves = [event for event in later if isinstance(event, MovedBF16Pages)]
                        for manager in (self, self.kernels):
                            patch.setattr(manager.pending, "moves", lambda moves=moves: moves)
                    self.apply_pending()
            return
        if any(isinstance(event, MovedBoundary) and event.first_slot < self.first_slot for event in events):
            self.wait_for_copies()  # they end in this pool alone, and both managers move the same records
        self.kernels.pool.req_to_token.copy_(self.pool.req_to_token)
        # A window that arrives is given back once both have read it.
        self.kernels.pending._events = [e._replace(done=list) if isinstance(e, ArrivedRequest) else e for e in events]
        fills = sum(isinstance(event, Fill) for event in events)
        if fills:  # both start from the same records, in separate tensors
            for own, ours in zip(self.kernels.pool.stores, self.pool.stores):
                own.records.copy_(ours.records)
        if self.sink_cache is not None:  # BF16 tokens that batches have written
            self.kernels.pool.bf16_pages.copy_(self.pool.bf16_pages)
        self.kernels.apply_pending()
        super().apply_pending()
        assert_same(self.kernels, self)
        if fills:
            for own, ours in zip(self.kernels.pool.stores, self.pool.stores):
                # In a shared memory, records of other pages overlap BF16 pages of this pool, which the kernels' pool
                # does not write.
                of = slice(None) if self.places is None else self.page_valid.nonzero().flatten()
                assert torch.equal(own.records.cpu()[:, of], ours.records[:, of]), "records of pages that were filled"
        self.filled += fills

    def record_pages(self, pages: torch.Tensor) -> None:
        super().record_pages(pages)
        self.kernels.record_pages(pages.to(DEVICE))
        assert_same(self.kernels, self)

    def before_backup(self, ids: torch.Tensor) -> None:
        super().before_backup(ids)
        self.kernels.before_backup(ids.to(DEVICE))
        assert_same(self.kernels, self)

    def before_load(self, ids: torch.Tensor) -> None:
        super().before_load(ids)
        self.kernels.before_load(ids.to(DEVICE))
        assert_same(self.kernels, self)

    def _plan(self, rows, prefix_lens, seq_lens, max_len, direct_ids, count=1) -> torch.Tensor | None:
        for found in (self.wanted, self.got, self.to_restore, self.restored_there):
            found.clear()
        direct_pages = super()._plan(rows, prefix_lens, seq_lens, max_len, direct_ids, count)
        self.kernels.pool.req_to_token.copy_(self.pool.req_to_token)
        rows, prefix_lens, seq_lens, direct_ids = (
            x if x is None else x.to(DEVICE) for x in (rows, prefix_lens, seq_lens, direct_ids)
        )
        found = self.kernels._plan(rows, prefix_lens, seq_lens, max_len, direct_ids, count)
        assert direct_pages is None or torch.equal(found.cpu(), direct_pages)
        assert_same(self.kernels, self)
        assert sorted(self.got) == sorted(self.wanted)
        assert self.to_restore == self.restored_there
        if any(self.to_restore):
            self._restore(torch.tensor(self.to_restore))
            self.restored += sum(page > 0 for page in self.to_restore)
        self.plans += 1
        return direct_pages
