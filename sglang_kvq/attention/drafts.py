"""Draft tokens of speculative decoding that the target model verifies: the same number for each request of a batch.

A request's drafts follow its stored tokens, one location each. The first draft is the token sampled last; the others
are guesses. A draft sees all stored tokens, itself and the drafts that lead to it. In a chain these are all drafts
before it; in a tree they are its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvq.errors import KVQuantError

#: Most drafts per request: one int64 mask says which drafts a draft sees, and its sign bit stays unused.
MOST_DRAFTS = 63


@dataclass(frozen=True)
class DraftBatch:
    """A batch to verify. The host reads none of these tensors, so a CUDA graph can capture their use.

    Attributes:
        rows: int ``[batch]``, rows of ``req_to_token``; row 0 is padding.
        seq_lens: int ``[batch]``, tokens of each request, its drafts included.
        seen: int64 ``[batch, count]``: bit j of entry (i, t) is 1 if draft t of request i sees its draft j.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    seen: torch.Tensor

    @property
    def count(self) -> int:
        """Number of drafts per request."""
        return self.seen.shape[1]


def check_count(count: int) -> None:
    """Refuses numbers of drafts that kernels or the smallest window, a page, cannot hold.

    A page becomes a record once it has left the window. If there are at most as many drafts as recent tokens, the page
    holds only committed tokens by then. So no rejected draft can enter a record.

    Raises:
        KVQuantError: the message names the number and the fix.
    """
    if not 1 <= count <= MOST_DRAFTS:
        raise KVQuantError(
            f"--speculative-num-draft-tokens {count}: must be 1 to {MOST_DRAFTS} with --kv-quant. Change it."
        )


def chain(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns ``seen`` of a chain, int64 ``[count]``: each draft sees itself and those before it."""
    return (2 << torch.arange(count, dtype=torch.int64, device=device)) - 1


def from_mask(mask: torch.Tensor) -> torch.Tensor:
    """Converts a boolean mask ``[..., count, count]`` to ``seen``; entry (t, j) is True if draft t sees draft j."""
    bits = torch.ones_like(mask[..., 0, :], dtype=torch.int64) << torch.arange(mask.shape[-1], device=mask.device)
    return (mask.long() * bits[..., None, :]).sum(-1)


def mask_of(seen: torch.Tensor) -> torch.Tensor:
    """Inverts ``from_mask``: returns bool ``[..., count, count]``."""
    return (seen[..., None] >> torch.arange(seen.shape[-1], device=seen.device)) & 1 > 0
