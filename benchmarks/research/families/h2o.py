"""H2O, heavy hitters (Zhang et al., "H2O: Heavy-Hitter Oracle", arXiv 2306.14048): eviction by accumulated attention.

A token's score is the attention that all queries so far paid to it. The tokens with the highest scores are kept in
BF16, like the recent ones. Later evictions also depend on scores, so each kept token stores its score. Query heads that
share a KV head are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.research.families.base import NUMBER, History, Stored, keep


@dataclass(frozen=True)
class H2O:
    """Heavy hitters within ``budget`` bits per element of the history."""

    budget: float

    def __call__(self, layer: int, history: History) -> Stored:
        return keep(history, history.mass, self.budget, extra=NUMBER)
