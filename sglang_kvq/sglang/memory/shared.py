"""Where records and BF16 pages share one memory: which servers do, and the allocator that divides it as they run."""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils import get_num_new_pages

from sglang_kvq.cache.layout import MemoryLayout
from sglang_kvq.cache.split import Split
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.memory.allocator import KVQuantAllocator
from sglang_kvq.sglang.types import ReqToTokenPool


class SharedAllocator(KVQuantAllocator):
    """Page ids as SGLang hands them out, as many as the memory holds beside the BF16 pages of running requests.

    SGLang asks it before it admits a request, evicts or retracts. ``available_size`` stays the number of ids that are
    free, because SGLang's checks for leaks add it up.
    """

    def __init__(self, *args: Any, layout: MemoryLayout, rows: ReqToTokenPool, **more: Any) -> None:
        if layout.arena is None or layout.windows is None:
            raise ValueError("a memory that is divided once")
        self.split, self.rows = Split(layout.arena, layout.windows), rows
        super().__init__(*args, **more)

    @property
    def used(self) -> int:
        """Pages in use."""
        return int(self.num_pages - len(self.free_pages))

    @property
    def running(self) -> int:
        """Requests with a row."""
        return int(self.rows.size - self.rows.available_size())

    def room(self) -> int:
        """Returns how many more pages fit beside the running requests, whose windows may shrink."""
        return self.split.room(self.running) - self.used

    def admits_another(self) -> bool:
        """Tells if the window of another request fits beside the pages in use."""
        return self.split.room(self.running + 1) >= self.used

    # -- what SGLang asks ------------------------------------------------------------------------

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> PrefillBudget:
        return SharedBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        """What a request takes besides its tokens, counted in tokens: its BF16 pages."""
        if has_req_pool_slot:
            return 0
        arena = self.split.arena
        return math.ceil(self.split.windows.least * arena.slot_bytes / arena.page_bytes) * int(self.page_size)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        """Windows stay whole as long as cached prefixes can give way."""
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return None
        pages = self.used + math.ceil(num_tokens / self.page_size)
        excess = max(self.split.excess(pages, self.running), pages - int(self.num_pages))
        if excess > 0:
            tree_cache.evict_for_alloc(EvictParams(num_tokens=excess * self.page_size))
        return None

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        self.evict_to_free_tokens(tree_cache, num_tokens)
        return bool(math.ceil(num_tokens / self.page_size) <= min(self.room(), len(self.free_pages)))

    # -- page ids --------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not self._divide(need_size // self.page_size):
            return None
        before = self.free_pages
        return self._allocated(before, super().alloc(need_size))

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if not self._divide(num_new_pages):
            return None
        before = self.free_pages
        lens = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu)
        return self._allocated(before, super().alloc_extend(*lens, last_loc, extend_num_tokens, num_new_pages))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        if not self._divide(get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)):
            return None
        before = self.free_pages
        return self._allocated(before, super().alloc_decode(seq_lens, seq_lens_cpu, last_loc))

    def _divide(self, more: int) -> bool:
        """Moves the boundary for so many more pages; False if they do not fit beside the running requests."""
        before = self.split.first_slot
        fits = self.split.fit(self.used + more, self.running)
        if self.split.first_slot != before:
            runtime.live_tiers().pending.move_boundary(self.split.first_slot)
        return fits

    def _allocated(self, before: torch.Tensor, locations: torch.Tensor | None) -> torch.Tensor | None:
        """Records the ids that left the head of the list ``before``; returns the locations."""
        taken = len(before) - len(self.free_pages)
        if locations is not None and taken:
            runtime.live_tiers().pending.allocate_pages(before[:taken].clone())
        return locations


class SharedBudget(PrefillBudget):
    """What one prefill batch may take of the memory, besides what the windows of its requests take."""

    def _available_and_evictable(self) -> int:
        return int(self.allocator.room() * self.page_size + self.tree_cache.evictable_size())
