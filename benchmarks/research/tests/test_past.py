"""Answers over stored keys and values agree with transformers' own forward pass of the whole text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.research.episodes.ask import after_texts, by_length, likelihoods
from benchmarks.research.episodes.conversations import Ask
from benchmarks.research.episodes.past import Kept, Past
from benchmarks.research.episodes.prefill import prefill
from benchmarks.research.tests import helpers
from sglang_kvq.errors import KVQuantError

HISTORY = helpers.tokens(90)
ASKS = [Ask(helpers.tokens(length, seed), answer) for seed, (length, answer) in enumerate([(9, 3), (5, 1), (14, 6)], 1)]


@torch.inference_mode()
def expected(history: list[int]) -> list[float]:
    model, found = helpers.tiny_llama(), []
    for ask in ASKS:
        ids = torch.tensor([history + ask.ids])
        logprobs = model(ids).logits[0].log_softmax(-1)
        at = torch.arange(ids.shape[1] - ask.answer, ids.shape[1])
        found.append(float(logprobs[at - 1, ids[0, at]].double().mean()))
    return found


def test_the_model_depends_on_its_history() -> None:
    """The model depends on its history; otherwise none of these tests could fail."""
    other = expected([*HISTORY[:40], *helpers.tokens(50, 77)])
    assert (np.abs(np.array(other) - expected(HISTORY)) > 0.05).all()


@pytest.mark.parametrize("chunk", [7, 64, 1000])
@pytest.mark.parametrize("batch", [1, 8])
def test_answers_over_the_full_cache_are_transformers_own(chunk: int, batch: int) -> None:
    runner = helpers.runner()
    past, _ = prefill(runner, HISTORY, chunk=chunk)
    found = likelihoods(runner, ASKS, lambda _: past, len(HISTORY), batch)
    np.testing.assert_allclose(found, expected(HISTORY), atol=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 300, 10000])
def test_answers_after_texts_are_transformers_own(batch_tokens: int) -> None:
    found = after_texts(helpers.runner(), ASKS, [HISTORY, HISTORY[:60], HISTORY[:17]], batch_tokens)
    wanted = [expected(text)[n] for n, text in enumerate((HISTORY, HISTORY[:60], HISTORY[:17]))]
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_order_of_slots_means_nothing_and_invalid_ones_are_not_read() -> None:
    runner = helpers.runner()
    full, _ = prefill(runner, HISTORY, chunk=64)
    generator = torch.Generator().manual_seed(0)
    index, valid = [], []
    for _ in range(runner.layers):
        heads = []
        for head in range(runner.kv_heads):
            some = torch.randint(len(HISTORY), (5 + head,), generator=generator)
            slots = torch.cat([torch.arange(len(HISTORY)), some, some[: 1 - head]])
            real = torch.arange(len(slots)) < len(HISTORY)
            order = torch.randperm(len(slots), generator=generator)
            heads.append((slots[order], real[order]))
        index.append(torch.stack([slots for slots, _ in heads])[None])
        valid.append(torch.stack([real for _, real in heads])[None])
    mixed = Kept(index, valid)
    found = likelihoods(runner, ASKS, lambda _: mixed.of(full), len(HISTORY), 8)
    np.testing.assert_allclose(found, expected(HISTORY), atol=1e-4)
    assert mixed.of(full).slots() == len(HISTORY)
    torch.testing.assert_close(mixed.coverage(len(HISTORY)), torch.ones(1, len(HISTORY)))


def test_rows_of_their_own_are_read_by_their_questions() -> None:
    """Each question drops another part of the history, and gets the same result in a batch as alone."""
    runner = helpers.runner()
    full, _ = prefill(runner, HISTORY, chunk=64)
    rows = torch.stack([torch.cat([torch.arange(n * 10), torch.arange(n * 10 + 40, 90)]) for n in range(3)])

    def past_of(some: list[int]) -> Past:
        index = rows[some][:, None].expand(-1, runner.kv_heads, -1)
        return Kept([index] * runner.layers, [None] * runner.layers).of(full)

    together = likelihoods(runner, ASKS, past_of, len(HISTORY), 8)
    alone = [likelihoods(runner, [ask], lambda _, n=n: past_of([n]), len(HISTORY), 1)[0] for n, ask in enumerate(ASKS)]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert len(np.unique(np.round(together - np.array(expected(HISTORY)), 3))) == 3


def test_coverage_is_the_share_of_layers_and_heads() -> None:
    index = [torch.tensor([[[0, 1], [1, 2]]]), torch.tensor([[[1, 3], [1, 0]]])]
    valid = [None, torch.tensor([[[True, True], [True, False]]])]
    assert Kept(index, valid).coverage(5).tolist() == [[0.25, 1.0, 0.25, 0.25, 0.0]]


def test_positions_past_the_context_are_refused() -> None:
    runner = helpers.runner(positions=100)
    past, _ = prefill(runner, HISTORY, chunk=64)
    with pytest.raises(KVQuantError, match="position 104 in a context of 100"):
        likelihoods(runner, ASKS, lambda _: past, len(HISTORY), 8)


def test_batches_are_of_similar_lengths_and_bounded() -> None:
    lengths = [5, 100, 7, 6, 90, 300]
    batches = by_length(lengths, 250)
    assert sorted(n for of in batches for n in of) == list(range(6))
    assert all(len(of) == 1 or max(lengths[n] for n in of) * len(of) <= 250 for of in batches)
    assert batches == [[0, 3, 2], [4, 1], [5]]
