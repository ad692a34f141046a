"""SnapKV (Li et al., "SnapKV: LLM Knows What You are Looking for", arXiv 2404.14469): eviction by the prompt's end.

The last queries of a prompt, its observation window, vote: a token's score is the attention that they pay to it. The
largest score in a token's neighborhood counts (pooling), so that whole phrases survive. Nothing else is stored. Queries
that share a KV head vote together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.research.families.base import History, Stored, keep


@dataclass(frozen=True)
class SnapKV:
    """The observation window's choice within ``budget`` bits per element, pooled over ``kernel`` (odd) tokens."""

    budget: float
    kernel: int = 7

    def __call__(self, layer: int, history: History) -> Stored:
        pooled = torch.nn.functional.max_pool1d(
            history.observed[:, None], self.kernel, stride=1, padding=self.kernel // 2
        )[:, 0]
        return keep(history, pooled, self.budget)
