"""Means with their standard errors; KL divergence of distributions known only for their likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from sglang_kvq.errors import KVQuantError

#: Least probability of the rest bucket; a smaller one is only a rounding error of float32 log-probabilities.
SMALLEST_REST = 1e-7


@dataclass(frozen=True)
class Distributions:
    """Next-token distributions at P positions of a text.

    Attributes:
        tokens: int32 ``[P, K]``, the likeliest first.
        logprobs: float32 ``[P, K]``, natural logarithm.
        own_token: int32 ``[P]``, the text's own next token.
        own_logprob: float32 ``[P]``, known even if the token is not among the K.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    own_token: np.ndarray
    own_logprob: np.ndarray

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> Distributions:
        """Parses the result of ``Client.prompt_logprobs``.

        Raises:
            KVQuantError: a log-probability is NaN.
        """
        top, own = _array(meta["input_top_logprobs"]), _array([meta["input_token_logprobs"]])[0]
        if np.isnan(top).any() or np.isnan(own).any():
            raise KVQuantError("the server returned log-probabilities that are not numbers (NaN).")
        return cls(
            top[..., 1].astype(np.int32),
            top[..., 0].astype(np.float32),
            own[:, 1].astype(np.int32),
            own[:, 0].astype(np.float32),
        )


def _array(positions: list[list[Any]]) -> np.ndarray:
    """Converts lists of (log-probability, token, text) to float64 ``[P, N, 2]``, 3 times faster than ``np.array``."""
    lengths = {len(position) for position in positions}
    if len(lengths) != 1:
        raise KVQuantError(
            f"the server listed different numbers of tokens, {sorted(lengths)}, at the positions of one request."
        )
    flat = chain.from_iterable(chain.from_iterable(positions))
    shape = (len(positions), lengths.pop(), 3)
    return np.fromiter(flat, dtype=object, count=math.prod(shape)).reshape(shape)[..., :2].astype(np.float64)


@dataclass(frozen=True)
class Divergence:
    """Values per position: ``kl`` in nats, ``agree`` (same likeliest token), ``rest`` of the reference's mass."""

    kl: np.ndarray
    agree: np.ndarray
    rest: np.ndarray


def compare(reference: Distributions, other: Distributions, top: int) -> Divergence:
    """Computes KL(reference || other) over single tokens and one bucket for all other tokens.

    Single tokens are the text's own token, and those of the reference's ``top`` likeliest that ``other`` also lists.
    Merging outcomes can only lower a KL divergence (the log-sum inequality), so this is a lower bound. The more of the
    reference's tokens ``other`` lacks, the looser the bound is. It therefore favors the worse method.

    Raises:
        KVQuantError: the distributions are not of the same positions of the same text.
    """
    if not np.array_equal(reference.own_token, other.own_token):
        raise KVQuantError("distributions of two different texts: the stored reference does not belong to this one.")
    tokens, p_log = reference.tokens[:, :top], reference.logprobs[:, :top].astype(np.float64)
    q_log, known = _look_up(other, tokens)
    is_own = tokens == reference.own_token[:, None]
    q_log = np.where(is_own, other.own_logprob[:, None], q_log)
    known |= is_own
    # The text's own token is one more column if the reference's top does not have it.
    extra = ~is_own.any(1)
    p_log = np.concatenate([p_log, reference.own_logprob[:, None]], 1)
    q_log = np.concatenate([q_log, other.own_logprob[:, None]], 1)
    known = np.concatenate([known, extra[:, None]], 1)
    p, q = (np.where(known, np.exp(x), 0.0) for x in (p_log, q_log))
    with np.errstate(invalid="ignore"):
        kl = np.where(known & (p > 0), p * (p_log - q_log), 0.0).sum(1)
    p_rest, q_rest = (np.maximum(1.0 - x.sum(1), SMALLEST_REST) for x in (p, q))
    kl += p_rest * np.log(p_rest / q_rest)
    return Divergence(kl, reference.tokens[:, 0] == other.tokens[:, 0], p_rest)


def _look_up(other: Distributions, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``other``'s log-probability of ``tokens`` ``[P, K]``, and a mask of those that it lists."""
    # One sorted list for all positions: a token's key combines its position and its id.
    base = np.arange(len(tokens), dtype=np.int64)[:, None] << 32
    keys = (base + other.tokens).ravel()
    order = np.argsort(keys)
    keys, values = keys[order], other.logprobs.ravel()[order]
    wanted = base + tokens
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return values[at].astype(np.float64), keys[at] == wanted


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

    If the two vary together, the error is smaller than that of two separate means.

    Raises:
        ValueError: there are no items, or not equally many.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} items")
    return mean_and_error([a - b for a, b in zip(ours, theirs)])
