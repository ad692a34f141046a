"""Hooks that size both pools of a model with sliding windows: ours, and SGLang's own for the layers with windows.

SGLang sizes the second pool as a share of the first: 0.8, unless ``--swa-full-tokens-ratio`` says otherwise. With
quantized layers the second pool would then take most of the memory, for tokens that no window reaches any more. So
unless the user sets the ratio, it follows from the need: a window for each request that may run, and one at the end of
each cached prefix, without which no request could continue the prefix.
"""

from __future__ import annotations

from typing import Any

from sglang_kvq.cache.layout import bf16_slots, reserved_bytes
from sglang_kvq.cache.memory.windows import STOCK_RATIO, WindowNeed, need_of, share_windows, token_bytes
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat, runtime
from sglang_kvq.sglang.attention.drafts import draft_page_bytes
from sglang_kvq.sglang.memory.capacity import start_cache
from sglang_kvq.sglang.runtime import WindowLayers, config_of, logger
from sglang_kvq.sglang.types import Configurator, Original, ServerArgs


def around_init(original: Original, self: Configurator, kvc: Configurator) -> None:
    """AROUND ``HybridSWAPoolConfigurator.__init__``: starts this process's runtime for the layers that see all tokens.

    Raises:
        SystemExit: SGLang and the model's config name different layers of full attention.
    """
    original(self, kvc)
    config = config_of(kvc.server_args)
    if config is None or kvc.is_draft_worker or self._full_layers_num == 0:
        return
    model = kvc.model_config
    kv_heads = self._full_per_token // ((model.head_dim + model.v_head_dim) * kvc.kv_cache_dtype.itemsize)
    state = start_cache(kvc, config, kv_heads, self._full_layers_num, draft_page_bytes(kvc))
    full, windows = layer_ids(kvc)
    if state.layer_ids != tuple(full):
        raise SystemExit(
            f"sglang-kvq: according to SGLang, layers {full} of {model.model_path} have full attention; according to "
            f"the model's config, layers {list(state.layer_ids)}. Serve it without --kv-quant."
        )
    if state.windows is None:
        logger.info("kv-quant divides the memory once: the model's sliding windows take a part of it")
        args = kvc.server_args
        requests = compat.resolved(args, "max_running_requests")
        state.windows = WindowLayers(
            frozenset(windows),
            need=_need(args, kvc.sliding_window_size),
            requests=None if requests is None else max(1, requests // _workers()),
            given_ratio=given_ratio(args),
        )


def layer_ids(kvc: Configurator) -> tuple[list[int], list[int]]:
    """Returns the ids of this worker's layers: those that see all tokens, and those with windows."""
    holder = kvc.model_config if compat.applies(OLD_TREE, compat.sglang_version()) else kvc.layer_info
    return list(holder.full_attention_layer_ids), list(holder.swa_attention_layer_ids)


def given_ratio(server_args: ServerArgs) -> float | None:
    """Returns ``--swa-full-tokens-ratio`` if the user set it, else None.

    If SGLang does not record who set the ratio, any value except SGLang's default counts as set by the user.
    """
    ratio = float(compat.resolved(server_args, "swa_full_tokens_ratio"))
    set_by_user = compat.resolved(server_args, "_swa_full_tokens_ratio_explicitly_set")
    if set_by_user is None:
        set_by_user = ratio != STOCK_RATIO
    return ratio if set_by_user else None


def _need(server_args: ServerArgs, window: int) -> WindowNeed:
    from sglang.srt.environ import envs

    chunk = compat.prefill_batch(server_args)
    prefixes = compat.resolved(server_args, "swa_prefix_tails")
    return need_of(
        window,
        kept_behind=max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get()),
        drafts=compat.step_tokens(server_args),
        chunk=chunk,
        batches=1 if compat.resolved(server_args, "disable_overlap_schedule") else 2,
        prefixes=0 if compat.resolved(server_args, "disable_radix_cache") else prefixes,
    )


def _workers() -> int:
    """Returns the number of data-parallel workers that share ``--max-running-requests``."""
    from sglang.srt.runtime_context import get_parallel

    return max(1, int(get_parallel().attn_dp_size))


def without_cap(original: Original, kvc: Configurator) -> bool:
    """AROUND ``is_applicable`` of SGLang's other configurator of such models: False with ``--kv-quant``.

    The hooks here then size the pools by need.
    """
    return config_of(kvc.server_args) is None and original(kvc)


def calculate_pool_sizes(original: Original, self: Configurator, available_bytes: int, page_size: int) -> Any:
    """AROUND ``HybridSWAPoolConfigurator.calculate_pool_sizes``: divides memory among windows, BF16 pages and records.

    Windows get what they need, and BF16 pages their share of the rest.
    """
    state = runtime.current()
    if state is None or state.windows is None:
        return original(self, available_bytes, page_size)
    config, geometry, windows = state.config, state.geometry, state.windows
    window_bytes = self._swa_per_token * self._swa_layers_num
    plain_bytes = self._full_per_token * self._full_layers_num
    # SGLang prices a draft model's layers like the target's.
    draft_bytes = geometry.draft_page_bytes // PAGE_SIZE
    split, requests = share_windows(
        config,
        geometry,
        available_bytes,
        window_bytes=window_bytes,
        need=windows.need,
        requests=windows.requests,
        ratio=windows.given_ratio,
    )
    if split.tokens <= 0:
        raise SystemExit(
            f"sglang-kvq: {available_bytes / 2**20:.0f} MiB of KV memory do not hold a single page in "
            "addition to the sliding windows. Raise --mem-fraction-static, or lower --max-running-requests or "
            "--swa-full-tokens-ratio."
        )
    state.budget_slots = bf16_slots(config, geometry, split.bf16_budget)
    self._swa_full_tokens_ratio = split.ratio
    self._cell_size = token_bytes(geometry, window_bytes, split.ratio)
    sizes = original(self, max(available_bytes - reserved_bytes(geometry, state.budget_slots), 0), page_size)
    windows.tokens, windows.ratio = sizes.swa_max_total_num_tokens, split.ratio
    plain = available_bytes / (plain_bytes + draft_bytes + (windows.given_ratio or STOCK_RATIO) * window_bytes)
    logger.info(
        "kv-quant windows: %d layers keep their last %d tokens in SGLang's BF16 pool, %d tokens of %.2f GiB "
        "(--swa-full-tokens-ratio %.4f, %s); the other %d layers %d tokens. Plain SGLang would hold %d tokens of all "
        "layers in the same %.2f GiB at a ratio of %g: %.2fx",
        self._swa_layers_num,
        self._sliding_window_size,
        windows.tokens,
        windows.tokens * window_bytes / 2**30,
        split.ratio,
        f"for {requests} running requests" if windows.given_ratio is None else "as given",
        self._full_layers_num,
        sizes.max_total_num_tokens,
        plain,
        available_bytes / 2**30,
        windows.given_ratio or STOCK_RATIO,
        sizes.max_total_num_tokens / plain,
    )
    return sizes


def calculate_pool_sizes_from_max_tokens(
    original: Original, self: Configurator, max_total_num_tokens: int, page_size: int
) -> Any:
    """AROUND ``HybridSWAPoolConfigurator.calculate_pool_sizes_from_max_tokens``: keeps the windows' tokens.

    ``--max-total-tokens`` makes the cache smaller, but the windows need as many tokens as before.
    """
    state = runtime.current()
    if state is not None and state.windows is not None and state.windows.given_ratio is None:
        windows = state.windows
        self._swa_full_tokens_ratio = windows.ratio = min(1.0, windows.tokens / max(max_total_num_tokens, 1))
    sizes = original(self, max_total_num_tokens, page_size)
    if state is not None and state.windows is not None:
        state.windows.tokens = sizes.swa_max_total_num_tokens
        logger.info(
            "kv-quant windows: %d tokens beside the %d that --max-total-tokens allows (--swa-full-tokens-ratio %.4f)",
            sizes.swa_max_total_num_tokens,
            sizes.max_total_num_tokens,
            self._swa_full_tokens_ratio,
        )
    return sizes
