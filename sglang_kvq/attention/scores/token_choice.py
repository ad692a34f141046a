"""Chooses the tokens that each head keeps, by their scores; all heads keep the same number of tokens."""

from __future__ import annotations

import torch

from sglang_kvq.errors import KVQuantError


def choose_tokens(scores: torch.Tensor, keep: int, pinned: int) -> torch.Tensor:
    """Returns the ``keep`` tokens with the highest scores for each layer and head, in ascending order.

    The first ``pinned`` tokens are always among them. Of tokens with equal scores the earlier is kept, so the choice
    depends only on the scores. The host does not wait for the device.

    Args:
        scores: float ``[layers, kv_heads, n]``.
        keep: number of tokens to keep, ``pinned .. n``.
        pinned: number of first tokens that every head keeps.

    Returns:
        int64 ``[layers, kv_heads, keep]``.

    Raises:
        KVQuantError: ``keep`` exceeds the number of tokens, or is below ``pinned``.
    """
    if scores.dim() != 3 or not scores.dtype.is_floating_point:
        raise KVQuantError(
            f"scores {scores.dtype} {list(scores.shape)}: they must be floats of [layers, kv_heads, tokens]."
        )
    n = scores.shape[-1]
    if not 0 <= pinned <= keep or not 1 <= keep <= n:
        raise KVQuantError(
            f"keep {keep} of {n} tokens with {pinned} pinned: keep at least one and all that are pinned, at most all."
        )
    order = scores[..., pinned:].sort(dim=-1, descending=True, stable=True).indices[..., : keep - pinned] + pinned
    first = torch.arange(pinned, device=scores.device).expand(*scores.shape[:2], -1)
    return torch.cat([first, order.sort(dim=-1).values], dim=-1)
