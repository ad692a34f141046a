"""A model that reads a prompt exactly, stores part of it with a method, and continues after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks.research.families.base import OBSERVED, RECENT, SINK, History, Method
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions

#: Queries whose attention is computed at a time.
BLOCK = 256


@dataclass(frozen=True)
class Prefilled:
    """Exact keys and values of tokens that were read, and the attention paid to them.

    Attributes:
        k, v: BF16 ``[layers, kv_heads, T, D]``, keys after RoPE.
        mass, observed: float32 ``[layers, kv_heads, T]``, see ``base.History``.
    """

    k: torch.Tensor
    v: torch.Tensor
    mass: torch.Tensor
    observed: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.k.shape[2]

    @property
    def history_end(self) -> int:
        """Position where the recent window begins, at a page's border."""
        return max((self.tokens - RECENT) // PAGE_SIZE * PAGE_SIZE, SINK)

    def history(self, layer: int) -> History:
        """Returns the whole pages between sink and window."""
        part = slice(SINK, self.history_end)
        k, v = (x[layer, :, part].float() for x in (self.k, self.v))
        at = torch.arange(self.tokens, device=k.device)[part]
        return History(k, v, at, self.mass[layer, :, part], self.observed[layer, :, part])


@torch.inference_mode()
def prefill(model: Any, ids: torch.Tensor, before: Prefilled | None = None) -> Prefilled:
    """Reads ids int64 ``[n]``, after earlier tokens if given, uncompressed; rounds keys and values to BF16."""
    first = before.tokens if before else 0
    found: list[tuple[torch.Tensor, ...]] = []

    def hook(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        k, v = k.bfloat16(), v.bfloat16()
        if before:
            k, v = (torch.cat([x[layer], y], 1) for x, y in ((before.k, k), (before.v, v)))
        heads, total, dim = k.shape
        rows = q.float().reshape(heads, -1, total - first, dim)
        out, mass = torch.empty_like(rows), torch.zeros(heads, total, device=k.device)
        observed = torch.zeros_like(mass)
        if before:
            mass[:, :first] = before.mass[layer]
        start_observing = max(total - OBSERVED, first)
        borders = sorted({*range(first, total, BLOCK), start_observing, total})
        for start, end in pairwise(borders):
            scores = torch.einsum("hgqd,hkd->hgqk", rows[:, :, start - first : end - first], k[:, :end].float()) * scale
            later = torch.ones(end - start, end, dtype=torch.bool, device=k.device).triu(start + 1)
            p = scores.masked_fill_(later, -torch.inf).softmax(-1)
            out[:, :, start - first : end - first] = torch.einsum("hgqk,hkd->hgqd", p, v[:, :end].float())
            paid = p.sum((1, 2))
            mass[:, :end] += paid
            if start >= start_observing:
                observed[:, :end] += paid
        found.append((k, v, mass, observed))
        return out.reshape(-1, total - first, dim)

    with attention_hook(model, hook):
        model.base_model(ids[None], position_ids=positions(ids, first), use_cache=False)
    return Prefilled(*(torch.stack(column) for column in zip(*found)))


@dataclass(frozen=True)
class Cache:
    """Cache of a layer that new tokens read: keys and values float32 ``[kv_heads, n, D]``, and a bias for scores."""

    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None


@torch.inference_mode()
def store(prefilled: Prefilled, method: Method | None) -> tuple[list[Cache], float]:
    """Compresses a cache; None keeps all in BF16. Returns it and bits per element of the history."""
    caches, bits, elements, end = list[Cache](), 0.0, 0, prefilled.history_end
    for layer in range(len(prefilled.k)):
        k, v = (x[layer].float() for x in (prefilled.k, prefilled.v))
        if method is None:
            caches.append(Cache(k, v, None))
            continue
        history = prefilled.history(layer)
        found = method(layer, history)
        bits, elements = bits + found.bits, elements + history.elements
        bias = found.bias
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (SINK, prefilled.tokens - end))
        k, v = (torch.cat([x[:, :SINK], y, x[:, end:]], 1) for x, y in ((k, found.k), (v, found.v)))
        caches.append(Cache(k, v, bias))
    return caches, bits / elements if elements else 16.0


@torch.inference_mode()
def continue_behind(model: Any, ids: torch.Tensor, first: int, caches: Sequence[Cache], keep: int) -> torch.Tensor:
    """Reads ids int64 ``[n]`` from position ``first`` on; returns the last log-probabilities ``[keep, vocab]``."""

    def hook(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        cache, (heads, n, dim) = caches[layer], k.shape
        group, slots = q.shape[0] // heads, cache.k.shape[1]
        k, v = (torch.cat([x, y.bfloat16().float()], 1) for x, y in ((cache.k, k), (cache.v, v)))
        mask = torch.zeros(heads, n, slots + n, device=k.device)
        if cache.bias is not None:
            mask[:, :, :slots] = cache.bias[:, None]
        mask[:, :, slots:].masked_fill_(torch.ones(n, n, dtype=torch.bool, device=k.device).triu(1), -torch.inf)
        rows = q.float().reshape(heads, group * n, dim)
        mask = mask[:, None].expand(-1, group, -1, -1).reshape(heads, group * n, slots + n)
        out = torch.nn.functional.scaled_dot_product_attention(
            rows[None], k[None], v[None], attn_mask=mask[None], scale=scale
        )
        return out[0].reshape(-1, n, dim)

    with attention_hook(model, hook):
        out = model(ids[None], position_ids=positions(ids, first), use_cache=False, logits_to_keep=keep)
    logits: torch.Tensor = out.logits[0, -keep:]
    return logits.float().log_softmax(-1)
