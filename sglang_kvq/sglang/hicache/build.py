"""Hooks that build the host pool of the two-tier cache in place of SGLang's."""

from __future__ import annotations

from typing import Any

from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.hicache.host_page import HostPage
from sglang_kvq.sglang.hicache.host_pool import KVQuantHostPool
from sglang_kvq.sglang.hicache.storage import format_tag
from sglang_kvq.sglang.memory.pool import KVQuantPool
from sglang_kvq.sglang.runtime import logger
from sglang_kvq.sglang.types import Original


def build_kv_host_pool(
    original: Original,
    *,
    kv_pool: Any,
    page_size: int,
    host_size: float | None = None,
    mtp_draft_device_pools: tuple[Any, ...] = (),
    pool_label: str = "kv",
    **rest: Any,
) -> Any:
    """AROUND ``hybrid_pool_assembler.build_kv_host_pool``: builds the host pool of quantized pages."""
    if not isinstance(kv_pool, KVQuantPool):
        return original(
            kv_pool=kv_pool,
            page_size=page_size,
            host_size=host_size,
            mtp_draft_device_pools=mtp_draft_device_pools,
            pool_label=pool_label,
            **rest,
        )
    if mtp_draft_device_pools:
        raise RuntimeError("kv-quant: SGLang wants to store draft layers in our host pages. Please report this.")
    from sglang.srt.mem_cache.pool_host.common import get_allocator_type
    from sglang.srt.runtime_context import get_memory

    state, tiers, memory = runtime.started(), runtime.live_tiers(), get_memory()
    pool = KVQuantHostPool(
        tiers,
        start_layer=kv_pool.start_layer,
        end_layer=kv_pool.end_layer,
        ratio=memory.hicache_ratio,
        size=memory.hicache_size if host_size is None else host_size,
        tag=format_tag(state, tiers.sink_cache is not None),
        allocator_type=get_allocator_type(),
        pool_label=pool_label,
    )
    state.host = pool
    logger.info(
        "kv-quant host memory: %d tokens in %.2f GiB, %d bytes a page (BF16: %d), stored as %s",
        pool.size,
        pool.kv_buffer.nbytes / 2**30,
        pool.page.page_bytes,
        state.geometry.slot_bytes,
        pool.storage_format_tag,
    )
    return pool


def around_packing(original: Original, *args: Any, **kwargs: Any) -> bool:
    """AROUND ``base_spec_worker._can_pack_hicache_mtp``: False, because our host rows have no room for NEXTN's layers.

    SGLang then keeps these layers like those of other draft models: in BF16, in a separate host pool with one place per
    page of ours. It copies both together.
    """
    return False


def estimate_bytes(original: Original, params: Any, draft_plan: Any) -> int:
    """AROUND ``hicache_auto_size._estimate_hicache_bytes``: returns the bytes of one host page per page on the device.

    A draft model needs a place for each page as well. Sliding windows have their own pool. Both are included.
    """
    from sglang.srt.mem_cache.hicache_auto_size import _draft_bytes, _pool_bytes

    pool = params.token_to_kv_pool_allocator.get_kvcache()
    full = getattr(pool, "full_kv_pool", pool)
    if not isinstance(full, KVQuantPool):
        bytes_of_others: int = original(params, draft_plan)
        return bytes_of_others
    tiers = runtime.live_tiers()
    ours = full.layout.pages * HostPage(tiers.pool, tiers.sink_cache is not None).page_bytes
    windows = 0 if full is pool else _pool_bytes(pool.swa_kv_pool)
    drafts = () if draft_plan is None else draft_plan.device_pools
    return int(ours + windows + sum(_draft_bytes(pool, draft) for draft in drafts))
