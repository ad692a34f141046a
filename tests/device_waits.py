"""Seeing that the host never waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def refused() -> Iterator[None]:
    """Inside the block every wait for the GPU is an error: ``.item()``, a copy from pageable memory, ..."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
