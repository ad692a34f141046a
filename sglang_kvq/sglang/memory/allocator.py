"""SGLang's paged allocator, which also tells the tier manager which pages were freed."""

from __future__ import annotations

from functools import cached_property

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages

from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat, runtime
from sglang_kvq.sglang.hooks import PER_TOKEN_FREES

_RELEASE = compat.sglang_version()


class KVQuantAllocator(PagedTokenToKVPoolAllocator):
    """Hands out page ids exactly as SGLang does, and records freed pages. The next plan assigns BF16 pages."""

    free_pages: torch.Tensor

    def clear(self) -> None:
        super().clear()
        tiers = runtime.tiers()
        if tiers is not None:
            tiers.reset()

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
        """Returns what SGLang's function returns; for a lone new prompt without its kernel, whose launch takes longer.

        With SGLang's ``SGLANG_DEBUG_MEMORY_POOL``, SGLang's function also checks the arguments and the result.
        """
        if is_lone_prompt(prefix_lens_cpu) and not self.debug_mode:
            return self._alloc_prompt(extend_num_tokens)
        lens = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu)
        locations: torch.Tensor | None = super().alloc_extend(*lens, last_loc, extend_num_tokens, num_new_pages)
        return locations

    def _alloc_prompt(self, tokens: int) -> torch.Tensor | None:
        """Returns the locations of a prompt's tokens in new pages, int64 ``[tokens]``; None if too few are free."""
        if tokens // self.page_size + 2 > self.free_pages.shape[0]:  # SGLang's bound
            self.merge_and_sort_free()
        free, count = self.free_pages, pages_of_prompt(tokens, self.page_size)
        if count > free.shape[0]:
            return None
        self.free_pages = free[count:]
        return torch.add(self._offsets, free[:count, None], alpha=self.page_size).view(-1)[:tokens]

    @cached_property
    def _offsets(self) -> torch.Tensor:
        """Locations of a page's tokens, counted from the first one."""
        return torch.arange(self.page_size, device=self.device)

    def load_kernels(self, most: int, drafts: bool) -> None:
        """Compiles and loads SGLang's kernels for batches of up to ``most`` requests on a GPU; allocates nothing.

        SGLang has a kernel for each power of two, and would compile it when the first such batch arrives, which then
        waits: about 100 ms, says SGLang's source. Plain SGLang needs none of them, because its pages have one token.

        Args:
            drafts: with speculative decoding, for which SGLang has lengths and locations of 32 bits.
        """
        pages = PagedTokenToKVPoolAllocator

        def extend(lens: torch.Tensor, last: torch.Tensor) -> None:
            pages.alloc_extend(self, lens, lens.cpu(), lens, lens.cpu(), last, 0)  # requests that get no more tokens

        one = torch.ones(1, dtype=torch.int64, device=self.device)
        extend(one, one.new_zeros(2)[1:])  # a decode server's last location may be anywhere, so it is not aligned
        for bits in range(max(most - 1, 0).bit_length() + 1):
            lens = one.repeat(1 << bits)
            first = torch.arange(1 << bits, device=self.device) * self.page_size
            extend(lens, first)
            if drafts:
                extend(lens.int(), first.int())
            else:  # a second token in the page of the first; SGLang's rows have 32 bits
                pages.alloc_decode(self, lens + 1, lens.cpu() + 1, first.int())

    def check_integrity(self) -> None:
        """Raises RuntimeError if pool and allocator disagree. Waits for the device."""
        if compat.applies(OLD_TREE, _RELEASE):
            free = torch.cat((self.free_pages, self.release_pages))
        else:
            free = self.get_all_free_pages()
        check_integrity(runtime.live_tiers(), free, idle=True)

    if compat.applies(PER_TOKEN_FREES, _RELEASE):

        def free(self, free_index: torch.Tensor) -> None:
            """Frees the pages of these tokens: SGLang puts each page once at the head of ``free_pages``."""
            before = len(self.free_pages)
            super().free(free_index)
            if freed := len(self.free_pages) - before:  # 0 while SGLang collects a group of frees
                # Cloned, because an event with a view would keep the whole list alive until the next forward pass.
                runtime.live_tiers().pending.free_pages(self.free_pages[:freed].clone())

    else:

        def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
            for pages in page_ids:
                runtime.live_tiers().pending.free_pages(pages)
            super()._release_page_ids(*page_ids)


def is_lone_prompt(prefix_lens: torch.Tensor) -> bool:
    """Returns True for a batch of one request without a stored prefix; prefix_lens: int64 ``[batch]`` on the host."""
    return prefix_lens.shape[0] == 1 and prefix_lens.item() == 0


def pages_of_prompt(tokens: int, page_size: int) -> int:
    """Returns the number of pages that a prompt without a stored prefix takes."""
    return -(-tokens // page_size)


class OnCpu(PagedTokenToKVPoolAllocator):
    """Paged allocator in torch, for releases (``OLD_TREE``) whose own has only Triton kernels."""

    free_pages: torch.Tensor

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
        if num_new_pages > len(self.free_pages):
            return None
        out = torch.empty(extend_num_tokens, dtype=torch.int64)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc.long(), self.free_pages, out, self.page_size, self.device)
        self.free_pages = self.free_pages[num_new_pages:]
        return out

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        begins_page = (seq_lens - 1) % self.page_size == 0
        needed = int(begins_page.sum())
        if needed > len(self.free_pages):
            return None
        out = last_loc.long() + 1
        out[begins_page] = self.free_pages[:needed] * self.page_size
        self.free_pages = self.free_pages[needed:]
        return out


class KVQuantCpuAllocator(OnCpu, KVQuantAllocator):
    """``KVQuantAllocator`` on a CPU, for releases whose own paged allocator has only Triton kernels."""
