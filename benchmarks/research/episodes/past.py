"""Stored keys and values, and attention over stored and new tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention

#: ``round_trip(layer, first, k, v)`` returns keys and values ``[rows, kv_heads, n, D]``, of tokens from ``first`` on,
#: as they are read later.
RoundTrip = Callable[[int, int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Past:
    """Stored keys and values of each layer; keys include their RoPE, so the order of slots does not matter.

    Attributes:
        k, v: ``[rows, kv_heads, slots, D]``; one row serves every row of a batch.
        valid: bool ``[rows, kv_heads, slots]``, or None if every slot counts.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    valid: list[torch.Tensor | None]

    @classmethod
    def empty(cls) -> Past:
        return cls([], [], [])

    def slots(self) -> float:
        """Returns the number of slots that count, averaged over layers, rows and heads."""
        counts = [
            float(k.shape[2]) if valid is None else float(valid.sum(-1, dtype=torch.float64).mean())
            for k, valid in zip(self.k, self.valid)
        ]
        return sum(counts) / len(counts) if counts else 0.0

    def row(self, row: int) -> Past:
        one = slice(row, row + 1)
        return Past(
            [k[one] for k in self.k], [v[one] for v in self.v], [m if m is None else m[one] for m in self.valid]
        )

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Implements ``Attend`` over the past and, causally, the new tokens."""
        if not self.k or not self.k[layer].shape[2]:
            return attend_new(layer, q, k, v, scale)
        return attention(q, k, v, self.k[layer], self.v[layer], self.valid[layer], scale)


def attend_new(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes plain causal attention of a batch of prompts."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def group_rows(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshapes queries ``[B, q_heads, n, D]`` to ``[B, kv_heads, group * n, D]``: rows that read one KV head."""
    b, heads, n, d = q.shape
    return q.reshape(b, kv_heads, heads // kv_heads * n, d)


@lru_cache(maxsize=4)
def _mask(slots: int, n: int, group: int, device: torch.device) -> torch.Tensor:
    """Returns bool ``[group * n, slots + n]``: all stored tokens, and new tokens that are not later."""
    causal = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    stored = torch.ones(n, slots, dtype=torch.bool, device=device)
    return torch.cat([stored, causal], 1).repeat(group, 1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past_k: torch.Tensor,
    past_v: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attends with a softmax over ``[past | new]``; shapes as in ``Attend`` and ``Past``."""
    b, heads, n, d = q.shape
    kv_heads, slots = k.shape[1], past_k.shape[2]
    mask = _mask(slots, n, heads // kv_heads, q.device)
    if valid is not None:
        of_new = torch.ones(*valid.shape[:2], n, dtype=torch.bool, device=q.device)
        mask = mask & torch.cat([valid, of_new], 2)[:, :, None]
    keys = torch.cat([past_k.expand(b, -1, -1, -1), k], 2)
    values = torch.cat([past_v.expand(b, -1, -1, -1), v], 2)
    out = scaled_dot_product_attention(group_rows(q, kv_heads), keys, values, attn_mask=mask, scale=scale)
    return out.reshape(b, heads, n, d)


@dataclass(frozen=True)
class Kept:
    """The tokens that a ``Past`` holds.

    Attributes:
        index: per layer int64 ``[rows, kv_heads, slots]``, tokens of the history.
        valid: as in ``Past``.
    """

    index: list[torch.Tensor]
    valid: list[torch.Tensor | None]

    def of(self, full: Past) -> Past:
        """Selects these tokens from a full cache of one row."""
        k = [gather(x, i) for x, i in zip(full.k, self.index)]
        v = [gather(x, i) for x, i in zip(full.v, self.index)]
        return Past(k, v, list(self.valid))

    def coverage(self, tokens: int) -> torch.Tensor:
        """Returns the share of layers and heads that hold a token: float32 ``[rows, tokens]``."""
        rows, heads, _ = self.index[0].shape
        total = torch.zeros(rows, tokens, device=self.index[0].device)
        for index, valid in zip(self.index, self.valid):
            ones = torch.ones_like(index, dtype=torch.float32) if valid is None else valid.float()
            total.scatter_add_(1, index.flatten(1), ones.flatten(1))
        return total / (len(self.index) * heads)


def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gathers slots of ``[1 or rows, heads, slots, D]`` by index ``[rows, heads, n]``: ``[rows, heads, n, D]``."""
    x = x.expand(index.shape[0], -1, -1, -1)
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1]))
