"""The submodule from which SGLang imports one kernel."""

from __future__ import annotations

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask, stored_lens, positions, retrive_index, retrive_next_token, retrive_next_sibling, batch, count
) -> None:
    """Writes positions and links of a tree, given a mask of each node's ancestors."""
    order = torch.arange(count)
    ancestors = tree_mask.view(batch, count, count).bool() & (order < order[:, None])
    positions.copy_((ancestors.sum(-1) + stored_lens[:, None]).flatten())
    retrive_index.copy_(torch.arange(batch * count).view(batch, count))
    retrive_next_token.fill_(-1)
    retrive_next_sibling.fill_(-1)
    parents = torch.where(ancestors, order, -1).amax(-1)
    for i, of_request in enumerate(parents.tolist()):
        for node, parent in reversed(list(enumerate(of_request))):
            if parent >= 0:
                retrive_next_sibling[i, node] = retrive_next_token[i, parent]
                retrive_next_token[i, parent] = node
