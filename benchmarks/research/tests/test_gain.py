"""Gain kept and its errors, on likelihoods with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.research.episodes.gain import Likelihoods, difference, gain_kept, mean_with_error, with_error


def likelihoods(share: np.ndarray, gains: np.ndarray) -> Likelihoods:
    """Returns likelihoods of a policy that keeps ``share`` of each question's gain."""
    none = np.linspace(-4, -3, len(gains))
    return Likelihoods(none + share * gains, none + gains, none)


def test_ends_and_a_share_between() -> None:
    gains = np.array([0.5, 1.0, 2.0, -0.25])
    for share in (0.0, 0.7, 1.0, 1.4):
        assert gain_kept(likelihoods(np.full(4, share), gains)) == pytest.approx(share)


def test_a_constant_share_has_no_error_however_gains_vary() -> None:
    """Questions are paired, so their different worth adds no error to the share that is kept."""
    gains = np.random.default_rng(0).random(60) + 0.1
    kept, error = with_error(likelihoods(np.full(60, 0.8), gains), np.repeat(np.arange(6), 10))
    assert kept == pytest.approx(0.8) and error == pytest.approx(0, abs=1e-9)


def test_the_error_is_that_between_conversations() -> None:
    """Six conversations have different shares, equal for their questions: the error is that of a mean of six values."""
    shares = np.array([0.5, 0.9, 0.7, 1.0, 0.6, 0.8])
    found = likelihoods(np.repeat(shares, 10), np.ones(60))
    kept, error = with_error(found, np.repeat(np.arange(6), 10))
    assert kept == pytest.approx(shares.mean())
    assert error == pytest.approx(shares.std() / 6**0.5, rel=0.06)
    # If each question were independent, the error would be sqrt(10) times too small.
    _, wrong = with_error(found, np.arange(60))
    assert wrong == pytest.approx(error / 10**0.5, rel=0.1)


def test_one_conversation_has_no_error() -> None:
    assert with_error(likelihoods(np.ones(4), np.ones(4)), np.zeros(4, int))[1] is None


def test_a_difference_is_paired() -> None:
    """Two noisy policies differ by 0.1 on every question."""
    generator = np.random.default_rng(1)
    noise, conversation = generator.standard_normal(60), np.repeat(np.arange(6), 10)
    found = likelihoods(0.5 + noise, np.ones(60))
    other = likelihoods(0.4 + noise, np.ones(60)).policy
    apart, error = difference(found.policy, other, found, conversation)
    assert apart == pytest.approx(0.1) and error == pytest.approx(0, abs=1e-9)
    assert with_error(found, conversation)[1] > 0.05


def test_names_of_conversations_do_not_matter() -> None:
    values, conversation = np.arange(12.0), np.repeat([7, 3, 40], 4)
    mean, error = mean_with_error(values, conversation)
    assert (mean, error) == mean_with_error(values, np.repeat([0, 1, 2], 4)) or error == pytest.approx(
        mean_with_error(values, np.repeat([0, 1, 2], 4))[1], rel=0.1
    )
    assert mean == pytest.approx(5.5)
