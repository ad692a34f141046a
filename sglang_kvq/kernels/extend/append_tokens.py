"""Copies new keys and values behind the stored prefixes of their requests, in a workspace of several requests."""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.arguments import view
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.shape import shape_of

_TOKENS = 32


def append_tokens(
    stored: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Copies token t of the new keys and values to row ``positions[t]`` of the stored ones, in one launch.

    stored: BF16 ``[rows, kv_heads, D]`` each, contiguous; positions: int32 ``[T]``; new: BF16 ``[T, kv_heads, D]``
    each, only the last axis must be contiguous.
    """
    k, v = new
    tokens, kv_heads, d = k.shape
    if tokens == 0:
        return
    start_kernel(
        _append, (-(-tokens // _TOKENS), kv_heads, 2),
        stored, positions, (view(k), view(v)), tokens,
        SHAPE=shape_of(kv_heads, d),
        TOKENS=_TOKENS,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _append(stored, positions, new, tokens, SHAPE: tl.constexpr, TOKENS: tl.constexpr):
    """Program (i, h, n): tile i of tokens, head h, keys (n = 0) or values (n = 1)."""
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    dim = tl.arange(0, SHAPE.DP)[None, :]
    inside = (token < tokens) & (dim < SHAPE.D)
    row = tl.load(positions + token, mask=token < tokens, other=0).to(tl.int64)
    target = (row * SHAPE.KV_HEADS + head) * SHAPE.D + dim
    if tl.program_id(2) == 0:
        x = tl.load(new[0].data + token.to(tl.int64) * new[0].token + head * new[0].head + dim, mask=inside, other=0.0)
        tl.store(stored[0] + target, x, mask=inside)
    else:
        x = tl.load(new[1].data + token.to(tl.int64) * new[1].token + head * new[1].head + dim, mask=inside, other=0.0)
        tl.store(stored[1] + target, x, mask=inside)
