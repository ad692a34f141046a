"""The block loop agrees with one that moves nothing: every key stays in place, behind a mask of the kept ones."""

from __future__ import annotations

import pytest
import torch

from benchmarks.research.episodes.ask import likelihoods
from benchmarks.research.episodes.blocks import Budget, build
from benchmarks.research.episodes.conversations import Ask
from benchmarks.research.episodes.past import group_rows
from benchmarks.research.episodes.prefill import prefill
from benchmarks.research.tests import helpers
from sglang_kvq.errors import KVQuantError

HISTORY = helpers.tokens(110)
PROMPTS = [helpers.tokens(9, 1), helpers.tokens(15, 2)]
PINNED, BLOCK = 6, 24
EVEN, UNEVEN = (32,) * helpers.LAYERS, (20, 60, 40)


def masked_loop(prompt: list[int], budget: Budget) -> list[torch.Tensor]:
    """Returns the tokens that each layer and head keep, bool ``[kv_heads, T]`` per layer."""
    runner, total = helpers.runner(), len(HISTORY)
    keys, values = ([torch.zeros(helpers.KV_HEADS, total, 16) for _ in range(helpers.LAYERS)] for _ in range(2))
    kept = [torch.zeros(helpers.KV_HEADS, total, dtype=torch.bool) for _ in range(helpers.LAYERS)]

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        n, group = q.shape[2], q.shape[1] // k.shape[1]
        rows = group_rows(q, k.shape[1])[0]
        stored = (rows @ keys[layer].mT * scale).masked_fill(~kept[layer][:, None], -torch.inf)
        later = torch.ones(n, n, dtype=torch.bool).triu(1).repeat(group, 1)
        new = (rows @ k[0].mT * scale).masked_fill(later, -torch.inf)
        both = torch.cat([stored, new], -1).softmax(-1)
        return (both @ torch.cat([values[layer], v[0]], 1)).reshape(1, q.shape[1], n, -1)

    for start in range(0, total, BLOCK):
        end = min(start + BLOCK, total)

        def read(layer, q, k, v, scale, start=start, end=end):
            out = attention(layer, q, k, v, scale)
            keys[layer][:, start:end], values[layer][:, start:end] = k[0], v[0]
            return out

        runner.hidden(torch.tensor([HISTORY[start:end]]), start, read)
        for of_layer in kept:
            of_layer[:, start:end] = True
        if all(end <= most for most in budget.layers):
            continue
        scores: list[torch.Tensor] = []

        def score(layer, q, k, v, scale, scores=scores):
            found = (group_rows(q, k.shape[1])[0] @ keys[layer].mT * scale).masked_fill(
                ~kept[layer][:, None], -torch.inf
            )
            scores.append(found.softmax(-1).amax(1))
            return attention(layer, q, k, v, scale)

        runner.hidden(torch.tensor([prompt]), end, score)
        for layer, most in enumerate(budget.layers):
            found = scores[layer].masked_fill(~kept[layer], -1)
            found[:, :PINNED] = 2
            if budget.per_head:
                count = min(most * helpers.KV_HEADS, int(kept[layer].sum()))
                best = found.flatten().topk(count).indices
                kept[layer] = torch.zeros_like(kept[layer]).flatten().index_fill(0, best, True).view_as(kept[layer])
            else:
                best = found.topk(min(most, end)).indices
                kept[layer] = torch.zeros_like(kept[layer]).scatter(1, best, True) & (found >= 0)
    return kept


@pytest.mark.parametrize("per_head", [False, True], ids=["heads alike", "per head"])
@pytest.mark.parametrize("layers", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_the_same_tokens_as_behind_a_mask(per_head: bool, layers: tuple[int, ...]) -> None:
    budget = Budget(layers, per_head=per_head, pinned=PINNED)
    past, kept = build(helpers.runner(), HISTORY, PROMPTS, budget, block=BLOCK)
    for row, prompt in enumerate(PROMPTS):
        for layer, wanted in enumerate(masked_loop(prompt, budget)):
            valid = past.valid[layer]
            found = torch.zeros_like(wanted)
            for head in range(helpers.KV_HEADS):
                index = kept.index[layer][row, head]
                found[head, index if valid is None else index[valid[row, head]]] = True
            assert torch.equal(found, wanted), f"prompt {row}, layer {layer}"
            assert int(wanted.sum()) == layers[layer] * helpers.KV_HEADS and wanted[:, :PINNED].all()
    assert past.slots() == sum(layers) / len(layers)


def test_episodes_differ_and_do_not_depend_on_each_other() -> None:
    budget = Budget(EVEN, pinned=PINNED)
    past, kept = build(helpers.runner(), HISTORY, PROMPTS, budget, block=BLOCK)
    assert not torch.equal(kept.index[1][0], kept.index[1][1])
    for row, prompt in enumerate(PROMPTS):
        alone, kept_alone = build(helpers.runner(), HISTORY, [prompt], budget, block=BLOCK)
        for layer in range(helpers.LAYERS):
            assert torch.equal(kept_alone.index[layer][0], kept.index[layer][row])
            torch.testing.assert_close(alone.k[layer][0], past.k[layer][row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [24, 110, 500])
def test_a_budget_for_everything_is_the_full_cache(block: int) -> None:
    runner = helpers.runner()
    full, _ = prefill(runner, HISTORY, chunk=64)
    past, kept = build(runner, HISTORY, PROMPTS, Budget((110,) * helpers.LAYERS, pinned=PINNED), block=block)
    asks = [Ask(helpers.tokens(9, 5), 3)]
    assert past.k[0].shape[0] == 1 and kept.coverage(110).eq(1).all()
    found, wanted = (likelihoods(runner, asks, lambda _, one=one: one, 110, 1) for one in (past, full))
    assert abs(found[0] - wanted[0]) < 1e-4


def test_keys_keep_their_values_when_they_move() -> None:
    """A key and value of the first block that are kept to the end stay those that were computed there."""
    runner = helpers.runner()
    full, _ = prefill(runner, HISTORY[:BLOCK], chunk=64)
    past, kept = build(runner, HISTORY, PROMPTS, Budget(EVEN, pinned=PINNED), block=BLOCK)
    for layer in range(helpers.LAYERS):
        index = kept.index[layer][1, 0]
        early = index < BLOCK
        assert int(early.sum()) > PINNED
        for found, exact in ((past.k, full.k), (past.v, full.v)):
            torch.testing.assert_close(found[layer][1, 0][early], exact[layer][0, 0][index[early]])


def test_a_budget_of_pinned_tokens_only_is_refused() -> None:
    with pytest.raises(KVQuantError, match="a layer of 6 tokens keeps only the 6 pinned"):
        Budget((8, 6), pinned=6)
