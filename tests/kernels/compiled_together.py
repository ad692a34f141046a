"""Compiles kernels for an H100 without a GPU, several at the same time; test_launch.py runs this script."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel

from sglang_kvq.kernels.device import launch
from sglang_kvq.kernels.device.launch import compile_together, start_kernel
from tests.kernels import no_gpu

THREADS: set[int] = set()


@triton.jit
def _sum(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out, tl.sum(tl.sort(tl.load(x + i)), 0))


def note(**details: Any) -> None:
    """Notes in which thread a kernel was compiled."""
    if not details["cache_hit"]:
        THREADS.add(threading.get_ident())


def launch_all() -> None:
    x = torch.zeros(256)
    for size in (256, 128, 64, 32, 256):
        start_kernel(_sum, (1,), x, x, SIZE=size)
    start_kernel(_sum, (1,), x, x, SIZE=64, num_warps=4)  # Triton's default: another launch of a kernel above


def main() -> None:
    no_gpu.install(compiles=True)
    knobs.compilation.listener = note
    compile_together(launch_all)
    (found,) = (list(cache[0].values()) for cache in _sum.device_caches.values())
    kernels = {launch._ready(kernel) for kernel in found}
    assert all(type(kernel) is CompiledKernel and "cubin" in kernel.asm for kernel in kernels)
    assert threading.get_ident() not in THREADS and not launch._known
    assert len(no_gpu.loaded) == len(kernels), f"{len(no_gpu.loaded)} of {len(kernels)} kernels were loaded"
    print(f"{len(kernels)} kernels, {len(THREADS)} of {len(os.sched_getaffinity(0))} threads")


main()
