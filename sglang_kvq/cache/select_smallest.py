"""Selection of the least keys, to reuse BF16 pages or first-token entries; ``kernels.tiers.select_smallest`` does the
same."""

from __future__ import annotations

import torch

from sglang_kvq.constants import NEVER


def hand_out(keys: torch.Tensor, need: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the indices of the least keys, the first among equals, in their own order.

    Args:
        keys: int64 ``[n]``; index 0 is reserved and has ``NEVER``.
        need: bool ``[m]``, which items need an index; the earlier ones get one if not all can.

    Returns:
        indices int64 ``[m]``, 0 for none; bool ``[m]``, True for items that got one.
    """
    order = torch.sort(keys, stable=True).indices
    taken = (torch.arange(len(order), device=keys.device) < need.sum()) & (keys[order] < NEVER)
    chosen = torch.sort(torch.where(taken, order, len(order))).values
    rank = torch.cumsum(need, 0) - 1
    given = need & (rank < taken.sum())
    return torch.where(given, chosen[rank.clamp(0, len(keys) - 1)], 0), given
