"""The rotations of one tensor-parallel worker, on its device."""

from __future__ import annotations

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.rotations.base import RotationMeta
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.resolve import resolve_rotations, rotations_of_worker
from sglang_kvq.sglang.types import ModelRunner


def worker_rotations(
    model_runner: ModelRunner, config: KVQuantConfig, geometry: KVGeometry, first_layer: int
) -> tuple[LayerRotations, RotationMeta]:
    """Rotations of this worker's layers and KV heads, and where they come from."""
    hf_config = model_runner.model_config.hf_config
    rotations = resolve_rotations(config, model_runner.model_config.model_path, hf_config)
    if rotations is None:
        return LayerRotations(), RotationMeta(objective="none")
    total = geometry_of(hf_config).kv_heads
    rank, size = tensor_parallel(model_runner)
    if total >= size:
        start = rank * geometry.kv_heads
    else:  # heads are replicated over consecutive ranks
        start = rank * total // size
    layers = range(first_layer, first_layer + geometry.layers)
    worker = rotations_of_worker(rotations, geometry.formats, layers, total, start, geometry.kv_heads)
    return worker.to(model_runner.device), rotations.meta


def tensor_parallel(model_runner: ModelRunner) -> tuple[int, int]:
    """Rank and size of the group that shards attention heads (smaller than TP under DP attention)."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_rank, parallel.attn_tp_size
