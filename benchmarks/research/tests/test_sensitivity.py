"""Similarities agree with transformers under the same mask, and budgets have an exact sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.research.episodes.sensitivity import layer_budgets, similarities
from benchmarks.research.tests import helpers
from sglang_kvq.errors import KVQuantError

SAMPLE = helpers.tokens(96)
WINDOW, SINKS = 32, 4


@torch.inference_mode()
def keys_under(mask: torch.Tensor) -> list[torch.Tensor]:
    """Returns outputs of W_k in each layer under a mask (true: seen), by transformers' eager attention."""
    model, found = helpers.tiny_llama(), []
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    model(torch.tensor([SAMPLE]), attention_mask=additive[None, None])
    return found


def test_similarities_are_those_under_the_windows_mask() -> None:
    """RoPE rotates both keys equally, so it does not change their cosine. An inverted mask would fail."""
    causal = torch.ones(96, 96, dtype=torch.bool).tril()
    windowed = causal.clone()
    for query in range(96):
        for key in range(SINKS, query):
            windowed[query, key] = key >= query // WINDOW * WINDOW - WINDOW // 2
    full, cut = keys_under(causal), keys_under(windowed)
    heads = [torch.cosine_similarity(*(x[WINDOW:].unflatten(-1, (2, -1)) for x in of), dim=-1) for of in zip(full, cut)]
    found = similarities(helpers.runner(), SAMPLE, window=WINDOW, sinks=SINKS)
    np.testing.assert_allclose(found, [float(x.mean()) for x in heads], atol=1e-5)
    assert found[0] == pytest.approx(1) and found[1:].max() < 0.999


def test_nothing_is_lost_with_every_token_a_sink() -> None:
    np.testing.assert_allclose(similarities(helpers.runner(), SAMPLE, window=WINDOW, sinks=96), 1, atol=1e-6)


def test_a_sample_that_is_too_short_is_refused() -> None:
    with pytest.raises(KVQuantError, match="a sample of 96 tokens for windows of 49"):
        similarities(helpers.runner(), SAMPLE, window=49, sinks=SINKS)


@pytest.mark.parametrize("tokens", [64, 640, 1472, 6016])
@pytest.mark.parametrize("sharpness", [0.0, 1.1, 3.0])
def test_budgets_are_whole_pages_of_exact_sum(tokens: int, sharpness: float) -> None:
    similar = np.random.default_rng(0).random(24)
    found = layer_budgets(similar, tokens, sharpness=sharpness, unit=64, least=64)
    assert sum(found) == 24 * tokens and all(n % 64 == 0 and n >= max(64, tokens // 256 * 64) for n in found)
    # Rounding to pages may swap neighbors by one page.
    ordered = np.array(found)[similar.argsort()]
    assert (np.diff(ordered) <= 64).all() and (sharpness == 0 or tokens < 640 or ordered[0] > ordered[-1])


def test_budgets_follow_the_formula() -> None:
    """Floors are 4 pages each of 48; weights 1, 0.5 and 0 divide the rest."""
    found = layer_budgets(np.array([0.6, 0.7, 0.8]), 16 * 64, sharpness=1.0, unit=64, least=64)
    assert found == (28 * 64, 16 * 64, 4 * 64)
    assert layer_budgets(np.full(3, 0.9), 640, sharpness=1.3, unit=64, least=64) == (640, 640, 640)
    assert layer_budgets(np.array([0.6, 0.7, 0.8]), 640, sharpness=1.0, unit=64, least=500) == (768, 640, 512)


@pytest.mark.parametrize("tokens", [100, 128])
def test_budgets_of_part_of_a_page_or_of_too_few_are_refused(tokens: int) -> None:
    with pytest.raises(KVQuantError, match=f"{tokens} tokens in units of 64, at least 192"):
        layer_budgets(np.ones(3), tokens, sharpness=1.0, unit=64, least=192)
