"""Standard errors against simulation and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvq.evaluation.stats import clustered, mean_and_error, paired_difference


def test_by_hand():
    assert mean_and_error([0, 1, 1, 1]) == (0.75, pytest.approx(0.25))
    assert mean_and_error([3.0]) == (3.0, None)
    assert clustered([2, 9], [1, 3])[0] == 11 / 4


def test_no_values():
    with pytest.raises(ValueError, match="0 sums"):
        mean_and_error([])


def test_clustered_error_is_the_spread_of_repeated_experiments():
    """Tokens that share their context's offset: an error per token would be five times too small."""
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
