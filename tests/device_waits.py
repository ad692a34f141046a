"""Detects host code that waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def refused() -> Iterator[None]:
    """Makes every wait for the GPU an error within the block: ``.item()``, a copy from pageable memory, ..."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
