"""EpiCache's block loop (arXiv 2509.17396): reads a history block by block into one cache of fixed size per episode.

Each block takes two forward passes: one of the block over the kept tokens, and one of the episode's patched prompt,
whose queries score every key. The keys with the best scores stay. These are the served steps: ``[prefix | block |
patched prompt]``, with the prompt right after the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.research.episodes.past import Kept, Past, RoundTrip, gather
from benchmarks.research.episodes.runner import Runner
from benchmarks.research.episodes.scores import by_prompts
from benchmarks.research.episodes.select import pin, top_of_heads, top_of_layer
from sglang_kvq.errors import KVQuantError


@dataclass(frozen=True)
class Budget:
    """Number of tokens that an episode keeps.

    Attributes:
        layers: tokens per head, for each layer.
        per_head: whether heads of a layer share its tokens unequally (``pair`` of the released code).
        pinned: first tokens that every head keeps: system prompt and sinks.
    """

    layers: tuple[int, ...]
    per_head: bool = False
    pinned: int = 64

    def __post_init__(self) -> None:
        if min(self.layers) <= self.pinned:
            raise KVQuantError(
                f"a layer of {min(self.layers)} tokens keeps only the {self.pinned} pinned ones: raise the budget."
            )


def build(
    runner: Runner,
    ids: list[int],
    prompts: list[list[int]],
    budget: Budget,
    *,
    block: int,
    round_trip: RoundTrip | None = None,
) -> tuple[Past, Kept]:
    """Builds the caches of all episodes, a row for each patched prompt. Returns them and the tokens they hold."""
    empty = torch.zeros(1, runner.kv_heads, 0, runner.head_dim, dtype=runner.dtype, device=runner.device)
    index = torch.zeros(1, runner.kv_heads, 0, dtype=torch.int64, device=runner.device)
    past = Past([empty] * runner.layers, [empty] * runner.layers, [None] * runner.layers)
    kept = Kept([index] * runner.layers, past.valid)
    tokens = torch.tensor([ids])
    for start in range(0, len(ids), block):
        end = min(start + block, len(ids))
        rows = past.k[0].shape[0]
        _read(runner, tokens[:, start:end].expand(rows, -1), start, past, kept, round_trip)
        if all(end <= most for most in budget.layers):
            continue
        scores = by_prompts(runner, past, prompts, end)
        for layer, most in enumerate(budget.layers):
            _evict(past, kept, layer, scores[layer], most, budget)
    return past, kept


def _read(runner: Runner, ids: torch.Tensor, start: int, past: Past, kept: Kept, round_trip: RoundTrip | None) -> None:
    """Appends a block to every row."""
    new = torch.arange(start, start + ids.shape[1], device=runner.device).expand(len(ids), runner.kv_heads, -1)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        out = past.attend(layer, q, k, v, scale)
        if round_trip is not None:
            k, v = round_trip(layer, start, k, v)
        past.k[layer], past.v[layer] = torch.cat([past.k[layer], k], 2), torch.cat([past.v[layer], v], 2)
        kept.index[layer] = torch.cat([kept.index[layer], new], 2)
        valid = past.valid[layer]
        if valid is not None:
            past.valid[layer] = torch.cat([valid, torch.ones_like(new, dtype=torch.bool)], 2)
        return out

    runner.hidden(ids, start, attend)


def _evict(past: Past, kept: Kept, layer: int, scores: torch.Tensor, most: int, budget: Budget) -> None:
    """Keeps the best ``most`` tokens per head of one layer; ``kept.valid`` is ``past.valid``."""
    rows = len(scores)
    index, valid = kept.index[layer].expand(rows, -1, -1), past.valid[layer]
    scores = pin(scores, index < budget.pinned)
    if valid is not None:
        # The index of an empty slot may look pinned.
        scores = scores.masked_fill(~valid, -torch.inf)
    if budget.per_head:
        slots, chosen = top_of_layer(scores, most)
        past.valid[layer] = chosen
    else:
        slots = top_of_heads(scores, most)
    past.k[layer], past.v[layer] = gather(past.k[layer], slots), gather(past.v[layer], slots)
    kept.index[layer] = index.gather(2, slots)
