"""Times CUDA-graph replays in microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

WARM_UP = 0.1  # seconds


class Timer:
    """Median time of CUDA-graph replays; before each, L2 is flushed by reading a large buffer or by writing it."""

    def __init__(self, repeats: int, writes: bool = False) -> None:
        self.repeats, self.writes = repeats, writes
        self.buffer = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")

    def flush(self) -> None:
        self.buffer.zero_() if self.writes else self.buffer.sum()

    def __call__(self, run: Callable[[], object]) -> float:
        """Returns the microseconds of ``run``."""
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
        while time.monotonic() < begin + WARM_UP:  # earlier work, or the compiler's pause, has changed the clocks
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
    """Returns the bytes per microsecond, read and written, of a large elementwise kernel.

    ``copy_`` is not used: in a CUDA graph it is a memcpy node, which reaches two thirds of a kernel's bandwidth.
    """
    a = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    return 8 * a.numel() / timer(lambda: torch.add(a, 1.0, out=b))
