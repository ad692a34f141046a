"""Hook that allocates this worker's records and BF16 pages, and builds the allocator that hands out page ids."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvq.cache.pool import PagePool
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat, runtime
from sglang_kvq.sglang.memory.allocator import KVQuantAllocator, KVQuantCpuAllocator, OnCpu
from sglang_kvq.sglang.memory.pool import quantized_pool
from sglang_kvq.sglang.types import Configurator, Original, ReqToTokenPool


def build_allocator(
    original: Original,
    self: Configurator,
    *,
    sizes: Any,
    token_to_kv_pool: Any,
    req_to_token_pool: ReqToTokenPool,
    token_to_kv_pool_allocator: Any,
    **rest: Any,
) -> Any:
    """AROUND ``KVCacheConfigurator._build_token_to_kv_pool_allocator``: allocates both tiers, and builds our allocator.

    If a model has sliding windows, SGLang's allocator hands out pages of two pools; ours then replaces its part for
    full attention.
    """
    ours = quantized_pool(token_to_kv_pool)

    def theirs() -> Any:
        return original(
            self,
            sizes=sizes,
            token_to_kv_pool=token_to_kv_pool,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            **rest,
        )

    if ours is None:
        return theirs()
    state, layout = runtime.started(), ours.layout
    state.pages = PagePool.allocate(
        layout.geometry.formats,
        kv_heads=layout.geometry.kv_heads,
        pages=layout.pages,
        slots=layout.slots,
        req_to_token=req_to_token_pool.req_to_token,
        arena=layout.arena,
    )
    in_torch = torch.device(self.device).type == "cpu" and compat.applies(OLD_TREE, compat.sglang_version())
    common = {"page_size": ours.page_size, "dtype": self.kv_cache_dtype, "device": self.device, "need_sort": False}
    if layout.arena is not None:
        # Imported here because older releases lack the classes that it uses.
        from sglang_kvq.sglang.memory.shared import SharedAllocator

        tokens = sizes.max_total_num_tokens
        shared = SharedAllocator(tokens, kvcache=token_to_kv_pool, layout=layout, rows=req_to_token_pool, **common)
        state.allocator, state.split, state.admits_another = shared, shared.split, shared.admits_another
        return shared
    kind = KVQuantCpuAllocator if in_torch else KVQuantAllocator
    has_windows = state.windows is not None
    kvcache = ours if has_windows else token_to_kv_pool
    state.allocator = kind(sizes.max_total_num_tokens, kvcache=kvcache, **common)
    if not has_windows:
        return state.allocator
    both = theirs()
    both.full_attn_allocator = state.allocator
    if in_torch:
        size, kvcache = sizes.swa_max_total_num_tokens, token_to_kv_pool.swa_kv_pool
        both.swa_attn_allocator = OnCpu(size, kvcache=kvcache, **common)
    return both
