"""Keys and values of new tokens into the BF16 overlays of their pages."""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.common import PAGE


def store_tokens(
    overlays: torch.Tensor, page_slot: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write rows k, v ``[T, kv_heads, D]`` (last axis contiguous) where ``loc`` int ``[T]`` says.

    overlays: one layer's, BF16 ``[slots + 1, 2, kv_heads, PAGE_SIZE, D]``; page_slot int32 ``[pages + 1]``,
    a page without an overlay (-1) writes to slot 0.
    """
    tokens, kv_heads, d = k.shape
    if tokens == 0:
        return
    _store[(tokens,)](
        overlays, page_slot, loc, k, v,
        *k.stride()[:2], *v.stride()[:2],
        KV_HEADS=kv_heads,
        HP=triton.next_power_of_2(kv_heads),
        D=d,
        DP=triton.next_power_of_2(d),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _store(
    overlays, page_slot, loc, k, v, k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program t: overlays[slot(loc[t]), :, :, loc[t] % PAGE] = k[t], v[t]."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(loc + token)
    slot = tl.maximum(tl.load(page_slot + place // PAGE), 0).to(tl.int64)
    head, dim = tl.arange(0, HP)[:, None], tl.arange(0, DP)[None, :]
    live = (head < KV_HEADS) & (dim < D)  # [HP, DP]
    target = overlays + slot * (2 * KV_HEADS * PAGE * D) + place % PAGE * D + head * (PAGE * D) + dim
    tl.store(target, tl.load(k + token * k_token + head * k_head + dim, mask=live), mask=live)
    tl.store(target + KV_HEADS * PAGE * D, tl.load(v + token * v_token + head * v_head + dim, mask=live), mask=live)
