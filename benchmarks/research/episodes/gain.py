"""Gain kept: the share of the history's worth to an answer that a policy keeps, with its error over conversations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Number of bootstrap resamples of the conversations.
RESAMPLES = 2000


@dataclass(frozen=True)
class Likelihoods:
    """Log-likelihoods per answer token of the same questions in the same order, float64 ``[questions]`` each."""

    policy: np.ndarray
    full: np.ndarray
    none: np.ndarray


def gain_kept(found: Likelihoods) -> float:
    """Returns (LL - LL_none) / (LL_full - LL_none) of means over questions."""
    return float((found.policy - found.none).sum() / (found.full - found.none).sum())


def with_error(found: Likelihoods, conversation: np.ndarray, seed: int = 0) -> tuple[float, float | None]:
    """Returns ``gain_kept`` and its bootstrap standard error, drawing whole conversations.

    Args:
        conversation: the conversation of each question, int ``[questions]``.

    Returns:
        The gain, and its error, which is None for a single conversation.
    """
    return gain_kept(found), _error(
        _sums(found.policy - found.none, conversation), _sums(found.full - found.none, conversation), seed
    )


def difference(
    ours: np.ndarray, theirs: np.ndarray, found: Likelihoods, conversation: np.ndarray, seed: int = 0
) -> tuple[float, float | None]:
    """Returns the gain kept by ``ours`` minus that by ``theirs``, paired by question, and its standard error."""
    top, bottom = _sums(ours - theirs, conversation), _sums(found.full - found.none, conversation)
    return float(top.sum() / bottom.sum()), _error(top, bottom, seed)


def mean_with_error(values: np.ndarray, conversation: np.ndarray, seed: int = 0) -> tuple[float, float | None]:
    """Returns the mean over questions and its bootstrap standard error over conversations."""
    sums, counts = _sums(values, conversation), _sums(np.ones_like(values), conversation)
    return float(sums.sum() / counts.sum()), _error(sums, counts, seed)


def _sums(values: np.ndarray, conversation: np.ndarray) -> np.ndarray:
    """Sums values over each conversation."""
    _, number = np.unique(conversation, return_inverse=True)
    return np.bincount(number, weights=values)


def _error(top: np.ndarray, bottom: np.ndarray, seed: int) -> float | None:
    """Returns the standard deviation of the ratio of sums over resampled conversations; None for a single one."""
    if len(top) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(top), (RESAMPLES, len(top)))
    return float((top[drawn].sum(1) / bottom[drawn].sum(1)).std(ddof=1))
