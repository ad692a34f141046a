"""A tier manager planned by kernels, with one planned in torch beside it that must agree after every plan."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.cache.triton_tiers import TritonTierManager


def tables(tiers: TierManager) -> dict[str, torch.Tensor]:
    """Everything a plan changes, on the host; without slot 0 and page 0, whose stamp and record mean nothing."""
    pool = tiers.pool
    state = {
        "page_slot": pool.page_slot,
        "slot_page": tiers.slot_page,
        "slot_stamp": tiers.slot_stamp[1:],
        "page_valid": tiers.page_valid[1:],
        "row_len": tiers.row_len,
        "row_sink_end": pool.row_sink_end,
        "row_history_end": pool.row_history_end,
        "errors": tiers.errors,
        "records_written": tiers.records_written,
    }
    return {name: tensor.cpu() for name, tensor in state.items()}


def assert_same(got: TierManager, want: TierManager) -> None:
    got, want = tables(got), tables(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), f"{name}: {got[name].tolist()} instead of {tensor.tolist()}"


class TwinTierManager(TritonTierManager):
    """Drop-in for ``TierManager``; its kernels decide, the twin in torch checks."""

    def __init__(self, pool: PagePool, sink_pages: int, recent_pages: int, quantise_slots) -> None:
        self.listed = {"ours": [], "twin": []}  # (slot, page) that this plan quantises

        def listing(name: str, slots, pages, count) -> None:
            n = int(count)
            self.listed[name] += zip(slots[:n].tolist(), pages[:n].tolist())

        def quantise(*batch) -> None:
            listing("ours", *batch)
            quantise_slots(*batch)

        super().__init__(pool, sink_pages, recent_pages, quantise)
        own = {name: getattr(pool, name).clone() for name in ("page_slot", "row_sink_end", "row_history_end")}
        self.twin = TierManager(replace(pool, **own), sink_pages, recent_pages, lambda *batch: listing("twin", *batch))

    def reset(self) -> None:
        super().reset()
        self.twin.reset()

    def apply_pending(self) -> None:
        self.twin.pending._ops = list(self.pending._ops)
        self.twin.apply_pending()
        super().apply_pending()
        assert_same(self, self.twin)

    def _plan(self, *batch) -> None:
        for pairs in self.listed.values():
            pairs.clear()
        super()._plan(*batch)
        self.twin._plan(*batch)
        assert_same(self, self.twin)
        assert sorted(self.listed["ours"]) == sorted(self.listed["twin"])
