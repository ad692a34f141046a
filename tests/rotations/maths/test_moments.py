"""Moments of a text follow their definition, survive a checkpoint, and are converted to other positions."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.rope import mean_over_positions, turn_of
from sglang_kvq.rotations.maths.moments import MOMENTS, MomentSums

SKIP, T, D = 8, 96, 64


@pytest.fixture
def activations():
    """Returns q, k, v of two contexts: 4 query heads that read 2 KV heads, whose keys have a mean."""
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(heads, T, D, generator=generator) + 2 * (heads == 2) for heads in (4, 2, 2)] for _ in range(2)]


def sums_of(contexts, layers=1) -> MomentSums:
    sums = MomentSums(SKIP)
    for x in contexts:
        for layer in range(layers):
            sums.add(layer, *x)
    return sums


def weighted(q, k, v):
    """Returns the values' moment of one context, weighted by how much the scores of its queries vary with a token."""
    q, k, v = (x[:, SKIP:].double() for x in (q, k, v))
    qq = torch.stack([sum(x.T @ x for x in q[2 * h : 2 * h + 2]) for h in range(2)])
    w = torch.einsum("htd,hde,hte->ht", k, qq, k)
    return torch.einsum("ht,htd,hte->hde", w / w.mean(1, keepdim=True), v, v) / v.shape[1]


@pytest.mark.parametrize("shared", [False, True])
def test_moments_are_means_over_tokens_after_the_sink(activations, shared):
    found = sums_of(activations).mean(1, 2, shared=shared)
    q, k = (torch.cat([x[n][:, SKIP:] for x in activations], 1).double() for n in range(2))
    expected = {
        "qq": torch.stack([sum(x.T @ x for x in q[2 * h : 2 * h + 2]) / (2 * q.shape[1]) for h in range(2)]),
        "kk": k.mT @ k / k.shape[1],
        "vv": sum(weighted(*x) for x in activations) / len(activations),
        "k_mean": torch.stack([rows.sum(0) / len(rows) for rows in k]),
    }
    for name, x in expected.items():
        x = x.mean(0, keepdim=True) if shared else x
        torch.testing.assert_close(getattr(found, name)[0], x, msg=name)
        assert getattr(found, name).dtype == torch.float64


@pytest.mark.parametrize("part", [0, 1])
def test_values_of_a_head_whose_scores_are_all_0_count_equally(activations, part):
    q, k, v = activations[0]
    (q, k)[part][-(2 if part == 0 else 1) :] = 0  # the queries, or the keys, of the second KV head
    found = sums_of([(q, k, v)]).mean(1, 1, shared=False)
    rows = v[1, SKIP:].double()
    torch.testing.assert_close(found.vv[0, 1], rows.mT @ rows / len(rows))


def test_they_survive_a_checkpoint(activations):
    sums, again = sums_of(activations, layers=2), MomentSums(SKIP)
    again.state.update(sums.state)
    assert set(sums.state) == {f"{name}.{layer}" for name in MOMENTS for layer in range(2)}
    for a, b in zip(sums.mean(2, 2, shared=False), again.mean(2, 2, shared=False), strict=True):
        assert torch.equal(a, b)


def test_a_mean_that_overflows_is_told(activations):
    sums = sums_of(activations)
    sums.state["k_mean.0"][1, 3] = float("inf")
    with pytest.raises(KVQuantError, match="layer 0: keys hold NaN"):
        sums.mean(1, 2, shared=False)


def test_means_at_other_positions_are_those_of_turned_keys():
    from transformers import LlamaConfig

    turn, places = turn_of(LlamaConfig(head_dim=D), D), [0, 5, 1200]
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 50, D, generator=generator, dtype=torch.float64) + 1
    turned = torch.stack([keys @ turn(place) for place in places], 1).flatten(1, 2)
    found = keys.mean(1) @ (sum(map(turn, places)) / len(places))
    torch.testing.assert_close(found, turned.mean(1))
    # The covariance about that mean: the moment of all keys after subtracting the mean over all positions.
    moment = mean_over_positions(keys.mT @ keys / 50, turn, places)
    apart = turned - found[:, None]
    torch.testing.assert_close(moment - found[..., None] * found[:, None], apart.mT @ apart / 150)
