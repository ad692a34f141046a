"""Episodes: k-means clusters of a conversation's segments (EpiCache, arXiv 2509.17396)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_kvq.episodic.embed import unit
from sglang_kvq.errors import KVQuantError

#: Runs of k-means from other starting points, of which the best counts.
STARTS = 10


@dataclass(frozen=True)
class Episodes:
    """Assignment of segments to episodes.

    Attributes:
        labels: int64 ``[segments]``, from 0 to episodes - 1, each of which occurs.
        centroids: float32 ``[episodes, D]``, of length 1.
    """

    labels: np.ndarray
    centroids: np.ndarray

    def __len__(self) -> int:
        return len(self.centroids)

    def members(self, episode: int) -> np.ndarray:
        """Its segments, in order of the conversation."""
        return np.flatnonzero(self.labels == episode)


def cluster(embeddings: np.ndarray, episodes: int, seed: int = 0) -> Episodes:
    """At most ``episodes`` clusters of segments, fewer if there are fewer different segments.

    Args:
        embeddings: float32 ``[segments, D]``, rows of length 1.

    Raises:
        KVQuantError: no segments, fewer than one episode, or scikit-learn is missing.
    """
    if embeddings.ndim != 2 or not len(embeddings):
        raise KVQuantError(f"embeddings of shape {embeddings.shape}: clustering needs [segments, D], one or more.")
    if episodes < 1:
        raise KVQuantError(f"{episodes} episodes: give 1 or more.")
    count = min(episodes, len(np.unique(embeddings, axis=0)))
    if count == 1:
        labels = np.zeros(len(embeddings), dtype=np.int64)
    else:
        labels = _k_means(embeddings, count, seed)
    # Numbered by first occurrence: k-means' own numbers mean nothing.
    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    labels = np.argsort(np.argsort(first))[labels].astype(np.int64)
    means = np.stack([embeddings[labels == e].mean(0) for e in range(int(labels.max()) + 1)])
    return Episodes(labels, unit(means))


def _k_means(embeddings: np.ndarray, count: int, seed: int) -> np.ndarray:
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise KVQuantError(
            "clustering a conversation needs scikit-learn: pip install 'sglang-kvq[episodes]'."
        ) from error
    return np.asarray(KMeans(n_clusters=count, n_init=STARTS, random_state=seed).fit(embeddings).labels_)


def medoids(embeddings: np.ndarray, episodes: Episodes, episode: int, count: int) -> np.ndarray:
    """The ``count`` segments of an episode nearest to its centroid, in order of the conversation: int64 ``[<= count]``.

    Raises:
        KVQuantError: a count below 1, or no such episode.
    """
    if count < 1 or not 0 <= episode < len(episodes):
        raise KVQuantError(f"{count} medoids of episode {episode}: there are {len(episodes)} episodes.")
    members = episodes.members(episode)
    nearest = np.argsort(-(embeddings[members] @ episodes.centroids[episode]), kind="stable")[:count]
    return np.sort(members[nearest])
