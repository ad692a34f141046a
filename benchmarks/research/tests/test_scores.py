"""Scores agree with the attention probabilities that transformers itself returns."""

from __future__ import annotations

import pytest
import torch

from benchmarks.research.episodes import prefill as prefill_module
from benchmarks.research.episodes import scores
from benchmarks.research.episodes.prefill import prefill
from benchmarks.research.tests import helpers

HISTORY = helpers.tokens(70)
PROMPTS = [helpers.tokens(9, 1), helpers.tokens(15, 2), helpers.tokens(4, 3)]


@torch.inference_mode()
def probabilities(ids: list[int]) -> list[torch.Tensor]:
    """Returns ``[kv_heads, group, T, T]`` per layer."""
    attentions = helpers.tiny_llama()(torch.tensor([ids]), output_attentions=True).attentions
    return [layer[0].unflatten(0, (helpers.KV_HEADS, -1)) for layer in attentions]


def over_history(prompt: list[int]) -> list[torch.Tensor]:
    """Returns a prompt's attention to the history, as a softmax over the history alone: ``[kv_heads, group, n, T]``."""
    of_layers = (layer[:, :, len(HISTORY) :, : len(HISTORY)] for layer in probabilities(HISTORY + prompt))
    return [layer / layer.sum(-1, keepdim=True) for layer in of_layers]


@pytest.mark.parametrize("chunk", [16, 100])
@pytest.mark.parametrize("at_once", [1, 1 << 28])
def test_mass_is_the_attention_that_keys_receive(chunk: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "SCORES", at_once)
    _, mass = prefill(helpers.runner(), HISTORY, chunk=chunk, mass=True)
    assert mass is not None
    for found, layer in zip(mass, probabilities(HISTORY)):
        torch.testing.assert_close(found[0], layer.sum((1, 2)), rtol=1e-3, atol=1e-4)


def test_prompts_score_by_their_highest_probability() -> None:
    runner = helpers.runner()
    full, _ = prefill(runner, HISTORY, chunk=64)
    found = scores.by_prompts(runner, full, PROMPTS, len(HISTORY))
    for row, prompt in enumerate(PROMPTS):
        for layer, exact in zip(found, over_history(prompt)):
            torch.testing.assert_close(layer[row], exact.amax((1, 2)), rtol=1e-3, atol=1e-5)


def test_snapkv_sums_and_smooths() -> None:
    runner = helpers.runner()
    full, _ = prefill(runner, HISTORY, chunk=64)
    found = scores.snapkv(runner, full, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        for layer, exact in zip(found, over_history(prompt)):
            summed = exact.sum((1, 2))
            smooth = [summed[:, max(0, t - 3) : t + 4].mean(1) for t in range(len(HISTORY))]
            torch.testing.assert_close(layer[row], torch.stack(smooth, 1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 8])
def test_kvzip_scores_a_chunk_by_those_who_repeat_it(batch: int) -> None:
    runner, instruction, chunk = helpers.runner(), helpers.tokens(5, 9), 32
    full, _ = prefill(runner, HISTORY, chunk=64)
    found = scores.kvzip(runner, full, HISTORY, instruction, chunk=chunk, batch=batch)
    for start in range(0, len(HISTORY), chunk):
        end = min(start + chunk, len(HISTORY))
        for layer, exact in zip(found, probabilities(HISTORY + instruction + HISTORY[start:end])):
            rows = exact[:, :, len(HISTORY) :]
            seen = torch.cat([rows[..., start:end], rows[..., len(HISTORY) :]], -1)
            share = rows[..., start:end] / seen.sum(-1, keepdim=True)
            torch.testing.assert_close(layer[0, :, start:end], share.amax((1, 2)), rtol=1e-3, atol=1e-5)


def test_keydiff_is_distance_from_the_mean_direction() -> None:
    full, _ = prefill(helpers.runner(), HISTORY, chunk=64)
    for found, k in zip(scores.keydiff(full), full.k):
        for head in range(helpers.KV_HEADS):
            rows = [row / row.norm() for row in k[0, head]]
            mean = sum(rows) / len(rows)
            exact = torch.stack([-(row @ mean) / mean.norm() for row in rows])
            torch.testing.assert_close(found[0, head], exact, rtol=1e-4, atol=1e-6)
