"""Scores agree with the oracle of benchmarks/research/episodes, and with loops over single queries."""

from __future__ import annotations

import pytest
import torch

from benchmarks.research.episodes.scores import highest
from sglang_kvq.attention.scores.key_scores import key_scores


def drawn(prompt: int, past: int, kv_heads: int, group: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(prompt * past + group)
    return torch.randn(prompt, kv_heads * group, head_dim) * 2, torch.randn(past, kv_heads, head_dim)


@pytest.mark.parametrize("past", [1, 7, 200])
@pytest.mark.parametrize("prompt", [1, 33])
@pytest.mark.parametrize("kv_heads,group", [(1, 1), (2, 3), (3, 4)])
def test_scores_are_the_oracles(kv_heads, group, prompt, past):
    q, k = drawn(prompt, past, kv_heads, group, 64)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k)]
    want = highest(*heads_first, None, [prompt], 0.125)[0]
    torch.testing.assert_close(key_scores(q, k, 0.125), want, rtol=1e-5, atol=1e-9)


def test_each_score_is_a_query_of_its_own_group():
    q, k = drawn(5, 9, 2, 3, 16)
    got = key_scores(q, k, 0.25)
    for head in range(2):
        shares = [(k[:, head] @ q[t, 3 * head + g] * 0.25).softmax(0) for t in range(5) for g in range(3)]
        torch.testing.assert_close(got[head], torch.stack(shares).amax(0))


@pytest.mark.parametrize("products", [1, 100, 1 << 10])
def test_blocks_change_nothing(products):
    q, k = drawn(11, 130, 2, 2, 32)
    torch.testing.assert_close(key_scores(q, k, 0.2, products), key_scores(q, k, 0.2), rtol=1e-5, atol=0)


def test_scores_of_any_size_are_probabilities():
    """With products in the thousands, the best key of each query has nearly all probability, and none is NaN."""
    q, k = drawn(4, 50, 1, 1, 64)
    got = key_scores(q * 1e4, k, 1.0)
    assert got.max() == 1 and got.min() >= 0 and int((got == 1).sum()) <= 4


def test_without_a_query_nothing_scores():
    q, k = drawn(4, 50, 2, 2, 64)
    assert not key_scores(q[:0], k, 1.0).any() and key_scores(q, k[:0], 1.0).shape == (2, 0)
