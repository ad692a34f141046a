"""Moments that rotations are computed from, summed over contexts: a few ``[kv_heads, D, D]`` matrices per layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

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
