"""The interface of a family: it turns the history of one layer into what is stored of it, with its size in bits.

History is all tokens between the sink and the recent window. Sink and window stay in BF16 for every method and are not
counted, so a budget is the memory of one history token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

#: BF16 tokens at both ends, the product's defaults.
SINK, RECENT = 64, 256
#: Bits of an unquantized number, of a scale or an offset, and of an index.
NUMBER, SCALE, INDEX = 16, 16, 16


@dataclass(frozen=True)
class History:
    """The history of one layer, keys after RoPE.

    Attributes:
        k, v: float32 ``[kv_heads, n, D]``, rounded to BF16.
        positions: int64 ``[n]``.
        mass: float32 ``[kv_heads, n]``: attention that all queries so far paid to a token, summed over a KV head's
            queries.
        observed: float32 ``[kv_heads, n]``: the same for the last ``OBSERVED`` queries alone.
    """

    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    mass: torch.Tensor
    observed: torch.Tensor

    @property
    def elements(self) -> int:
        """Number of elements in k and v together."""
        return 2 * self.k.numel()


#: Queries at the end of a prompt that vote in SnapKV.
OBSERVED = 32


@dataclass(frozen=True)
class Stored:
    """The history as attention reads it from a method's memory.

    Attributes:
        k, v: float32 ``[kv_heads, m, D]`` in the model's own basis.
        bits: size of everything that the method stores for this layer.
        bias: float32 ``[kv_heads, m]``, added to scores; None adds nothing.
    """

    k: torch.Tensor
    v: torch.Tensor
    bits: float
    bias: torch.Tensor | None = None


class Method(Protocol):
    """A method with its settings: ``method(layer, history)``."""

    def __call__(self, layer: int, history: History) -> Stored: ...


def kept_tokens(history: History, budget: float, extra: int = 0) -> int:
    """Returns how many BF16 tokens per head a budget pays for, with ``extra`` bits each."""
    _, n, dim = history.k.shape
    return int(budget * 2 * dim * n / (2 * dim * NUMBER + extra))


def keep(history: History, scores: torch.Tensor, budget: float, extra: int = 0) -> Stored:
    """Keeps the tokens with the highest scores ``[kv_heads, n]`` in BF16, equally many per head."""
    heads, _, dim = history.k.shape
    count = kept_tokens(history, budget, extra)
    index = scores.topk(count, dim=-1).indices.sort(-1).values[..., None].expand(-1, -1, dim)
    bits = heads * count * (2 * dim * NUMBER + extra)
    return Stored(history.k.gather(1, index), history.v.gather(1, index), bits)


def uniform(x: torch.Tensor, bits: int, dim: int, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Rounds to 2^bits evenly spaced levels from the least to the largest along ``dim``; scales are FP16.

    With one bit, min-max would put both levels on outliers, so the levels lie one mean deviation from the mean.
    ``kept`` marks the elements that determine the levels; others are rounded too.
    """
    counts = torch.ones_like(x, dtype=torch.bool) if kept is None else kept
    if bits == 1:
        total = counts.sum(dim, keepdim=True).clamp(min=1)
        mean = (x * counts).sum(dim, keepdim=True) / total
        step = 2 * ((x - mean).abs() * counts).sum(dim, keepdim=True) / total
        low = mean - step / 2
    else:
        low = x.masked_fill(~counts, torch.inf).amin(dim, keepdim=True)
        high = x.masked_fill(~counts, -torch.inf).amax(dim, keepdim=True)
        low, high = (torch.where(low.isfinite(), y, 0.0) for y in (low, high))
        step = (high - low) / (2**bits - 1)
    low, step = low.half().float(), step.half().float()
    codes = ((x - low) / step.clamp(min=1e-12)).round().clamp(0, 2**bits - 1)
    return codes * step + low
