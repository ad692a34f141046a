"""Writes keys and values of new tokens to the BF16 pages of their pages."""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.arguments import view
from sglang_kvq.kernels.device.common import PAGE
from sglang_kvq.kernels.device.shape import shape_of


def store_tokens(
    bf16_pages: torch.Tensor,
    places: torch.Tensor,
    page_slot: torch.Tensor,
    loc: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Writes rows k, v ``[T, kv_heads, D]`` (last axis contiguous) to the locations ``loc`` int ``[T]``.

    bf16_pages: one layer's, BF16 ``[slots + 1, 2, kv_heads, PAGE_SIZE, D]``; places, page_slot: ``PagePool``'s. A page
    without a BF16 copy (-1) writes to slot 0.
    """
    tokens, kv_heads, d = k.shape
    if tokens == 0:
        return
    _store[(tokens,)](
        bf16_pages, bf16_pages.stride(0), places, page_slot, loc, view(k), view(v),
        SHAPE=shape_of(kv_heads, d),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _store(bf16_pages, bf16_page_slot, places, page_slot, loc, k, v, SHAPE: tl.constexpr):
    """Program t: BF16 pages[slot(loc[t]), :, :, loc[t] % PAGE] = k[t], v[t]."""
    D: tl.constexpr = SHAPE.D
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    location = tl.load(loc + token)
    place = tl.load(places + location // PAGE)
    slot = tl.maximum(tl.load(page_slot + place), 0).to(tl.int64)
    head, dim = tl.arange(0, SHAPE.HP)[:, None], tl.arange(0, SHAPE.DP)[None, :]
    live = (head < KV_HEADS) & (dim < D)  # [HP, DP]
    target = bf16_pages + slot * bf16_page_slot + location % PAGE * D + head * (PAGE * D) + dim
    tl.store(target, tl.load(k.data + token * k.token + head * k.head + dim, mask=live), mask=live)
    target += KV_HEADS * PAGE * D
    tl.store(target, tl.load(v.data + token * v.token + head * v.head + dim, mask=live), mask=live)
