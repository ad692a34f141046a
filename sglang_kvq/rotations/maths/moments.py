"""Moments that rotations are computed from, summed over contexts: a few ``[kv_heads, D, D]`` matrices per layer.

Tokens count equally (``context_moments``), or by attention (``attended_moments``). An error e of a key moves a query's
output by p (q e) (v - o). Here p is the share of attention that the key gets, v its value and o the output. An error of
a value moves the output by p e. Errors of different tokens are independent, so squares add up. A key's error costs

    e^T (sum over q of p^2 |v - o|^2 q q^T) e

and a value's |e|^2 sum over q of p^2. Most tokens barely matter, and those that matter differ from the rest. The sum
over pairs of q q^T and k k^T is kept as its two marginals, because one basis serves all tokens of a head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.errors import KVQuantError


class Moments(NamedTuple):
    """Moments of one layer's KV heads; for all layers together, with the layer as an extra first dimension.

    Attributes:
        qq: mean QᵀQ over the queries that read a KV head, float64 ``[kv_heads, D, D]``.
        kk, vv: mean KᵀK and VᵀV, float64 ``[kv_heads, D, D]``.
        vwv: mean Vᵀ diag(w) V, float64 ``[kv_heads, D, D]``.
        k_mean: the mean key, float64 ``[kv_heads, D]``.
    """

    qq: torch.Tensor
    kk: torch.Tensor
    vwv: torch.Tensor
    vv: torch.Tensor
    k_mean: torch.Tensor


#: Names of the fields of ``Moments``, in order.
MOMENTS = Moments._fields


def context_moments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, skip: int) -> Moments:
    """Computes the moments of one context in one layer (OSCAR, arXiv 2605.17757).

    The weight of a token's value is w_t = k_tᵀ (QᵀQ/n) k_t, normalized to mean 1. It says how much attention scores
    vary with the token. QᵀQ comes from the same context, so one pass over the text is enough: thousands of queries per
    KV head determine a D x D matrix well.

    Args:
        q: ``[q_heads, T, D]`` after RoPE; k, v: ``[kv_heads, T, D]``. Any float dtype.
        skip: number of first tokens to leave out: they are never quantized, and their keys are outliers.
    """
    q = group_queries(q[:, skip:], k.shape[0]).double()
    k, v = k[:, skip:].double(), v[:, skip:].double()
    qq = q.mT @ q / q.shape[1]
    w = ((k @ qq) * k).sum(-1, keepdim=True)
    w = w / w.mean(1, keepdim=True)
    n = k.shape[1]
    return Moments(qq, k.mT @ k / n, v.mT @ (w * v) / n, v.mT @ v / n, k.mean(1))


def group_queries(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Groups queries ``[q_heads, T, D]`` by the KV head they read: ``[kv_heads, group * T, D]``."""
    return q.reshape(kv_heads, -1, q.shape[-1])


class MomentSums:
    """Sums of contexts' moments. Memory does not grow with the text.

    ``state`` and ``restore`` carry the sums through a checkpoint.
    """

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self._sums: dict[int, list[torch.Tensor]] = {}

    @torch.no_grad()
    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Adds one context's layer; arguments as for ``context_moments``."""
        self.add_moments(layer, context_moments(q, k, v, self.skip))

    def add_moments(self, layer: int, moments: Moments) -> None:
        """Adds one context's moments of a layer, with any weights."""
        held = self._sums.get(layer)
        self._sums[layer] = list(moments) if held is None else [a.to(b.device) + b for a, b in zip(held, moments)]

    def state(self) -> dict[str, torch.Tensor]:
        return {f"{name}.{layer}": m for layer, held in self._sums.items() for name, m in zip(MOMENTS, held)}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        layers = sorted({int(name.split(".")[1]) for name in state})
        self._sums = {layer: [state[f"{name}.{layer}"] for name in MOMENTS] for layer in layers}

    def mean(self, layers: int, contexts: int, *, shared: bool) -> Moments:
        """Averages over contexts, on the CPU, layers as the first dimension; 1 for kv_heads if ``shared``.

        Raises:
            KVQuantError: a layer was never seen, or its sums are not finite.
        """
        missing = [layer for layer in range(layers) if layer not in self._sums]
        if missing:
            raise KVQuantError(
                f"layers {missing} of those that the cache would hold have no standard attention; such models are not "
                "supported."
            )
        for layer in range(layers):
            for name, what in zip(MOMENTS, ("queries", "keys", "keys or values", "values", "keys")):
                if not torch.isfinite(self._sums[layer][MOMENTS.index(name)]).all():
                    raise KVQuantError(
                        f"layer {layer}: {what} hold NaN or infinity; the model overflows in its dtype: pass --dtype "
                        "float32 (or bfloat16 instead of float16), and check the model's weights."
                    )
        means = (torch.stack([self._sums[i][j].cpu() for i in range(layers)]) / contexts for j in range(len(MOMENTS)))
        return Moments(*(m.mean(1, keepdim=True) if shared else m for m in means))


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
