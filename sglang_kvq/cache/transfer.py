"""Copies of small tables from the host to the device, and of counters from the device to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

_ALIGNED = 16  # bytes of alignment that kernels are compiled for


def to_device(
    parts: Sequence[np.ndarray], device: torch.device, dtype: torch.dtype = torch.int64
) -> list[torch.Tensor]:
    """Copies vectors of integers to the device in one copy, each aligned to 16 bytes; the host does not wait."""
    sizes = [len(part) for part in parts]
    aligned = _ALIGNED // dtype.itemsize
    starts = [0, *accumulate(-(-size // aligned) * aligned for size in sizes)]
    host = torch.empty(starts[-1], dtype=dtype, pin_memory=device.type == "cuda")
    array = host.numpy()  # shares the memory; an assignment takes much less time than one of torch
    for start, size, part in zip(starts, sizes, parts):
        array[start : start + size] = part
    copied = host.to(device, non_blocking=True)
    return [copied[start : start + size] for start, size in zip(starts, sizes)]


class LateCopy:
    """Device counters that the host reads some time after asking for them, so that the host never waits.

    On a CPU the host reads the current values.

    Args:
        source: returns the counters, int64 ``[n]`` on the device.
        seconds: on a GPU, the least time from one copy to the next.
    """

    def __init__(self, source: Callable[[], torch.Tensor], device: torch.device, seconds: float = 0.0) -> None:
        self._source, self._seconds = source, seconds
        self._asked, self._next = False, 0.0
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._host, self._copied = torch.zeros_like(source(), device="cpu", pin_memory=True), torch.cuda.Event()

    def ask(self) -> None:
        """Begins a copy after the current stream's work, unless one is under way or began less than ``seconds`` ago."""
        now = time.monotonic()
        if self._asked or (self._host is not None and now < self._next):
            return
        self._asked, self._next = True, now + self._seconds
        if self._host is not None and self._copied is not None:
            self._host.copy_(self._source(), non_blocking=True)
            self._copied.record()

    def arrived(self) -> list[int] | None:
        """Returns the counters, once for each copy; None while the copy is under way, or if none was begun."""
        if not self._asked or (self._copied is not None and not self._copied.query()):
            return None
        self._asked = False
        values: list[int] = (self._source() if self._host is None else self._host).tolist()
        return values
