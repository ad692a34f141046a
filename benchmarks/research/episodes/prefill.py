"""Reads a history once: its keys and values, and the attention that its own queries pay them."""

from __future__ import annotations

import torch

from benchmarks.research.episodes.past import Past, RoundTrip, attend_new, attention, group_rows
from benchmarks.research.episodes.runner import Runner
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE

#: Tokens before the queries that a server keeps in BF16.
RECENT = KVQuantConfig.recent_tokens
#: Most scores held at once where single scores are needed.
SCORES = 1 << 28


def prefill(
    runner: Runner,
    ids: list[int],
    *,
    chunk: int,
    mass: bool = False,
    round_trip: RoundTrip | None = None,
) -> tuple[Past, list[torch.Tensor] | None]:
    """Returns the full cache of one row, prefilled in chunks.

    Args:
        mass: whether to also sum the probabilities that a key receives, over all queries and the query heads of its KV
            head (as H2O, arXiv 2306.14048, accumulates them).
        round_trip: keys and values as they are read once their pages have left the window of ``RECENT`` tokens; each is
            quantized once, and pages leave whole, as served.

    Returns:
        The cache, and the mass per layer, float32 ``[1, kv_heads, T]``, or None.
    """
    shape = (1, runner.kv_heads, len(ids), runner.head_dim)
    k_all, v_all = (
        [torch.empty(shape, dtype=runner.dtype, device=runner.device) for _ in range(runner.layers)] for _ in range(2)
    )
    masses = [torch.zeros(shape[:3], device=runner.device) for _ in range(runner.layers)] if mass else None
    tokens, quantized = torch.tensor([ids]), 0
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            scale: float,
            start: int = start,
            end: int = end,
        ) -> torch.Tensor:
            past_k, past_v = k_all[layer][:, :, :start], v_all[layer][:, :, :start]
            out = attention(q, k, v, past_k, past_v, None, scale) if start else attend_new(layer, q, k, v, scale)
            if masses is not None:
                masses[layer][:, :, :end] += received(q, torch.cat([past_k, k], 2), start, scale)
            k_all[layer][:, :, start:end], v_all[layer][:, :, start:end] = k, v
            return out

        runner.hidden(tokens[:, start:end], start, attend)
        if round_trip is not None:
            leaves = max(quantized, (end - RECENT) // PAGE_SIZE * PAGE_SIZE)
            for layer, (k, v) in enumerate(zip(k_all, v_all)):
                old = (x[:, :, quantized:leaves] for x in (k, v))
                k[:, :, quantized:leaves], v[:, :, quantized:leaves] = round_trip(layer, quantized, *old)
            quantized = leaves
    return Past(k_all, v_all, [None] * runner.layers), masses


def received(q: torch.Tensor, k: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """Returns the total probability that keys ``[1, kv_heads, C, D]`` receive from queries ``[1, q_heads, n, D]``.

    Query i is at key ``first + i`` and sees keys up to itself. Returns float32 ``[1, kv_heads, C]``.
    """
    n, kv_heads, keys = q.shape[2], k.shape[1], k.shape[2]
    group = q.shape[1] // kv_heads
    seen = torch.ones(n, keys, dtype=torch.bool, device=q.device).tril(first)
    rows = group_rows(q, kv_heads).unflatten(2, (group, n))
    total = torch.zeros(1, kv_heads, keys, device=q.device)
    step = max(1, SCORES // (kv_heads * n * keys))
    for at in range(0, group, step):
        scores = torch.einsum("bhgnd,bhcd->bhgnc", rows[:, :, at : at + step].float() * scale, k.float())
        total += scores.masked_fill_(~seen, -torch.inf).softmax(-1).sum((2, 3))
    return total
