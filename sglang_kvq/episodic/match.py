"""Search for the episode or windows that a question is about. Rows have length 1."""

from __future__ import annotations

import numpy as np

from sglang_kvq.episodic.cluster import Episodes
from sglang_kvq.episodic.embed import unit
from sglang_kvq.episodic.lexical import Lexical, runs
from sglang_kvq.episodic.windows import WINDOW_PAGES
from sglang_kvq.errors import KVQuantError

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


def rank_windows(
    question: str, row: np.ndarray, pages: np.ndarray, index: Lexical, size: int = WINDOW_PAGES
) -> np.ndarray:
    """Windows of pages, the first to be read first, by embeddings and letters: int64 ``[windows]``.

    Numbers are those of ``windows(tokens, size)``. A page is embedded and indexed once; a window's embedding is the
    mean of its pages', its terms are theirs together.

    Args:
        row: the question's embedding, float32 ``[D]``.
        pages: of the whole pages in order, float32 ``[pages, D]``.
        index: of the same pages' texts.

    Raises:
        KVQuantError: embeddings of as many pages as the index does not have, or a size below 1.
    """
    if len(pages) != len(index):
        raise KVQuantError(f"embeddings of {len(pages)} pages beside an index of {len(index)}: give both of the same.")
    both = index.scores(question, size), unit(runs(pages, size)) @ row
    return np.argsort(-fuse(*both), kind="stable")


def fuse(*scores: np.ndarray) -> np.ndarray:
    """Scores by several measures as one: float64 ``[items]``, the sum of each measure's standardized scores.

    Measures of any scale go together, such as cosines of embeddings and ``Lexical.scores``. Where only a few stand
    out by one, it decides about these.

    Args:
        scores: float ``[items]`` each; a measure that tells nothing apart counts nothing.

    Raises:
        KVQuantError: none, or of different lengths.
    """
    if not scores or len({len(of) for of in scores}) != 1:
        raise KVQuantError(f"fusing scores of {[len(of) for of in scores]} items: give one or more of equal length.")
    total = np.zeros(len(scores[0]))
    for of in scores:
        if len(of) and np.ptp(of) > 0:
            total += (of - of.mean(dtype=np.float64)) / of.std(dtype=np.float64)
    return total


def _mean_of_best(similar: np.ndarray, best: int) -> np.ndarray:
    """Averages the ``best`` highest of each row of ``[questions, members]``."""
    return np.asarray(np.sort(similar, axis=1)[:, -best:].mean(1))
