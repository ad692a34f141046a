"""Computes a server's capacity in tokens and requests from the model's config.

It uses the same arithmetic as a server's hooks (``cache.layout``, ``cache.memory``), with the defaults of SGLang's
flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.cache.layout import (
    KVGeometry,
    MemoryLayout,
    NoRoom,
    bf16_slots,
    divide,
    fit,
    fit_shared,
    reserved_bytes,
    rows_within,
)
from sglang_kvq.cache.memory.recurrent_states import SGLANG_RATIO, needs_of, share_states
from sglang_kvq.cache.memory.windows import STOCK_RATIO, need_of, share_windows, token_bytes
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.releases import NEW_TREE, OLD_TREE
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.types import ModelConfig

#: States per running request with a prefix cache: its own, two that are being kept, and SGLang's allowance for others.
STATES_PER_REQUEST = 5


@dataclass(frozen=True)
class Capacity:
    """Capacity of a server's memory.

    Attributes:
        tokens_bf16: tokens that plain SGLang holds in the same memory.
        tokens: tokens in the cache of a server with ``--kv-quant``.
        requests: requests that such a server runs at once, without ``--max-running-requests``.
        beside: other content of the memory, in words; None if there is none.
        shared: layout of the memory that records and BF16 pages share; None if the memory is divided once.
    """

    tokens_bf16: int
    tokens: int
    requests: int
    beside: str | None = None
    shared: MemoryLayout | None = None

    def requests_at(self, context: int) -> int:
        """Returns how many requests of ``context`` tokens fit at once with ``--kv-quant``."""
        return (
            min(self.tokens // context, self.requests) if self.shared is None else self.shared.requests_at(context)[1]
        )


def default_chunk(gpu: float | None) -> int:
    """Returns SGLang's default of ``--chunked-prefill-size`` on a GPU of ``gpu`` MiB; None counts as 60 to 160 GiB."""
    if gpu is None:
        return 8192
    small = 35 if compat.applies(OLD_TREE, compat.sglang_version()) else 20
    return next((chunk for gib, chunk in ((small, 2048), (60, 4096), (160, 8192)) if gpu < gib * 1024), 16384)


def plain_capacity(geometry: KVGeometry, model: ModelConfig, tp: int, memory: int) -> tuple[int, int | None]:
    """Returns the tokens that plain SGLang holds in BF16, and the requests for which it has recurrent states.

    The number of requests is None for a model without such states. The arguments are those of ``capacity``.
    """
    if model.is_hybrid_swa:
        tokens = memory / (geometry.slot_bytes / PAGE_SIZE + STOCK_RATIO * window_bytes(model, tp))
        return int(tokens) // PAGE_SIZE * PAGE_SIZE, None
    if state := state_bytes(model, tp):
        states = int(memory * SGLANG_RATIO / (1 + SGLANG_RATIO)) // state
        return (memory - states * state) // geometry.slot_bytes * PAGE_SIZE, states // STATES_PER_REQUEST
    return memory // geometry.slot_bytes * PAGE_SIZE, None


def capacity(
    config: KVQuantConfig, geometry: KVGeometry, model: ModelConfig, tp: int, memory: int, chunk: int
) -> Capacity:
    """Divides the memory as a server would.

    Args:
        geometry: one worker's part of the layers in the cache.
        tp: number of workers that share the heads.
        memory: bytes on one GPU for all data of requests: cache, sliding windows and recurrent states.
        chunk: ``--chunked-prefill-size``.

    Raises:
        NoRoom: the memory does not hold one request's window.
    """
    plain, _ = plain_capacity(geometry, model, tp, memory)
    if model.is_hybrid_swa:
        layout, beside = _with_windows(config, geometry, model, tp, memory, chunk)
        return Capacity(plain, layout.tokens, layout.max_requests, beside)
    if state := state_bytes(model, tp):
        needs = needs_of(config, geometry, state_bytes=state, states=STATES_PER_REQUEST, context=model.context_len)
        ratio = share_states(memory, needs).ratio
        states = int(memory * ratio / (1 + ratio)) // state
        layout = fit(config, geometry, memory - states * state)
        requests = min(layout.max_requests, states // STATES_PER_REQUEST)
        return Capacity(plain, layout.tokens, requests, f"{states:,} recurrent states of {state / 2**20:.1f} MiB")
    if config.bf16_budget is None and compat.applies(NEW_TREE, compat.sglang_version()):
        layout = fit_shared(config, geometry, memory, chunk)
        rows = min(_most_requests(layout, model), rows_within(memory, model.context_len))
        return Capacity(plain, layout.tokens, min(layout.max_requests, rows), shared=layout)
    layout = fit(config, geometry, memory)
    return Capacity(plain, layout.tokens, layout.max_requests)


def _most_requests(layout: MemoryLayout, model: ModelConfig) -> int:
    """Returns SGLang's limit of running requests without ``--max-running-requests``."""
    return max(min(int(layout.tokens / model.context_len * 512), 4096), 2048)


def _with_windows(
    config: KVQuantConfig, geometry: KVGeometry, model: ModelConfig, tp: int, memory: int, chunk: int
) -> tuple[MemoryLayout, str]:
    """Returns the cache's layout of a model with sliding windows, and the windows' part of the memory, in words."""
    from sglang.srt.environ import envs

    need = need_of(
        int(model.sliding_window_size),
        kept_behind=max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get()),
        drafts=1,
        chunk=chunk,
        batches=2,
        prefixes=None,
    )
    of_token = window_bytes(model, tp)
    split, _ = share_windows(config, geometry, memory, window_bytes=of_token, need=need)
    slots = bf16_slots(config, geometry, split.bf16_budget)
    left = max(memory - reserved_bytes(geometry, slots), 0)
    if split.tokens <= 0 or left == 0:
        raise NoRoom(
            f"{memory / 2**20:.0f} MiB of KV memory do not hold a single page in addition to the sliding windows.",
            "Give more memory.",
        )
    pages = int(left / token_bytes(geometry, of_token, split.ratio)) // PAGE_SIZE
    layout = divide(config, geometry, pages=pages, slots=slots)
    in_windows = int(layout.tokens * split.ratio) // PAGE_SIZE * PAGE_SIZE
    windows = f"{in_windows:,} tokens of the {len(model.swa_attention_layer_ids)} layers with windows, in BF16"
    return layout, windows


def window_bytes(model: ModelConfig, tp: int) -> int:
    """Returns the bytes per token in the layers with sliding windows, on one of ``tp`` workers."""
    elements = model.get_swa_num_kv_heads(tp) * (model.swa_head_dim + model.swa_v_head_dim)
    return int(elements * 2 * len(model.swa_attention_layer_ids))


def state_bytes(model: ModelConfig, tp: int) -> int:
    """Returns the bytes of a recurrent state, over all layers, on one of ``tp`` workers; 0 without such states."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config = mambaish_config(model)
    if config is None:
        return 0
    sizes: dict[str, object] = {"attn_tp_size": tp}
    if hasattr(runtime_context, "linear_attn_parallel_group"):  # that function reads this setting
        sizes["enable_cp_tp_group_sharing"] = False
    with runtime_context.get_parallel().override(**sizes):
        return int(config.mamba2_cache_params.mamba_cache_per_req)
