"""Draft tokens of speculative decoding, as the target model verifies them: equally many of each request in a batch.

A request has stored ``lens`` tokens. Its drafts follow them, one location each; the first is the token sampled last,
the others were guessed. A draft sees everything stored and, of the drafts, those that lead to it: in a chain all before
it and itself, in a tree its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvq.errors import KVQuantError

#: A draft's view of the others is one int64, whose sign bit stays unused.
MOST_DRAFTS = 63


@dataclass(frozen=True)
class DraftBatch:
    """A batch to verify; nothing of it is read on the host, so it may be captured in a CUDA graph.

    Attributes:
        rows: int ``[batch]``, rows of ``req_to_token``; row 0 is padding.
        seq_lens: int ``[batch]``, tokens of each request, its drafts counted.
        seen: int64 ``[batch, count]``: bit j of entry (i, t) is whether draft t of request i sees its draft j.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    seen: torch.Tensor

    @property
    def count(self) -> int:
        """Drafts of each request."""
        return self.seen.shape[1]


def check_count(count: int, recent_tokens: int) -> None:
    """Refuse numbers of drafts that windows or kernels do not hold.

    A page becomes a record once it has left the window. With no more drafts than recent tokens it is full of committed
    tokens by then, so that a rejected draft never enters one.

    Raises:
        KVQuantError: names the number and the fix.
    """
    most = min(MOST_DRAFTS, recent_tokens)
    if not 1 <= count <= most:
        raise KVQuantError(
            f"--speculative-num-draft-tokens {count}: a request may have 1 to {most} drafts at once, which are written "
            f"to its {recent_tokens} recent tokens (--kv-quant-recent); lower it or raise that."
        )


def chain(count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """``seen`` of a chain, int64 ``[count]``: each draft sees itself and those before it."""
    return (2 << torch.arange(count, dtype=torch.int64, device=device)) - 1


def from_mask(mask: torch.Tensor) -> torch.Tensor:
    """``seen`` of a boolean mask ``[..., count, count]`` whose entry (t, j) is whether draft t sees draft j."""
    bits = torch.ones_like(mask[..., 0, :], dtype=torch.int64) << torch.arange(mask.shape[-1], device=mask.device)
    return (mask.long() * bits[..., None, :]).sum(-1)


def mask_of(seen: torch.Tensor) -> torch.Tensor:
    """Its inverse: bool ``[..., count, count]``."""
    return (seen[..., None] >> torch.arange(seen.shape[-1], device=seen.device)) & 1 > 0
