"""Attention of a block of queries over a quantized history between a BF16 sink and a BF16 window."""

from __future__ import annotations

import torch


def segmented_attention(
    q: torch.Tensor,
    start: int,
    k: torch.Tensor,
    v: torch.Tensor,
    old_k: torch.Tensor,
    old_v: torch.Tensor,
    scale: float,
    *,
    sink: int,
    recent: int,
) -> torch.Tensor:
    """Causal softmax attention that reads history as ``old_k``, ``old_v``.

    History is the tokens past the sink that were ``recent`` or more tokens behind when the block began. With blocks of
    one page that is what the server does: pages leave the window whole.

    Args:
        q: float32 ``[q_heads, n, D]``, queries at positions ``start .. start + n``; ``start`` is a multiple of the page.
        k, v, old_k, old_v: float32 ``[kv_heads, T, D]``, T at least ``start + n``.

    Returns:
        float32 ``[q_heads, n, D]``.
    """
    end, history_end = start + q.shape[1], max(start - recent, sink)

    def mixed(x: torch.Tensor, old_x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :sink], old_x[:, sink:history_end], x[:, history_end:]], dim=1)[None, :, :end]

    causal = torch.ones(q.shape[1], end, dtype=torch.bool, device=q.device).tril(start)
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], mixed(k, old_k), mixed(v, old_v), attn_mask=causal, scale=scale, enable_gqa=True
    )[0]
