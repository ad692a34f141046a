"""Builds one worker's attention once the model is loaded: checks layers, and connects rotations and tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_kvq.attention.base import AttentionOps, LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sessions.config import EPICACHE
from sglang_kvq.sglang import checks, compat, runtime
from sglang_kvq.sglang.attention import folded_weights
from sglang_kvq.sglang.attention.backend import KVQuantBackend
from sglang_kvq.sglang.attention.drafts import BRANCHING
from sglang_kvq.sglang.attention.layers import check_layer_ids, check_layers, sink_types
from sglang_kvq.sglang.doctor.host import triton_cache
from sglang_kvq.sglang.memory.pool import quantized_pool
from sglang_kvq.sglang.prefix import episodes
from sglang_kvq.sglang.runtime import logger
from sglang_kvq.sglang.types import ModelRunner

#: Maximum number of different per-layer values that the log lists.
MOST_SHOWN = 6


def create_backend(model_runner: ModelRunner) -> AttentionBackend:
    """Builds the backend of one worker: resolves rotations, folds that of values if possible, connects the tiers."""
    from sglang_kvq.sglang.attention.worker_rotations import log_inferred, worker_rotations

    state = runtime.started()
    config, pool = state.config, state.pages
    windows = state.windows.layer_ids if state.windows else ()
    check_layers(model_runner.model, pool.head_dim, pool.kv_heads, windows)
    check_layer_ids(model_runner.model, state.layer_ids, windows)
    checks.log_checkpoint_cache(model_runner.model)
    rotations, origin = worker_rotations(model_runner, config, state.geometry, state.layer_ids)
    folded = False
    if rotations.v is not None:
        why_not = folded_weights.why_not_foldable(
            model_runner.model, state.layer_ids, model_runner.server_args, pool.device
        )
        if why_not is None:
            folded_weights.fold(model_runner.model, state.layer_ids, rotations.v, rotations.outputs)
            rotations, folded = replace(rotations, v=None, o=None), True
        else:
            logger.info("kv-quant rotates V at run time, not in the weights: %s", why_not)
    scores = config.episodic is not None and config.episodic.policy == EPICACHE
    ops = create_ops(model_runner, pool, rotations, state.layer_ids, scores)
    if pool.device.type != "cpu":
        drafts = compat.drafts(model_runner.server_args) > 0
        state.allocator.load_kernels(model_runner.req_to_token_pool.size, drafts)
    state.tiers = tiers = create_tiers(pool, config, ops, compat.step_tokens(model_runner.server_args))
    if config.episodic is not None:
        config.episodic.check_cache(pool.pages * PAGE_SIZE)
        if scores:
            episodes.serve()
    state.status = {
        "method": config.method,
        "rotations": origin.source or origin.objective,
        "rotations_sha256": origin.sha256,
        "rotations_files": origin.files,
        "v_rotation_folded": folded,
        "keys": _per_layer([f.k.describe() for f in pool.formats]),
        "values": _per_layer([f.v.describe() for f in pool.formats]),
        "clip_k": _per_layer([f.clip_k for f in pool.formats]),
        "clip_v": _per_layer([f.clip_v for f in pool.formats]),
        "kernels": type(ops).__name__,
    }
    if state.windows is not None:
        state.status |= {"window_tokens": state.windows.tokens, "swa_full_tokens_ratio": round(state.windows.ratio, 4)}
    log_inferred(model_runner, config)
    for line in describe(state.status):
        logger.info("kv-quant %s", line)
    if config.capture:
        from sglang_kvq.sglang.calibration.capture_backend import capture_backend

        backend = capture_backend(model_runner, config.capture, ops, tiers, state.layer_ids)
    else:
        algorithm = compat.resolved(model_runner.server_args, "speculative_algorithm")
        mixed = bool(compat.resolved(model_runner.server_args, "enable_mixed_chunk", False))
        backend = KVQuantBackend(ops, tiers, state.layer_ids, branching=algorithm == BRANCHING, mixed=mixed)
    state.watch = backend.watch
    # Models look at this pool's dtype. The pool that SGLang puts around it for a hybrid model reports bfloat16.
    backend.token_to_kv_pool = quantized_pool(model_runner.token_to_kv_pool)
    backend.req_to_token_pool = model_runner.req_to_token_pool
    if state.windows is None:
        return backend
    from sglang_kvq.sglang.attention.window_backend import WindowedBackend, create_window_backend

    return WindowedBackend(backend, create_window_backend(model_runner))


def create_tiers(pool: PagePool, config: KVQuantConfig, ops: AttentionOps, written: int) -> TierManager:
    """Builds the tier manager, which plans by kernels on a GPU, in torch on a CPU. written: tokens per decode step."""
    kind = TierManager
    if pool.device.type != "cpu":
        from sglang_kvq.cache.triton_tiers import TritonTierManager

        kind = TritonTierManager
    return kind(
        pool,
        config.sink_pages,
        config.recent_pages,
        ops.quantize_slots,
        ops.restore_pages,
        config.prefill_pages,
        config.kept_pages,
        written,
    )


def describe(status: Mapping[str, Any]) -> Iterator[str]:
    """Yields lines for the log: values that all layers share, then one line per rotation file and per-layer value."""
    longer = {name: value for name, value in status.items() if isinstance(value, (dict, list))}
    yield "ready: " + ", ".join(f"{name}={value}" for name, value in status.items() if name not in longer)
    for name, value in longer.items():
        if isinstance(value, dict):
            yield from (f"{name}: {key}={entry}" for key, entry in value.items())
        else:
            counted = Counter(value).most_common()
            yield (
                f"{name} by layer: "
                + ", ".join(f"{count} x {entry}" for entry, count in counted[:MOST_SHOWN])
                + (f", {len(counted) - MOST_SHOWN} others: see /server_info" if len(counted) > MOST_SHOWN else "")
            )


def _per_layer(values: list[Any]) -> object:
    """Returns the one value that all layers share, otherwise the list."""
    return values[0] if len(set(values)) == 1 else values


def create_ops(
    model_runner: ModelRunner,
    pool: PagePool,
    rotations: LayerRotations,
    layer_ids: Collection[int],
    scores: bool,
) -> AttentionOps:
    """Builds the attention operations: Triton kernels on a GPU, plain torch on a CPU.

    Args:
        scores: whether prompts score the keys before them.

    Raises:
        SystemExit: the layers with these ids have different numbers of query heads.
    """
    if pool.device.type == "cpu":
        return ReferenceOps(pool, rotations)
    from sglang_kvq.attention import prefill_library, ragged
    from sglang_kvq.attention.compile_kernels import compile_kernels
    from sglang_kvq.attention.triton_ops import TritonOps

    layers = [layer for layer in model_runner.model.modules() if isinstance(layer, RadixAttention)]
    heads = {layer.tp_q_head_num for layer in layers if layer.layer_id in layer_ids}
    if len(heads) > 1:
        raise SystemExit(
            f"--kv-quant does not support this model: its layers have {' and '.join(map(str, sorted(heads)))} query "
            "heads. Serve it without --kv-quant."
        )
    q_heads = heads.pop()
    slab_tokens = ragged.workspace_tokens(pool.kv_heads, pool.head_dim)
    prefill, used = prefill_library.load(q_heads, pool.kv_heads, pool.head_dim, pool.device, slab_tokens)
    logger.info("kv-quant prefill attention: %s", used)
    ops = TritonOps(
        pool,
        rotations,
        q_heads=q_heads,
        max_batch=model_runner.req_to_token_pool.req_to_token.shape[0],
        slab_tokens=slab_tokens,
        prefill=prefill,
    )
    logger.info("kv-quant compiles kernels that %s lacks; on a new host this takes about half a minute", triton_cache())
    sinks = sink_types(model_runner.model, layer_ids)
    compile_kernels(ops, compat.drafts(model_runner.server_args), sinks, scores)
    return ops
