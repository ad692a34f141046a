"""SGLang's view of the cache: a KVCache whose buffers only our attention backend understands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import KVCache

from sglang_kvq.cache.layout import MemoryLayout, contexts_within
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.memory import canary
from sglang_kvq.sglang.runtime import config_of, logger
from sglang_kvq.sglang.types import Configurator, Original


class KVQuantPool(KVCache):
    """Two-tier pool. SGLang sees its size and bytes; the attention backend writes the tokens.

    Its dtype is uint8, that of records. SGLang's models write keys and values into a bfloat16 pool themselves, in one
    kernel with RoPE (``models.utils.enable_fused_set_kv_buffer``). Attention would then not learn that they are new.
    """

    def __init__(self, size: int, page_size: int, state: runtime.Runtime, device: str) -> None:
        layout, self.layer_ids = state.layout, state.layer_ids
        first, last = self.layer_ids[0], self.layer_ids[-1]
        super().__init__(size, page_size, torch.uint8, layout.geometry.layers, device, False, first, last + 1)
        self.layout = layout
        self.head_num, self.head_dim = layout.geometry.kv_heads, layout.geometry.head_dim
        self._finalize_allocation_log(size)
        logger.info(
            "kv-quant %s: %d tokens (BF16 would hold %d in the same %.2f GiB: %.2fx), %.2f allocated bits per element "
            "(%.3f in records), %s, %s",
            state.config.describe(),
            layout.tokens,
            layout.bf16_tokens,
            layout.total_bytes / 2**30,
            layout.tokens / layout.bf16_tokens,
            layout.bits_per_element,
            layout.geometry.record_bits_per_element,
            "BF16 pages share the memory"
            if layout.arena
            else f"{layout.slots} BF16 pages ({layout.slots * page_size} tokens)",
            describe_windows(layout),
        )

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Returns the pool's bytes in two halves, because SGLang's pools have keys and values. Callers add them up."""
        half = self.layout.total_bytes // 2
        return half, self.layout.total_bytes - half

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Moves accepted drafts of a tree so that they form a chain.

        All drafts are still in BF16 pages, because no plan has run since they were written.
        """
        runtime.started().pages.move_tokens(tgt_loc, src_loc)

    # -- transfers between servers (``disaggregation.handover``) -------------------------------

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Returns pointer, bytes, and bytes per page of each buffer that SGLang sends page by page."""
        return runtime.transfers().buffers()

    def request_state_transfer_indices(self, req_pool_idx: int, seq_len: int) -> list[int]:
        """Returns the staging rows that SGLang sends once per request: those of its window."""
        return runtime.transfers().staged_rows(req_pool_idx, seq_len)

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: object = None, req_pool_index: int | None = None
    ) -> Any:
        """Copies a retracted request of a decode server to host memory. Waits for the device."""
        torch.get_device_module(self.device).synchronize()
        return runtime.transfers().save(indices, runtime.live_tiers())

    def load_cpu_copy(
        self, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: object = None, req_pool_index: int | None = None
    ) -> None:
        """Copies a retracted request back, into new pages."""
        if req_pool_index is None:
            raise RuntimeError("kv-quant: SGLang restores a request without its row. Please report this.")
        runtime.transfers().restore(kv_cache_cpu, indices, req_pool_index)

    def _no_buffer(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            "--kv-quant keeps no plain K and V buffers; a feature that reads them cannot be used with it"
        )

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = _no_buffer


def quantized_pool(pool: KVCache) -> KVQuantPool | None:
    """Returns the two-tier pool: ``pool`` itself, or the full-attention part of a hybrid model's pool; None without."""
    inner = getattr(pool, "full_kv_pool", pool)
    return inner if isinstance(inner, KVQuantPool) else None


def build_mha_kv_pool(
    original: Original,
    self: Configurator,
    *,
    max_total_num_tokens: int,
    mha_pool_class: type,
    quant_method: object = None,
) -> Any:
    """AROUND ``KVCacheConfigurator._build_mha_kv_pool``: builds the two-tier pool."""
    if config_of(self.server_args) is None or self.is_draft_worker:
        return original(
            self, max_total_num_tokens=max_total_num_tokens, mha_pool_class=mha_pool_class, quant_method=quant_method
        )
    return make_pool(self, max_total_num_tokens)


def build_hybrid_linear_kv_pool(original: Original, self: Configurator, *, mha_pool_class: type, **rest: Any) -> Any:
    """AROUND ``KVCacheConfigurator._build_hybrid_linear_kv_pool``: puts our pool into SGLang's, with recurrent states.

    SGLang's pool holds the states, and the pool of the full-attention layers, which it makes by ``mha_pool_class``.
    """
    if config_of(self.server_args) is None or self.is_draft_worker:
        return original(self, mha_pool_class=mha_pool_class, **rest)
    return original(self, mha_pool_class=lambda *, size, **_: make_pool(self, size), **rest)


def make_pool(configurator: Configurator, tokens: int) -> KVQuantPool:
    """Builds the two-tier pool in the size that was computed before.

    Raises:
        SystemExit: the model does not run in bfloat16, the type of windows.
    """
    for dtype in (configurator.model_config.dtype, configurator.kv_cache_dtype):
        if dtype != torch.bfloat16:
            raise SystemExit(
                f"--kv-quant keeps windows in bfloat16, but the model runs in {dtype}. Add --dtype bfloat16."
            )
    canary.register(KVQuantPool)
    state = runtime.started()
    pool = KVQuantPool(tokens, PAGE_SIZE, state, configurator.device)
    contexts = contexts_within(configurator.model_config.context_len)
    logger.info("kv-quant %s", describe_requests(state.layout, contexts))
    return pool


def describe_windows(layout: MemoryLayout) -> str:
    """Returns ``at most 195 running requests``, and how many of them have whole windows, unless all have."""
    most = f"at most {layout.max_requests} running requests"
    if layout.whole_windows == layout.max_requests:
        return most
    return f"{most}, {layout.whole_windows} of them with whole windows"


def describe_requests(layout: MemoryLayout, contexts: Sequence[int]) -> str:
    """Returns ``at 4K/32K: BF16 182/22 → 195/146 requests``."""
    plain, ours = zip(*(layout.requests_at(context) for context in contexts))
    named = "/".join(f"{context / 1024:g}K" for context in contexts)
    return f"at {named}: BF16 {'/'.join(map(str, plain))} → {'/'.join(map(str, ours))} requests"
