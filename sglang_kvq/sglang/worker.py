"""One worker's attention, put together once the model is loaded: layers checked, rotations and tiers connected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention

from sglang_kvq.attention.base import AttentionOps, LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.sglang import checks, compat, runtime, weights
from sglang_kvq.sglang.backend import KVQuantBackend
from sglang_kvq.sglang.drafts import BRANCHING
from sglang_kvq.sglang.layers import check_layer_ids, check_layers
from sglang_kvq.sglang.runtime import logger
from sglang_kvq.sglang.types import ModelRunner


def create_backend(model_runner: ModelRunner) -> KVQuantBackend:
    """The backend of one worker: rotations resolved, V folded where possible, tiers connected."""
    from sglang_kvq.sglang.worker_rotations import worker_rotations

    state = runtime.started()
    config, pool = state.config, state.pages
    check_layers(model_runner.model, pool.head_dim)
    first = model_runner.token_to_kv_pool.start_layer
    layers = range(first, first + pool.layers)
    check_layer_ids(model_runner.model, layers)
    checks.log_checkpoint_cache(model_runner.model)
    rotations, origin = worker_rotations(model_runner, config, state.geometry, first)
    folded = False
    if rotations.v is not None:
        why_not = weights.why_not_foldable(model_runner.model, layers, model_runner.server_args, pool.device)
        if why_not is None:
            weights.fold(model_runner.model, first, rotations.v, rotations.outputs)
            rotations, folded = replace(rotations, v=None, o=None), True
        else:
            logger.info("kv-quant rotates V at run time, not in the weights: %s", why_not)
    ops = create_ops(model_runner, pool, rotations)
    state.tiers = tiers = create_tiers(pool, config, ops)
    state.status = {
        "method": config.method,
        "rotations": origin.source or origin.objective,
        "rotations_sha256": origin.sha256,
        "v_rotation_folded": folded,
        "keys": _per_layer([f.k.describe() for f in pool.formats]),
        "values": _per_layer([f.v.describe() for f in pool.formats]),
        "clip_k": _per_layer([f.clip_k for f in pool.formats]),
        "clip_v": _per_layer([f.clip_v for f in pool.formats]),
        "kernels": type(ops).__name__,
    }
    logger.info("kv-quant ready: %s", ", ".join(f"{k}={v}" for k, v in state.status.items()))
    if config.capture:
        from sglang_kvq.sglang.capture_backend import capture_backend

        backend = capture_backend(model_runner, config.capture, ops, tiers, first)
    else:
        algorithm = compat.resolved(model_runner.server_args, "speculative_algorithm")
        backend = KVQuantBackend(ops, tiers, first, branching=algorithm == BRANCHING)
    backend.token_to_kv_pool, backend.req_to_token_pool = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
    return backend


def create_tiers(pool: PagePool, config: KVQuantConfig, ops: AttentionOps) -> TierManager:
    """Planned by kernels on a GPU, in torch on a CPU."""
    kind = TierManager
    if pool.device.type != "cpu":
        from sglang_kvq.cache.triton_tiers import TritonTierManager

        kind = TritonTierManager
    return kind(pool, config.sink_pages, config.recent_pages, ops.quantize_slots)


def _per_layer(values: list[Any]) -> object:
    """One value where all layers agree, else the list."""
    return values[0] if len(set(values)) == 1 else values


def create_ops(model_runner: ModelRunner, pool: PagePool, rotations: LayerRotations) -> AttentionOps:
    """Triton on a GPU, plain torch on a CPU."""
    if pool.device.type == "cpu":
        return ReferenceOps(pool, rotations)
    from sglang_kvq.attention import ragged
    from sglang_kvq.attention.triton_ops import TritonOps

    heads = {layer.tp_q_head_num for layer in model_runner.model.modules() if isinstance(layer, RadixAttention)}
    q_heads = heads.pop()
    slab_tokens = ragged.workspace_tokens(pool.kv_heads, pool.head_dim)
    prefill, used = ragged.load(q_heads, pool.kv_heads, pool.head_dim, pool.device, slab_tokens)
    logger.info("kv-quant prefill attention: %s", used)
    return TritonOps(
        pool,
        rotations,
        q_heads=q_heads,
        max_batch=model_runner.req_to_token_pool.req_to_token.shape[0],
        slab_tokens=slab_tokens,
        prefill=prefill,
    )
