"""Moments of keys and values, and of the queries that read them, weighted by attention.

An error e of a key moves a query's output by p (q e) (v - o). Here p is the share of attention that the key gets, v its
value and o the output. An error of a value moves the output by p e. Errors of different tokens are independent, so
squares add up. A key's error costs

    e^T (sum over q of p^2 |v - o|^2 q q^T) e

and a value's |e|^2 sum over q of p^2. Most tokens barely matter, and those that matter differ from the rest. The sum
over pairs of q q^T and k k^T is kept as its two marginals, because one basis serves all tokens of a head.
"""

from __future__ import annotations

import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.rotations.maths.moments import Moments, group_queries

#: Number of scores computed at a time.
MOST_SCORES = 1 << 22


def attended_moments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, sink: int, recent: int
) -> Moments:
    """Returns ``moments.Moments`` of one context in one layer, weighted by the cost of an error.

    Pairs of a query and a key in its BF16 sink or window have weight 0, as in ``fake_quant.RotatedContext``. The
    weights of a head sum to 1. If a head pays its history no attention, all tokens past the sink have equal weights.

    Args:
        q: ``[q_heads, T, D]`` after RoPE; k, v: ``[kv_heads, T, D]``. Any float dtype.
        scale: factor on the scores.
        sink, recent: BF16 tokens at both ends, multiples of ``PAGE_SIZE``.

    Returns:
        qq of queries weighted by sum_k p^2 |v - o|^2; kk and k_mean of keys weighted by sum_q p^2 |v - o|^2 |q|^2; vv
        and vwv, which are equal, of values weighted by sum_q p^2.
    """
    kv_heads, length, _ = k.shape
    of_q = torch.zeros(q.shape[:2], device=q.device)
    of_k = torch.zeros(k.shape[:2], dtype=torch.float64, device=q.device)
    of_v = torch.zeros_like(of_k)
    group = q.shape[0] // kv_heads
    block = max(MOST_SCORES // (group * length) // PAGE_SIZE, 1) * PAGE_SIZE
    position = torch.arange(length, device=q.device)
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        keys, values = k[head].float(), v[head].float()
        for start in range(0, length, block):
            at = position[start : start + block]
            queries = q[mine, start : start + block].float()
            scores = (queries @ keys.mT).mul_(scale).masked_fill_(position > at[:, None], float("-inf"))
            shares = scores.softmax(-1)  # [group, block, T]
            output = shares @ values
            old = (position >= sink) & (position < (at // PAGE_SIZE * PAGE_SIZE - recent)[:, None])
            counts = shares.square_().mul_(old)
            apart = (output @ values.mT).mul_(-2).add_(output.square().sum(-1, keepdim=True))
            costs = apart.add_(values.square().sum(-1)).clamp_(min=0).mul_(counts)
            of_q[mine, start : start + block] = costs.sum(-1)
            of_k[head] += queries.square().sum(-1).flatten() @ costs.flatten(0, 1)
            of_v[head] += counts.sum((0, 1))
    late = position >= sink
    queries = group_queries(q, kv_heads).double()
    w_q = _shares(of_q.reshape(kv_heads, -1).double(), late.repeat(group))
    w_k, w_v = _shares(of_k, late), _shares(of_v, late)
    keys, values = k.double(), v.double()
    vv = values.mT @ (w_v * values)
    return Moments(queries.mT @ (w_q * queries), keys.mT @ (w_k * keys), vv.clone(), vv, (w_k * keys).sum(1))


def _shares(weights: torch.Tensor, alike: torch.Tensor) -> torch.Tensor:
    """Normalizes weights ``[kv_heads, n]`` to sum 1, ``[kv_heads, n, 1]``.

    A row of zeros becomes equal weights of the tokens in the mask, the last argument, bool ``[n]``.
    """
    total = weights.sum(-1, keepdim=True)
    shares = torch.where(total > 0, weights / total.clamp(min=torch.finfo(total.dtype).tiny), alike / alike.sum())
    return shares.unsqueeze(-1)
