"""An SGLang plugin that checks the records of each page that goes to host memory; ``benchmarks/soak.py`` installs it.

Records of a page do not change while a page id or a row of host memory holds them. In a shared memory they may move. So
a checksum of them is taken whenever they are copied to the host, and must be the same

    loads   once they have been loaded from that row
    pages   when the page id is freed, or when the cache is flushed

All is computed on the device, by the streams that copy and plan. Nothing waits, so the streams keep their order.
``/server_info`` counts what was compared and what differed (``live_state``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from sglang_kvq.cache.transfer import to_device
from sglang_kvq.constants import PAGE_SIZE

#: Pages whose checksums are computed at a time when the cache is flushed.
AT_A_TIME = 64
NAMES = ("loads", "pages")


class Copies:
    """Checksums of one worker's pages, int64, by page id and by row of host memory; 0 if unknown.

    Attributes:
        compared, wrong: int64 ``[1]`` on the device, for each of ``NAMES``; each is used by one stream only.
    """

    def __init__(self, tiers: Any, rows: int) -> None:
        self.tiers, device = tiers, tiers.pool.device
        self.of_id = torch.zeros(len(tiers.page_valid), dtype=torch.int64, device=device)
        self.of_row = torch.zeros(rows, dtype=torch.int64, device=device)
        self.compared, self.wrong = ({name: self.of_id.new_zeros(1) for name in NAMES} for _ in range(2))
        widest = max(records[0].numel() for records in tiers.pool.records)
        generator = torch.Generator().manual_seed(1)
        factors = torch.randint(1, 1 << 40, (widest,), generator=generator)
        self._factors = factors.to(device)

    def sums(self, pages: torch.Tensor) -> torch.Tensor:
        """Returns checksums of pages int64 ``[n]``, all odd, int64 ``[n]``."""
        total = torch.zeros(len(pages), dtype=torch.int64, device=self._factors.device)
        for records in self.tiers.pool.records:
            layer = records[pages].flatten(1)
            total = total * 31 + (layer * self._factors[: layer.shape[1]]).sum(1)
        return total * 2 + 1

    def backed_up(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Notes pages int64 ``[n]`` that are copied to host rows int64 ``[n]``."""
        self.of_row[rows] = self.of_id[self._ids(pages)] = self.sums(pages)

    def loaded(self, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Compares pages that were loaded from host rows; rows that storage has filled have no checksum."""
        found = self.sums(pages)
        self._compare("loads", found, self.of_row[rows])
        self.of_id[self._ids(pages)] = found

    def leave(self, ids: torch.Tensor) -> None:
        """Compares the pages of ids int64 ``[n]`` whose events are not applied yet, and forgets them."""
        for some in ids.split(AT_A_TIME):
            self._compare("pages", self.sums(self.tiers.pages_of(some)), self.of_id[some])
        self.of_id.index_fill_(0, ids, 0)

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns what was compared and what differed; waits for the device."""
        if self._factors.device.type == "cuda":
            torch.cuda.synchronize()
        return {name: {"compared": int(self.compared[name]), "wrong": int(self.wrong[name])} for name in NAMES}

    def _ids(self, pages: torch.Tensor) -> torch.Tensor:
        return pages if self.tiers.places is None else self.tiers.places.ids[pages].long()

    def _compare(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        known = expected != 0
        self.compared[name] += known.sum()
        self.wrong[name] += (known & (found != expected)).sum()


def all_equal(counts: dict[str, dict[str, int]]) -> bool:
    """Returns whether pages and loads were compared, and none differed; counts: from ``Copies.counts``."""
    return set(counts) == set(NAMES) and all(found["compared"] and not found["wrong"] for found in counts.values())


class Hooks:
    """The functions that run around those of the plugin; each gets the object and the original method."""

    def __init__(self) -> None:
        self.copies: Copies | None = None
        self.freed: list[torch.Tensor] = []

    def made(self, pool: Any, original: Callable, tiers: Any, **sizes: Any) -> None:
        original(pool, tiers, **sizes)
        self.copies = Copies(tiers, pool.page_num)

    def backup(self, pool: Any, original: Callable, device_pool: Any, rows: Any, pages: torch.Tensor, io: str) -> None:
        original(pool, device_pool, rows, pages, io)
        if self.copies and len(pages):
            self.copies.backed_up(pages, rows)

    def load(
        self,
        pool: Any,
        original: Callable,
        device_pool: Any,
        rows: Any,
        pages: Any,
        layer: int,
        *more: Any,
        **draft: Any,
    ) -> None:
        original(pool, device_pool, rows, pages, layer, *more, **draft)
        if self.copies and layer == pool.layer_num - 1:
            self.copies.loaded(pages, rows)

    def free_rows(self, pool: Any, original: Callable, indices: torch.Tensor) -> int:
        if self.copies:
            (rows,) = to_device([(indices.cpu() // PAGE_SIZE).numpy()], self.copies.of_row.device)
            self.copies.of_row.index_fill_(0, rows, 0)
        return int(original(pool, indices))

    def clear_rows(self, pool: Any, original: Callable) -> None:
        if self.copies:
            self.copies.of_row.zero_()
        original(pool)

    def free_pages(self, pending: Any, original: Callable, pages: torch.Tensor) -> None:
        if self.copies:
            self.freed.append(pages.long().clone())
        original(pending, pages)

    def reset(self, tiers: Any, original: Callable) -> None:
        if self.copies:
            self.freed = [self.copies.of_id.nonzero().flatten()]
        original(tiers)

    def apply_pending(self, tiers: Any, original: Callable) -> None:
        if self.copies and self.freed:
            self.copies.leave(torch.cat([ids.to(tiers.pool.device) for ids in self.freed]))
            self.freed = []
        original(tiers)

    def live_state(self, original: Callable) -> dict[str, Any]:
        return {**original(), **({"copies": self.copies.counts()} if self.copies else {})}


def install() -> None:
    """Wraps the plugin's host pool and tiers in a scheduler's process."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang_kvq.cache.pending import PendingOps
    from sglang_kvq.cache.tiers import TierManager
    from sglang_kvq.sglang import observe
    from sglang_kvq.sglang.hicache.host_pool import KVQuantHostPool

    hooks = Hooks()
    for owner, name, hook in (
        (KVQuantHostPool, "__init__", hooks.made),
        (KVQuantHostPool, "backup_from_device_all_layer_physical", hooks.backup),
        (KVQuantHostPool, "load_to_device_per_layer_physical", hooks.load),
        (KVQuantHostPool, "free", hooks.free_rows),
        (KVQuantHostPool, "clear", hooks.clear_rows),
        (PendingOps, "free_pages", hooks.free_pages),
        (TierManager, "reset", hooks.reset),
        (TierManager, "apply_pending", hooks.apply_pending),
    ):
        setattr(owner, name, _around(hook, getattr(owner, name)))
    observe.live_state = partial(hooks.live_state, observe.live_state)


def _around(hook: Callable, original: Callable) -> Callable:
    """Returns a method that runs ``hook`` with its object, the original method and its arguments."""

    @wraps(original)
    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(owner, original, *args, **kwargs)

    return method
