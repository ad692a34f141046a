"""Finds the episode or segments that a question is about. Rows have length 1."""

from __future__ import annotations

import numpy as np

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.episodes import Episodes

#: Number of segments that represent an episode when matching uses best segments.
BEST_SEGMENTS = 3
#: Ways to match a question with an episode.
MATCHINGS = ("centroid", "segments")


def match(
    questions: np.ndarray, embeddings: np.ndarray, episodes: Episodes, matching: str, best: int = BEST_SEGMENTS
) -> np.ndarray:
    """Returns the episode nearest to each question: int64 ``[questions]``.

    Args:
        questions: float32 ``[questions, D]``.
        embeddings: embeddings of the segments, float32 ``[segments, D]``.
        matching: "centroid" chooses the nearest centroid (EpiCache). "segments" chooses the episode whose ``best``
            nearest segments are the nearest on average.

    Raises:
        KVQuantError: an unknown matching.
    """
    if matching == "centroid":
        scores = questions @ episodes.centroids.T
    elif matching == "segments":
        similar = questions @ embeddings.T
        scores = np.stack([_mean_of_best(similar[:, episodes.members(e)], best) for e in range(len(episodes))], 1)
    else:
        raise KVQuantError(f"matching {matching!r}: choose {' or '.join(MATCHINGS)}.")
    return np.asarray(scores.argmax(1), dtype=np.int64)


def rank_segments(
    question: np.ndarray, embeddings: np.ndarray, episodes: Episodes | None = None, matching: str = "segments"
) -> np.ndarray:
    """Returns all segments in the order in which they are to be read: int64 ``[segments]``.

    Args:
        question: float32 ``[D]``.
        matching: "segments" orders by nearness to the question. "centroid" orders episodes by the nearness of their
            centroid, and segments within an episode by nearness to the question; it needs ``episodes``.

    Raises:
        KVQuantError: an unknown matching, or episodes are missing.
    """
    similar = embeddings @ question
    if matching == "segments":
        return np.argsort(-similar, kind="stable")
    if matching != "centroid" or episodes is None:
        raise KVQuantError(f"matching {matching!r}: choose {' or '.join(MATCHINGS)}; by centroid needs episodes.")
    return np.lexsort((-similar, -(episodes.centroids @ question)[episodes.labels]))


def _mean_of_best(similar: np.ndarray, best: int) -> np.ndarray:
    """Averages the ``best`` highest of each row of ``[questions, members]``."""
    return np.asarray(np.sort(similar, axis=1)[:, -best:].mean(1))
