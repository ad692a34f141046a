"""Scores of past tokens: the attention that a prompt pays to them. EpiCache (arXiv 2509.17396) keeps the best tokens.

    score[h, j] = max over queries t of the prompt and query heads g of KV head h of  softmax_j(scale q[t, g] k[h, j])

The softmax runs over the past keys only, without the prompt's own keys and without learned sinks. Keys and queries may
be in the rotated basis: a rotation preserves products, and a mean subtracted from all keys shifts all scores of a query
equally.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Approximate number of query-key products held in memory at once.
PRODUCTS = 1 << 24


def key_scores(q: torch.Tensor, k: torch.Tensor, scale: float, products: int = PRODUCTS) -> torch.Tensor:
    """Computes the scores by definition, in float32 and two passes over blocks of keys: log-sum-exps, then maxima.

    Args:
        q: the prompt's queries, ``[P, q_heads, D]``, any float dtype.
        k: the past keys, ``[n, kv_heads, D]``.
        products: approximate number of products to hold at once.

    Returns:
        float32 ``[kv_heads, n]``; zeros if there is no query.
    """
    prompt, q_heads, _ = q.shape
    n, kv_heads, _ = k.shape
    scores = torch.zeros(kv_heads, n, device=k.device)
    if prompt == 0 or n == 0:
        return scores
    # One row per query that reads the KV head.
    rows = q.float().unflatten(1, (kv_heads, q_heads // kv_heads)).permute(1, 2, 0, 3).flatten(1, 2)
    block = max(products // (q_heads * prompt), 1)
    lse = torch.full(rows.shape[:2], -torch.inf, device=q.device)
    for _, x in _products(rows, k, scale, block):
        lse = torch.logaddexp(lse, x.logsumexp(-1))
    for first, x in _products(rows, k, scale, block):
        scores[:, first : first + x.shape[-1]] = (x - lse[..., None]).amax(1).exp()
    return scores


def _products(rows: torch.Tensor, k: torch.Tensor, scale: float, block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields, for each block of keys, its first index and ``scale q k``, float32 ``[kv_heads, rows, keys]``."""
    for first in range(0, len(k), block):
        yield first, rows @ k[first : first + block].float().permute(1, 2, 0) * scale
