"""The rotations of one tensor-parallel worker, on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.methods import RotationKind, get_method
from sglang_kvq.rotations.base import RotationMeta
from sglang_kvq.rotations.identity import cached_layers, geometry_of
from sglang_kvq.rotations.resolve import locate_rotations, resolve_rotations, rotations_of_worker
from sglang_kvq.rotations.storage.zoo import is_inferred
from sglang_kvq.sglang.runtime import logger
from sglang_kvq.sglang.types import ModelRunner


def worker_rotations(
    model_runner: ModelRunner, config: KVQuantConfig, geometry: KVGeometry, layer_ids: Sequence[int]
) -> tuple[LayerRotations, RotationMeta]:
    """Returns the rotations of this worker's layers and KV heads, and their origin.

    Args:
        layer_ids: the model's ids of this worker's layers; rotation files have only the layers of ``cached_layers``.
    """
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
    worker = rotations_of_worker(
        rotations, geometry.formats, stored_at(layer_ids, hf_config), total, start, geometry.kv_heads
    )
    return worker.to(model_runner.device), rotations.meta


def log_inferred(model_runner: ModelRunner, config: KVQuantConfig) -> None:
    """Logs a warning if rotations come from a folder on the hub whose name is inferred, not confirmed."""
    model = model_runner.model_config
    if get_method(config.method).rotation is not RotationKind.LEARNED:
        return
    location = locate_rotations(config, model.model_path, model.hf_config)
    if is_inferred(location):
        logger.warning(
            "kv-quant rotations: %s is inferred from its authors' scripts: check that these are %s's.",
            location,
            model.model_path,
        )


def stored_at(layer_ids: Sequence[int], hf_config: Any) -> range:
    """Returns the indices of these layers in the model's rotation files, where they are consecutive."""
    first = cached_layers(hf_config).index(layer_ids[0])
    return range(first, first + len(layer_ids))


def tensor_parallel(model_runner: ModelRunner) -> tuple[int, int]:
    """Returns rank and size of the group that shards attention heads (smaller than TP with DP attention)."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_rank, parallel.attn_tp_size
