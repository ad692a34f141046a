"""Moments that rotations are computed from, summed over contexts: a few ``[kv_heads, D, D]`` matrices per layer.

Tokens count equally (``context_moments``), or are weighted by the attention that they get (``attended_moments``);
docs/notes/calibration.md derives those weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError

#: Maximum number of attention scores that are computed at a time.
MOST_SCORES = 1 << 22


class Moments(NamedTuple):
    """Moments of one layer's KV heads; for all layers together, with the layer as an extra first dimension.

    Attributes:
        qq: mean QᵀQ over the queries that read a KV head, float64 ``[kv_heads, D, D]``.
        kk: mean KᵀK, float64 ``[kv_heads, D, D]``.
        vv: mean Vᵀ diag(w) V, float64 ``[kv_heads, D, D]``.
        k_mean: the mean key, float64 ``[kv_heads, D]``.
    """

    qq: torch.Tensor
    kk: torch.Tensor
    vv: torch.Tensor
    k_mean: torch.Tensor


#: Names of the fields of ``Moments``, in order.
MOMENTS = Moments._fields


def context_moments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, skip: int) -> Moments:
    """Computes the moments of one context in one layer (OSCAR, arXiv 2605.17757), without the ``skip`` first tokens.

    The first tokens are never quantized, and their keys are outliers. The weight of a token's value is
    w_t = k_tᵀ (QᵀQ/n) k_t, normalized to mean 1; it measures how much attention scores vary with the token. If a head's
    scores are all 0, its tokens have equal weights. q is ``[q_heads, T, D]`` after RoPE, k and v are
    ``[kv_heads, T, D]``.
    """
    q = group_queries(q[:, skip:], k.shape[0]).double()
    k, v = k[:, skip:].double(), v[:, skip:].double()
    qq = q.mT @ q / q.shape[1]
    w = ((k @ qq) * k).sum(-1, keepdim=True)
    n = k.shape[1]
    w = n * _shares(w.squeeze(-1), torch.ones(n, dtype=w.dtype, device=w.device))
    return Moments(qq, k.mT @ k / n, v.mT @ (w * v) / n, k.mean(1))


def group_queries(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Groups queries ``[q_heads, T, D]`` by the KV head they read: ``[kv_heads, group * T, D]``."""
    return q.reshape(kv_heads, -1, q.shape[-1])


class MomentSums:
    """Sums of the moments of contexts: ``state`` has them by "NAME.LAYER". Memory does not grow with the text."""

    def __init__(self, skip: int, state: dict[str, torch.Tensor] | None = None) -> None:
        self.skip, self.state = skip, state or {}

    @torch.no_grad()
    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Adds one layer of one context; the arguments are those of ``context_moments``."""
        self.add_moments(layer, context_moments(q, k, v, self.skip))

    def add_moments(self, layer: int, moments: Moments) -> None:
        """Adds the moments of one layer of one context; they may be weighted in any way."""
        for name, moment in zip(MOMENTS, moments):
            key = f"{name}.{layer}"
            self.state[key] = self.state[key].to(moment.device) + moment if key in self.state else moment

    def mean(self, layers: int, contexts: int, *, shared: bool) -> Moments:
        """Returns the mean over contexts, on the CPU, with layers as the first dimension.

        If ``shared``, it is also the mean over KV heads, whose dimension is then 1.

        Raises:
            KVQuantError: a layer was never seen, or its sums are not finite.
        """
        missing = [layer for layer in range(layers) if f"{MOMENTS[0]}.{layer}" not in self.state]
        if missing:
            raise KVQuantError(
                f"layers {missing} of those that the cache would hold have no standard attention; such models are not "
                "supported."
            )
        for layer in range(layers):
            for name, what in zip(MOMENTS, ("queries", "keys", "keys or values", "keys")):
                if not torch.isfinite(self.state[f"{name}.{layer}"]).all():
                    raise KVQuantError(
                        f"layer {layer}: {what} hold NaN or infinity; the model overflows in its dtype. Pass --dtype "
                        "float32 (or bfloat16 instead of float16), and check the model's weights."
                    )
        of_layers = ([self.state[f"{name}.{layer}"].cpu() for layer in range(layers)] for name in MOMENTS)
        means = (torch.stack(sums) / contexts for sums in of_layers)
        return Moments(*(m.mean(1, keepdim=True) if shared else m for m in means))


def attended_moments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, sink: int, recent: int
) -> Moments:
    """Returns the moments of one context in one layer, weighted by the cost of an error.

    Pairs of a query and a key in its BF16 sink or window have weight 0, as in ``fake_quant.RotatedContext``. The
    weights of a head sum to 1. If a head pays its history no attention, all tokens past the sink have equal weights.

    The arguments are those of ``fake_quant.RotatedContext.of``.

    Returns:
        qq of queries weighted by sum_k p^2 |v - o|^2; kk and k_mean of keys weighted by sum_q p^2 |v - o|^2 |q|^2; vv
        of values weighted by sum_q p^2.
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
    qq, kk = queries.mT @ (w_q * queries), keys.mT @ (w_k * keys)
    return Moments(qq, kk, values.mT @ (w_v * values), (w_k * keys).sum(1))


def _shares(weights: torch.Tensor, alike: torch.Tensor) -> torch.Tensor:
    """Normalizes weights ``[kv_heads, n]`` to sum 1; a row of zeros becomes equal weights for the mask's tokens."""
    total = weights.sum(-1, keepdim=True)
    shares = torch.where(total > 0, weights / total, alike / alike.sum())
    return shares.unsqueeze(-1)
