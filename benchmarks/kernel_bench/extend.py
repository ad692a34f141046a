"""Prefill over stored prefixes: long chunks, and a few new tokens that read pages directly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton

from benchmarks import baseline
from benchmarks.kernel_bench.rows import row_of
from benchmarks.kernel_bench.shapes import ANY_EXTEND, KV_HEADS, Q_HEADS, D, ShortShape, checked, make_pool
from benchmarks.kernel_bench.timer import Timer
from sglang_kvq.attention.base import ExtendBatch, LayerRotations
from sglang_kvq.attention.fa3 import FlashAttention3
from sglang_kvq.attention.ragged import RaggedPrefill
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.extend.extend_attention import ExtendLaunch

#: Stored prefix and new tokens.
EXTEND = [(0, 8192), (8192, 8192), (32768, 2048), (65536, 1024), (8192, 512), (8192, 128), (32768, 64)]
#: Short extends: requests, new tokens of each, stored prefix.
SHORT = [
    (1, 16, 32768), (1, 64, 32768), (1, 128, 8192), (1, 256, 32768),
    (8, 64, 16384), (8, 16, 4096), (8, 128, 8192), (32, 32, 8192), (1, 128, 131072),
]  # fmt: skip
#: FlashInfer backends for comparison: on Hopper GPUs ``auto`` chooses fa3, which does not split keys; fa2 does.
BACKENDS = ("auto", "fa2")
#: Launches that --sweep-extend compares: rows, keys, warps, stages, registers, programs per SM.
EXTEND_LAUNCHES = [
    (64, 32, 4, 3, None, 2), (64, 32, 4, 3, 160, 3), (64, 32, 4, 3, 168, 3), (64, 32, 4, 2, 168, 3),
    (64, 32, 4, 4, 168, 3), (64, 32, 4, 2, 128, 4), (128, 32, 8, 3, None, 1), (64, 32, 4, 3, 168, 6),
    (64, 64, 4, 2, None, 2),
]  # fmt: skip


def extend_rows(timer: Timer, prefill: RaggedPrefill | None) -> Iterator[dict]:
    """Yields rows for chunks over quantized prefixes, all with ``prefill`` if given; context counts both."""
    if prefill:
        prefill.suits = lambda new_lens: True
    for prefix, new in EXTEND:
        pool = make_pool([max(prefix, PAGE_SIZE)])
        ops, reference = (
            TritonOps(pool, LayerRotations(), Q_HEADS, 1, prefill=prefill, short=None),
            ReferenceOps(pool, LayerRotations()),
        )
        q, k, v = (torch.randn(new, n, D, device="cuda").bfloat16() for n in (Q_HEADS, KV_HEADS, KV_HEADS))
        none = torch.empty(0, dtype=torch.int64, device="cuda")
        batch = ExtendBatch(torch.tensor([1], device="cuda"), [prefix], [new], torch.arange(new, device="cuda"), none)
        run = lambda: ops.extend(0, q, k, v, batch, D**-0.5)  # noqa: B023, E731
        error = checked(f"extend {prefix} + {new}", run(), reference.extend(0, q, k, v, batch, D**-0.5))
        us = timer(run)
        flops = 4 * Q_HEADS * D * (new * prefix + new * (new + 1) / 2)
        theirs = baseline.prefill_us(timer, q, prefix + new, KV_HEADS)
        library = "fa3" if prefill and isinstance(prefill.library, FlashAttention3) else "flashinfer"
        name = f"extend ({library if ops._extend_plans.slabs is None else 'triton'})"
        yield row_of(
            name, 1, prefix + new, us, theirs, error, None, new_tokens=new, tflop_per_s=round(flops / us / 1e6)
        )


def short_rows(timer: Timer, prefill: RaggedPrefill | None) -> Iterator[dict]:
    """Yields rows for short extends that read pages directly; also times dequantizing first, and FlashInfer."""
    for batch, new, prefix in SHORT:
        shape = ShortShape(batch, new, prefix)
        ours, error = shape.measure(timer, ANY_EXTEND)
        before, _ = shape.measure(timer, None, prefill)
        q, plan = shape.q, shape.plan_us()
        del shape
        theirs = baseline.prefill_us(timer, q, prefix + new, KV_HEADS, batch, (*BACKENDS, baseline.FA3))
        flops = 4 * Q_HEADS * D * batch * (new * prefix + new * (new + 1) / 2)
        more = {"new_tokens": new, "tflop_per_s": round(flops / ours / 1e6), "host_plan_us": round(plan)}
        more |= {"dequantized_first_us": round(before, 2), "ratio_dequantized_first": round(before / ours, 3)}
        yield row_of("extend (pages)", batch, prefix + new, ours, theirs, error, None, **more)


def sweep_extend(timer: Timer) -> None:
    """Prints microseconds by launch."""
    launches = [ExtendLaunch(*x) for x in EXTEND_LAUNCHES]
    print(f"{'rows, keys, warps, stages, registers, per SM':>25}")
    print(" " * 25 + "".join(f"{','.join(map(str, x)).replace('None', '-'):>18}" for x in EXTEND_LAUNCHES))
    for batch, new, prefix in SHORT:
        shape = ShortShape(batch, new, prefix)
        times = []
        for launch in launches:
            try:
                times.append(f"{shape.measure(timer, replace(ANY_EXTEND, launch=launch))[0]:18.1f}")
            except triton.runtime.errors.OutOfResources:
                times.append(f"{'does not fit':>18}")
        print(f"{shape.name:>25}" + "".join(times), flush=True)
