"""Calibration inside a running engine: each worker sums the moments of its own heads.

``Engine(kv_quant="int2", kv_quant_capture="FOLDER:CONTEXT:SKIP")`` runs with ``CaptureBackend``. It counts every prompt
of exactly CONTEXT tokens that arrives whole (one prefill chunk, nothing cached), without its first SKIP tokens. Other
prompts, such as warm-ups, are only served. A counted prompt attends to unquantized keys and values, so the model
computes in BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_kvq.attention.base import AttentionOps
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.rotations.calibration.worker_files import Worker, write_sample, write_sums
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.maths.moments import MomentSums
from sglang_kvq.sglang.attention.backend import KVQuantBackend
from sglang_kvq.sglang.attention.layers import own_keys_and_values
from sglang_kvq.sglang.attention.worker_rotations import stored_at, tensor_parallel
from sglang_kvq.sglang.runtime import logger
from sglang_kvq.sglang.types import AttentionLayer, ForwardBatch, ModelRunner


class CaptureBackend(KVQuantBackend):
    """``KVQuantBackend`` that sums moments of activations, and keeps the last context's activations.

    It writes both to the folder after each context; ``rotations.calibration.worker_files`` describes the files.
    """

    def __init__(
        self,
        ops: AttentionOps,
        tiers: TierManager,
        layer_ids: Sequence[int],
        folder: Path,
        context: int,
        skip: int,
        worker: Worker,
    ) -> None:
        """
        Args:
            context: length in tokens of the prompts that count.
            skip: number of first tokens left out of the sums.
            worker: this worker's rank, heads and layers.
        """
        super().__init__(ops, tiers, layer_ids)
        self.folder, self.context, self.worker = folder, context, worker
        self.sums, self.contexts = MomentSums(skip), 0
        logger.info("kv-quant capture: prompts of %d tokens are summed into %s", context, folder)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        own_k, own_v = own_keys_and_values(layer, k, v, save_kv_cache, kwargs)
        *activations, index = self._heads(q, own_k, own_v, layer)
        at = 0
        for prefix, new in zip(self.batch.prefix_lens, self.batch.new_lens):
            if prefix == 0 and new == self.context:
                self._capture(index, layer.scaling, *(x[at : at + new].transpose(0, 1) for x in activations))
            at += new
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _capture(self, index: int, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        layer = self.worker.first_layer + index
        self.sums.add(layer, q, k, v)
        write_sample(self.folder, self.worker.rank, layer, q, k, v, float(scale))
        if index == self.worker.layers - 1:
            self.contexts += 1
            write_sums(self.folder, self.sums, self.contexts, self.worker)


def capture_backend(
    model_runner: ModelRunner, spec: str, ops: AttentionOps, tiers: TierManager, layer_ids: Sequence[int]
) -> CaptureBackend:
    """Builds the backend of one worker. spec: ``KVQuantConfig.capture``."""
    folder, context, skip = spec.rsplit(":", 2)
    rank, size = tensor_parallel(model_runner)
    hf_config = model_runner.model_config.hf_config
    worker = Worker(rank, size, geometry_of(hf_config).kv_heads, ops.pool.layers, stored_at(layer_ids, hf_config).start)
    return CaptureBackend(ops, tiers, layer_ids, Path(folder), int(context), int(skip), worker)
