"""KVMerger (Wang et al., "Model Tells You Where to Merge", arXiv 2407.08454): merges neighbors with similar keys.

Consecutive tokens form a set while the cosine of neighboring keys exceeds a threshold. The paper fixes the threshold;
here each head uses the threshold that leaves as many sets as the budget pays for. In a set, the token with the most
accumulated attention is the pivot p. With d_i = |k_p - k_i| and sigma^2 the set's mean of d_i^2,

    g_i = exp(-d_i^2 / (2 sigma^2)),  w_i = g_i / sum g,  k = sum w_i k_i,  v = sum w_i v_i

``counted`` adds log |set| to a merged token's score, as if all of its tokens still attended. This is not in the paper,
and needs another stored number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.research.families.base import NUMBER, History, Stored, kept_tokens


@dataclass(frozen=True)
class KVMerger:
    """Merges down to ``budget`` bits per element of the history."""

    budget: float
    counted: bool = False

    def __call__(self, layer: int, history: History) -> Stored:
        extra = NUMBER if self.counted else 0
        heads, _, dim = history.k.shape
        count = max(kept_tokens(history, self.budget, extra), 1)
        sets = merging_sets(history.k, count)
        weights = gaussian_weights(history.k, history.mass, sets, count)
        k, v = (_sums(x * weights[..., None], sets, count) for x in (history.k, history.v))
        sizes = _sums(torch.ones_like(weights)[..., None], sets, count)[..., 0]
        k, v = k.bfloat16().float(), v.bfloat16().float()
        return Stored(k, v, heads * count * (2 * dim * NUMBER + extra), sizes.log() if self.counted else None)


def merging_sets(k: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers the sets of keys ``[heads, n, D]``: int64 ``[heads, n]``, ascending from 0 to ``count`` - 1.

    Sets are divided at the ``count`` - 1 least similar pairs of neighbors.
    """
    similarity = torch.nn.functional.cosine_similarity(k[:, 1:], k[:, :-1], dim=-1)
    borders = torch.zeros(k.shape[:2], dtype=torch.int64)
    apart = similarity.topk(count - 1, dim=-1, largest=False).indices + 1
    return borders.scatter_(1, apart, 1).cumsum(1)


def gaussian_weights(k: torch.Tensor, mass: torch.Tensor, sets: torch.Tensor, count: int) -> torch.Tensor:
    """Returns w ``[heads, n]``, which sums to 1 in each set."""
    top = torch.full((len(k), count), -torch.inf).scatter_reduce_(1, sets, mass, "amax")
    place = torch.arange(k.shape[1]).expand_as(sets)
    is_top = mass == top.gather(1, sets)
    pivot = torch.full((len(k), count), k.shape[1]).scatter_reduce_(
        1, sets, torch.where(is_top, place, k.shape[1]), "amin"
    )
    center = k.gather(1, pivot.gather(1, sets)[..., None].expand_as(k))
    squares = (k - center).square().sum(-1)
    variance = torch.zeros(len(k), count).scatter_reduce_(1, sets, squares, "mean", include_self=False)
    weights = (-squares / (2 * variance.gather(1, sets)).clamp(min=1e-12)).exp()
    return weights / _sums(weights[..., None], sets, count)[..., 0].gather(1, sets)


def _sums(x: torch.Tensor, sets: torch.Tensor, count: int) -> torch.Tensor:
    """Sums ``[heads, n, D]`` over each set: ``[heads, count, D]``."""
    index = sets[..., None].expand_as(x)
    return torch.zeros(len(x), count, x.shape[-1]).scatter_add_(1, index, x)
