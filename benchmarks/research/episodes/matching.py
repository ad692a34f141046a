"""Search for the episode or segments that a question is about. Rows have length 1."""

from __future__ import annotations

import numpy as np

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.episodes import Episodes

#: Segments of an episode that speak for it when matching goes by best segments.
BEST_SEGMENTS = 3
#: Ways to match a question with an episode.
MATCHINGS = ("centroid", "segments")


def match(
    questions: np.ndarray, embeddings: np.ndarray, episodes: Episodes, matching: str, best: int = BEST_SEGMENTS
) -> np.ndarray:
    """The episode nearest to each question: int64 ``[questions]``.

    Args:
        questions: float32 ``[questions, D]``.
        embeddings: of the segments, float32 ``[segments, D]``.
        matching: "centroid": the nearest centroid (EpiCache). "segments": the episode whose ``best`` nearest segments
            are the nearest on average.

    Raises:
        KVQuantError: another matching.
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
    """All segments, the first to be read first: int64 ``[segments]``.

    Args:
        question: float32 ``[D]``.
        matching: "segments": by their nearness to the question. "centroid": episode after episode by the nearness of
            its centroid, within one by their nearness to the question; needs ``episodes``.

    Raises:
        KVQuantError: another matching, or no episodes where they are needed.
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
