"""Checks of tensors that come out of a file: anything may be in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_kvq.errors import KVQuantError

#: Accepted in files; everything is computed in the first.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def plain_tensor(where: str, name: str, x: Any, shape: Sequence[int] | None = None) -> torch.Tensor:
    """``x`` in float32, if it is a dense tensor of floating-point numbers, all of which its file holds.

    Args:
        where, name: file and entry, for the message.
        shape: expected; None accepts any without an empty dimension.

    Raises:
        KVQuantError: it is something else.
    """
    problem = _problem(x, shape)
    if problem is not None:
        raise KVQuantError(f"{where}: {name} {problem}; fetch the file again or recreate it with `kvq calibrate`.")
    return x.detach().float()  # type: ignore[no-any-return]


def _problem(x: Any, shape: Sequence[int] | None) -> str | None:
    if not isinstance(x, torch.Tensor):
        return f"is no tensor ({type(x).__name__})"
    if x.layout is not torch.strided or x.is_quantized or x.device.type != "cpu":
        return f"is no dense tensor in memory ({x.layout}, {x.device})"
    if x.dtype not in DTYPES:
        return f"has dtype {x.dtype}, expected {DTYPES[0]}"
    if shape is not None and list(x.shape) != list(shape):
        return f"has shape {list(x.shape)}, expected {list(shape)}"
    if not x.numel():
        return f"is empty (shape {list(x.shape)})"
    if x.numel() * x.element_size() > x.untyped_storage().nbytes():
        return f"has shape {list(x.shape)}, more than the file holds"
    return None
