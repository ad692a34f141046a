"""Selects the tokens that are kept from scores: the highest of each head, or of all heads of a layer."""

from __future__ import annotations

import torch


def pin(scores: torch.Tensor, pinned: torch.Tensor) -> torch.Tensor:
    """Returns scores ``[..., T]`` with those of ``pinned`` (bool, broadcastable) above all others."""
    return scores.masked_fill(pinned, torch.inf)


def top_of_heads(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the ``count`` highest of each head, in order of the slots: int64 ``[rows, kv_heads, count]``.

    Args:
        scores: ``[rows, kv_heads, T]``.
    """
    return scores.topk(min(count, scores.shape[-1]), dim=-1).indices.sort(-1).values


def top_of_layer(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ``kv_heads * count`` highest of all heads of a layer: heads may keep unequal numbers.

    Args:
        scores: ``[rows, kv_heads, T]``.

    Returns:
        Index int64 and validity bool, both ``[rows, kv_heads, most kept by a head]``.
    """
    rows, heads, tokens = scores.shape
    chosen = torch.zeros(rows, heads * tokens, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, scores.flatten(1).topk(min(count, tokens) * heads, dim=-1).indices, True)
    chosen = chosen.unflatten(1, (heads, tokens))
    width = int(chosen.sum(-1).max())
    # Chosen slots first, then the others, both in order.
    index = chosen.logical_not().to(torch.int8).sort(dim=-1, stable=True).indices[..., :width]
    return index, chosen.gather(-1, index)
