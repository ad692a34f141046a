"""Products of BF16 matrices in FP32, rounded once, which is faster on CPUs without BF16 instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

#: Number of rows from which conversion to FP32 costs less time than it saves.
LEAST_ROWS = 3


def in_fp32(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns ``product``, computed in FP32 for BF16 matrices with several rows."""

    @functools.wraps(product)
    def run(a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor | None, **options: object) -> torch.Tensor:
        rows = a.numel() // a.shape[-1] if a.ndim and a.shape[-1] else 0
        is_one = isinstance(b, torch.Tensor) and a.dtype == b.dtype == torch.bfloat16 and b.ndim == 2
        if not is_one or options or a.is_meta or torch.is_grad_enabled() or rows < LEAST_ROWS:
            return product(a, b, *more, **options)
        return product(a.float(), b.float(), *(x if x is None else x.float() for x in more)).bfloat16()

    return run


def install() -> None:
    """Replaces torch's functions in this process, unless its CPU multiplies BF16 itself."""
    if torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return
    torch.nn.functional.linear = in_fp32(torch.nn.functional.linear)
    torch.matmul = in_fp32(torch.matmul)
