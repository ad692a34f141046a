"""Selection of the smallest keys, to reuse BF16 pages or first-token entries.

``kernels.tiers.select_smallest`` does the same on a GPU.
"""

from __future__ import annotations

import torch

from sglang_kvq.constants import NEVER


def hand_out(keys: torch.Tensor, need: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives items the indices of the smallest keys; of equal keys, those with smaller indices.

    Items get these indices in ascending order.

    Args:
        keys: int64 ``[n]``; index 0 is reserved and has ``NEVER``.
        need: bool ``[m]``, True for items that need an index; if there are too few, earlier items get one.

    Returns:
        indices int64 ``[m]``, 0 for none; bool ``[m]``, True for items that got one.
    """
    order = torch.sort(keys, stable=True).indices
    taken = (torch.arange(len(order), device=keys.device) < need.sum()) & (keys[order] < NEVER)
    chosen = torch.sort(torch.where(taken, order, len(order))).values
    rank = torch.cumsum(need, 0) - 1
    given = need & (rank < taken.sum())
    return torch.where(given, chosen[rank.clamp(0, len(keys) - 1)], 0), given
