"""Small tables from the host to the device."""

from __future__ import annotations

import numpy as np
import torch

_ALIGNED = 2  # int64s in the 16 bytes that kernels may take for granted


def upload(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """The numbers as int32 on the device, by a copy that the host does not wait for."""
    host = torch.from_numpy(numbers.astype(np.int32))
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def to_device(parts: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int64 vectors on the device, by one copy that the host does not wait for; each is aligned to 16 bytes."""
    sizes = [len(part) for part in parts]
    room = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    host = torch.zeros(sum(room), dtype=torch.int64, pin_memory=device.type == "cuda")
    for target, part in zip(host.split(room), parts):
        target[: len(part)] = torch.from_numpy(part)
    return [x[:size] for x, size in zip(host.to(device, non_blocking=True).split(room), sizes)]
