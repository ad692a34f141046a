"""Allocator of a memory that records and BF16 pages share; it moves the boundary between them as requests run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils import get_num_new_pages

from sglang_kvq.cache.layout import MemoryLayout
from sglang_kvq.cache.shared.split import Split
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.memory.allocator import KVQuantAllocator, is_lone_prompt, pages_of_prompt
from sglang_kvq.sglang.types import ReqToTokenPool


class SharedAllocator(KVQuantAllocator):
    """Hands out page ids as SGLang does, as many as fit in the memory beside the BF16 pages of running requests.

    SGLang asks it before it admits a request, evicts pages or retracts a request. ``available_size`` is still the
    number of free ids, because SGLang's leak checks add it up.
    """

    #: SGLang's prefix cache; None until SGLang asks for the first prefill budget.
    tree: Any

    def __init__(self, *args: Any, layout: MemoryLayout, rows: ReqToTokenPool, **more: Any) -> None:
        if layout.arena is None or layout.windows is None:
            raise ValueError("a memory that is divided once")
        self.split, self.rows, self.tree = Split(layout.arena, layout.windows), rows, None
        super().__init__(*args, **more)

    @property
    def used(self) -> int:
        """Pages in use."""
        return int(self.num_pages - self.free_pages.shape[0])

    @property
    def running(self) -> int:
        """Requests with a row."""
        return int(self.rows.size - self.rows.available_size())

    def room(self) -> int:
        """Returns how many more pages fit if the windows of running requests shrink as far as they can."""
        return self.split.room(self.running) - self.used

    def admits_another(self) -> bool:
        """Returns True if another request's window fits once all evictable cached pages are gone."""
        cached = 0 if self.tree is None else self.tree.evictable_size() // self.page_size
        return bool(self.split.room(self.running + 1) >= self.used - cached)

    # -- questions of SGLang's scheduler ---------------------------------------------------------

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> PrefillBudget:
        self.tree = tree_cache
        return SharedBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        """Evicts cached prefixes, as far as there are any, so that the tokens fit beside whole windows."""
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return None
        pages = self.used + math.ceil(num_tokens / self.page_size)
        excess = max(self.split.excess(pages, self.running), pages - int(self.num_pages)) * self.page_size
        if (evicted := min(excess, tree_cache.evictable_size())) > 0:
            tree_cache.evict_for_alloc(EvictParams(num_tokens=evicted))
        return None

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        self.evict_to_free_tokens(tree_cache, num_tokens)
        return bool(math.ceil(num_tokens / self.page_size) <= min(self.room(), len(self.free_pages)))

    # -- page ids --------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        give = super().alloc
        return self._hand_out(need_size // self.page_size, lambda: give(need_size))

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
        if is_lone_prompt(prefix_lens_cpu):
            num_new_pages = pages_of_prompt(extend_num_tokens, self.page_size)
        elif num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        give, lens = super().alloc_extend, (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu)
        return self._hand_out(num_new_pages, lambda: give(*lens, last_loc, extend_num_tokens, num_new_pages))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        give, pages = super().alloc_decode, get_num_new_pages(seq_lens_cpu, page_size=self.page_size, decode=True)
        return self._hand_out(pages, lambda: give(seq_lens, seq_lens_cpu, last_loc))

    def _divide(self, more: int) -> bool:
        """Moves the boundary for ``more`` pages; returns False if they do not fit beside the running requests."""
        before = self.split.first_slot
        fits = self.split.fit(self.used + more, self.running)
        if self.split.first_slot != before:
            runtime.live_tiers().pending.move_boundary(self.split.first_slot)
        return fits

    def _hand_out(self, pages: int, give: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Returns the locations that ``give`` takes in ``pages`` new pages; None if the pages do not fit.

        Records the ids of the new pages as an event.
        """
        if not self._divide(pages):
            return None
        before = self.free_pages
        locations = give()
        if locations is not None:  # the new ids were at the head of the list
            taken = before.shape[0] - self.free_pages.shape[0]
            runtime.live_tiers().pending.allocate_pages(before[:taken].clone())
        return locations


class SharedBudget(PrefillBudget):
    """Limits of one prefill batch: free page ids, and memory for its pages and for its new requests' windows.

    SGLang counts in tokens. So a window counts as the number of tokens whose records take the same memory.
    """

    allocator: SharedAllocator

    def __init__(self, allocator: SharedAllocator, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        arena, least = allocator.split.arena, allocator.split.windows.least
        self.window = math.ceil(least * arena.slot_bytes / arena.page_bytes) * int(self.page_size)
        self.windows = 0  # tokens that stand for the windows of the batch's requests so far

    def _in_memory(self) -> int:
        """Returns the number of tokens that fit beside the windows of running requests and of this batch's requests."""
        return int(self.allocator.room() * self.page_size + self.tree_cache.evictable_size() - self.windows)

    @property
    def remaining_total(self) -> float:
        return float(min(super().remaining_total, self._in_memory() - self.total_offset))

    @property
    def remaining_current(self) -> float:
        return float(min(super().remaining_current, self._in_memory() - self.current_offset))

    def check_prefill(self, *, total_tokens: int, chunk_limit: int | None, **more: Any) -> tuple[bool, int | None]:
        """Returns whether a request fits, and its chunk limit. more: SGLang's arguments for other pools, not needed."""
        fits = total_tokens + self.window < self._in_memory() - self.total_offset
        return (True, chunk_limit) if fits and total_tokens < super().remaining_total else (False, None)

    def prepare_load_back(self, *, full_tokens: int, **more: Any) -> bool:
        """Evicts cached prefixes so that an admitted request's pages can come from the host; returns whether they fit.

        full_tokens: the request's tokens, those from the host included. more: for other pools, not needed.
        """
        self.allocator.evict_to_free_tokens(self.tree_cache, full_tokens)
        return bool(math.ceil(full_tokens / self.page_size) <= self.allocator.room())

    def can_allocate_prefill(self, *, paged_input: int, **more: Any) -> bool:
        """Returns whether a prefill's pages fit. more: SGLang's arguments for other pools, not needed."""
        offset = max(self.total_offset, self.current_offset)
        fits = paged_input + self.window <= self._in_memory() - offset
        return bool(fits and paged_input <= min(super().remaining_current, super().remaining_total))

    def reserve(
        self, extend_input_len: int, max_new_tokens: int, *, is_chunked_continuation: bool = False, **more: Any
    ) -> None:
        super().reserve(extend_input_len, max_new_tokens, is_chunked_continuation=is_chunked_continuation, **more)
        self.windows += 0 if is_chunked_continuation else self.window
