"""Means with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and its standard error, ``s / sqrt(n)`` with s the sample standard deviation; None if n = 1.

    Raises:
        ValueError: there are no values.
    """
    return clustered(values, [1] * len(values))


def clustered(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean over all tokens of clusters (contexts), and its standard error between clusters.

    Tokens of one context are not independent. The error is therefore that of a ratio of cluster totals:
    ``sqrt(n / (n - 1) * sum((s_i - m c_i)^2)) / sum(c_i)`` (Cochran, Sampling Techniques, 3rd ed., 6.3).

    Args:
        sums: sum over each cluster's tokens.
        counts: number of each cluster's tokens.

    Raises:
        ValueError: there are no clusters, or lengths differ.
    """
    total, n = sum(counts), len(sums)
    if not n or n != len(counts):
        raise ValueError(f"{n} sums and {len(counts)} counts")
    mean = sum(sums) / total
    if n == 1:
        return mean, None
    spread = sum((s - mean * c) ** 2 for s, c in zip(sums, counts))
    return mean, math.sqrt(n / (n - 1) * spread) / total


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean of ``ours - theirs``, item by item, and its standard error.

    The error is smaller than that of two separate means.

    Raises:
        ValueError: there are no items, or not equally many.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} items")
    return mean_and_error([a - b for a, b in zip(ours, theirs)])
