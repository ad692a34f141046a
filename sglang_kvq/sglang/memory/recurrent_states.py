"""Hook that divides a hybrid model's memory between recurrent states and KV cache, unless the user divides it."""

from __future__ import annotations

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.cache.memory.recurrent_states import StateShare, needs_of, share_states
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.attention.drafts import draft_page_bytes
from sglang_kvq.sglang.memory.capacity import model_formats, requests_per_worker
from sglang_kvq.sglang.runtime import config_of, logger
from sglang_kvq.sglang.types import Configurator, Original

GIB = 1 << 30


def handle_max_mamba_cache(original: Original, self: Configurator, total_rest_memory: float) -> float:
    """AROUND ``KVCacheConfigurator._handle_max_mamba_cache``: takes GiB for both, returns GiB for the KV cache."""
    config = config_of(self.server_args)
    if config is None or self.is_draft_worker:
        rest: float = original(self, total_rest_memory)
        return rest
    chosen = None
    why = "as --mamba-full-memory-ratio or --max-mamba-cache-size say, or --max-running-requests without a radix cache"
    if total_rest_memory > 0 and not _is_settled(self):
        chosen = _choose(self, config, int(total_rest_memory * GIB))
        compat.override(self.server_args, mamba_full_memory_ratio=chosen.ratio)
        why = (
            f"a ratio of {chosen.ratio:.2f}, for {chosen.requests} running requests of {chosen.tokens} tokens; "
            "--mamba-full-memory-ratio sets another"
        )
    rest = original(self, total_rest_memory)
    taken, state_bytes = total_rest_memory - rest, self.mambaish_config.mamba2_cache_params.mamba_cache_per_req
    count = compat.setting(self.server_args, "max_mamba_cache_size")
    logger.info(
        "kv-quant: recurrent states take %.2f GiB (%d of %.1f MiB, %d for each running request%s), %.2f GiB are for "
        "the KV cache: %s",
        taken,
        count,
        state_bytes / 2**20,
        self._calculate_mamba_ratio(),
        f" and {_drafts(self)} for its drafts" if _drafts(self) else "",
        rest,
        why,
    )
    return rest


def _is_settled(configurator: Configurator) -> bool:
    """Returns True if the user gave the number of states or the ratio, or if SGLang derives it from another flag."""
    args = configurator.server_args
    given = compat.typed(args, "mamba_full_memory_ratio") or args.max_mamba_cache_size is not None
    return bool(given or (args.disable_radix_cache and args.max_running_requests is not None))


def _choose(configurator: Configurator, config: KVQuantConfig, budget: int) -> StateShare:
    needs = needs_of(
        config,
        _geometry(configurator, config),
        state_bytes=configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req,
        states=configurator._calculate_mamba_ratio() + _drafts(configurator),
        context=configurator.model_config.context_len,
        drafts=_drafts(configurator),
    )
    return share_states(budget, needs, requests_per_worker(configurator))


def _drafts(configurator: Configurator) -> int:
    """Returns how many states speculation keeps for a running request: one after each draft."""
    return compat.drafts(configurator.server_args)


def _geometry(configurator: Configurator, config: KVQuantConfig) -> KVGeometry:
    """Returns the geometry that ``capacity`` will find later: SGLang has not counted the layers yet."""
    from sglang.srt.runtime_context import get_parallel

    model = configurator.model_config
    kv_heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    return KVGeometry(kv_heads, model_formats(config, model), draft_page_bytes(configurator))
