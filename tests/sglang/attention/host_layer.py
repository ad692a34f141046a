"""Measures what a prefill layer asks of the host, without a GPU; test_host_layer.py runs this script.

The host runs the real path of a layer: backend, rotation, FlashAttention 3's plan. ``no_gpu`` launches nothing. The
script prints the operations of PyTorch per layer, the launches per layer, and the microseconds per layer.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_kvq.attention import triton_ops
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.fa3 import FlashAttention3
from sglang_kvq.attention.ragged import RaggedPrefill
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from tests.kernels import no_gpu
from tests.leaving import leave

LAYERS, Q_HEADS, KV_HEADS, D, PAGES = 36, 32, 8, 128, 40
MODE = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False, is_target_verify=lambda: False)


class Counted(TorchDispatchMode):
    """Counts PyTorch's operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def attend(q, k, v, out, **how):
    """Takes FlashAttention 3's place."""
    return out


class Prefill:
    """A prompt of Qwen3-8B's shapes that reads ``prefix`` stored tokens."""

    def __init__(self, tokens: int, prefix: int) -> None:
        from sglang_kvq.sglang.attention.backend import KVQuantBackend

        table = torch.zeros(4, PAGES * P, dtype=torch.int32)
        table[1] = P + torch.arange(PAGES * P)
        formats = [PageFormat(D, D)] * LAYERS
        pool = PagePool.allocate(formats, kv_heads=KV_HEADS, pages=PAGES + 1, slots=20, req_to_token=table)
        library = FlashAttention3(attend, None)
        prefill = RaggedPrefill(library, Q_HEADS, KV_HEADS, D, torch.device("cpu"), PAGES * P)
        rotations = LayerRotations(k=torch.eye(D).expand(LAYERS, 1, D, D).contiguous())
        ops = triton_ops.TritonOps(pool, rotations, Q_HEADS, max_batch=4, prefill=prefill, short=None)
        self.backend = KVQuantBackend(ops, TierManager(pool, 1, 4, ops.quantize_slots), range(LAYERS))
        self.layers = [SimpleNamespace(head_dim=D, layer_id=i, scaling=D**-0.5) for i in range(LAYERS)]
        projected = torch.zeros(tokens, (Q_HEADS + 2 * KV_HEADS) * D, dtype=torch.bfloat16)
        q, *kv = projected.split([Q_HEADS * D, KV_HEADS * D, KV_HEADS * D], 1)
        self.qkv = q, *(x.view(tokens, KV_HEADS, D) for x in kv)
        self.batch = SimpleNamespace(
            forward_mode=MODE,
            req_pool_indices=torch.tensor([1]),
            extend_prefix_lens_cpu=[prefix],
            extend_seq_lens_cpu=[tokens],
            out_cache_loc=table[1, prefix : prefix + tokens].long(),
            rids=["request"],
            _attn_output=torch.zeros(tokens, Q_HEADS * D, dtype=torch.bfloat16),
        )
        self.backend.init_forward_metadata_out_graph(self.batch)
        self.run()

    def run(self) -> None:
        for layer in self.layers:
            self.backend.forward_extend(*self.qkv, layer, self.batch)


def main() -> None:
    no_gpu.install()
    triton_ops.INTERPRETED = True  # only lets the operations start without a GPU
    for name, prefix in (("fresh", 0), ("after a prefix", 5 * P)):
        prefill, took = Prefill(int(sys.argv[1]), prefix), []
        no_gpu.noted.clear()
        with Counted() as counted:
            prefill.run()
        for _ in range(20):
            begin = time.perf_counter()
            prefill.run()
            took.append(time.perf_counter() - begin)
        launches = len(no_gpu.noted) / LAYERS / 21
        print(
            f"{name}: {counted.count / LAYERS:g} operations, {launches:g} launches, {min(took) / LAYERS * 1e6:.0f} us"
        )


main()
leave()
