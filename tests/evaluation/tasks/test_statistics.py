"""Standard errors agree with simulation and hand calculation; divergence agrees with that of whole distributions."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.tasks.statistics import (
    Distributions,
    clustered,
    compare,
    mean_and_error,
    paired_difference,
)

RNG = np.random.default_rng(0)
P, V = 40, 500


def distributions(logits: np.ndarray, own: np.ndarray, top: int) -> tuple[np.ndarray, Distributions]:
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    order = np.argsort(-logp, axis=1)[:, :top]
    rows = np.arange(len(logp))[:, None]
    return logp, Distributions(
        order.astype(np.int32), logp[rows, order].astype(np.float32), own, logp[rows[:, 0], own].astype(np.float32)
    )


@pytest.fixture
def pair():
    logits = 3 * RNG.standard_normal((P, V))
    other = logits + 0.5 * RNG.standard_normal((P, V))
    return logits, other, RNG.integers(0, V, P).astype(np.int32)


def test_exact_where_every_token_is_listed(pair):
    logits, other, own = pair
    (logp, p), (logq, q) = distributions(logits, own, V), distributions(other, own, V)
    exact = (np.exp(logp) * (logp - logq)).sum(1)
    found = compare(p, q, V)
    np.testing.assert_allclose(found.kl, exact, atol=1e-5)
    assert (found.agree == (logp.argmax(1) == logq.argmax(1))).all()


@pytest.mark.parametrize("top", [4, 16, 64])
def test_lower_bound_that_rises_with_the_tokens_listed(pair, top):
    logits, other, own = pair
    (logp, p), (logq, _) = distributions(logits, own, top), distributions(other, own, V)
    exact = (np.exp(logp) * (logp - logq)).sum(1)
    _, q = distributions(other, own, 2 * top)
    found = compare(p, q, top)
    assert (found.kl <= exact + 1e-5).all() and (found.kl > -1e-6).all()
    assert found.kl.mean() >= compare(p, q, top // 4).kl.mean()
    _, longer = distributions(other, own, V)
    assert compare(p, longer, top).kl.mean() >= found.kl.mean() - 1e-9


def test_partition_by_hand():
    """Two listed tokens, the text's own token and the rest are four outcomes."""
    p = np.array([0.5, 0.2, 0.05, 0.15, 0.1])
    q = np.array([0.25, 0.4, 0.1, 0.05, 0.2])
    own = np.array([3], np.int32)
    found = compare(*(distributions(np.log(x)[None], own, k)[1] for x, k in ((p, 2), (q, 3))), 2)
    buckets = [(0.5, 0.25), (0.2, 0.4), (0.15, 0.05), (0.15, 0.3)]
    assert found.kl[0] == pytest.approx(sum(a * np.log(a / b) for a, b in buckets), abs=1e-6)
    assert not found.agree[0] and found.rest[0] == pytest.approx(0.15, abs=1e-6)


def test_the_same_is_zero(pair):
    logits, _, own = pair
    _, p = distributions(logits, own, 32)
    assert abs(compare(p, p, 32).kl).max() < 1e-6


def test_another_text_is_refused(pair):
    logits, _, own = pair
    with pytest.raises(KVQuantError, match="different texts"):
        compare(distributions(logits, own, 8)[1], distributions(logits, own[::-1].copy(), 8)[1], 8)


def test_means_by_hand():
    assert mean_and_error([0, 1, 1, 1]) == (0.75, pytest.approx(0.25))
    assert mean_and_error([3.0]) == (3.0, None)
    assert clustered([2, 9], [1, 3])[0] == 11 / 4


def test_no_values():
    with pytest.raises(ValueError, match="0 sums"):
        mean_and_error([])


def test_clustered_error_is_the_spread_of_repeated_experiments():
    """Tokens share their context's offset, so that an error per token would be five times too small."""
    rng = np.random.default_rng(0)

    def experiment():
        counts = rng.integers(50, 150, 30)
        values = [rng.normal(rng.normal(), 1.0, count) for count in counts]
        mean, error = clustered([v.sum() for v in values], counts)
        flat = np.concatenate(values)
        return mean, error, flat.std() / len(flat) ** 0.5

    means, errors, naive = zip(*(experiment() for _ in range(400)))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.15)
    assert np.mean(naive) < 0.25 * np.std(means)


def test_paired_difference():
    assert paired_difference([1, 1, 0], [1, 0, 0]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    with pytest.raises(ValueError, match="1 and 2 items"):
        paired_difference([1], [1, 2])
