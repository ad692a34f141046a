"""Microseconds of what a CUDA graph replays."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

WARM_UP = 0.1  # seconds


class Timer:
    """Median time of CUDA-graph replays, L2 flushed before each, by reading a large buffer or by writing it."""

    def __init__(self, repeats: int, writes: bool = False) -> None:
        self.repeats, self.writes = repeats, writes
        self.buffer = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")

    def flush(self) -> None:
        self.buffer.zero_() if self.writes else self.buffer.sum()

    def __call__(self, run: Callable[[], object]) -> float:
        """Microseconds of ``run``."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        begin = time.monotonic()
        while time.monotonic() < begin + WARM_UP:  # what came before, or the compiler's pause, changed the clocks
            graph.replay()
            torch.cuda.synchronize()
        spans = []
        for _ in range(self.repeats):
            self.flush()
            span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            span[0].record()
            graph.replay()
            span[1].record()
            spans.append(span)
        torch.cuda.synchronize()
        return 1e3 * sorted(a.elapsed_time(b) for a, b in spans)[self.repeats // 2]


def copy_bandwidth(timer: Timer) -> float:
    """Bytes per microsecond of a large elementwise kernel, reads and writes counted.

    Not ``copy_``: inside a CUDA graph that is a memcpy node, which reaches two thirds of what kernels do.
    """
    a = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    return 8 * a.numel() / timer(lambda: torch.add(a, 1.0, out=b))
