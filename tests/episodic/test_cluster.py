"""Clusters are those that are there, in an order that means something; medoids lie nearest to the centroid."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvq.episodic.cluster import Episodes, cluster, medoids
from sglang_kvq.episodic.embed import unit
from sglang_kvq.errors import KVQuantError


def clouds(counts: tuple[int, ...], spread: float = 0.05, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows around as many axes, mixed, and which axis each belongs to."""
    generator = np.random.default_rng(seed)
    of = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    return unit(np.eye(8)[of] + spread * generator.standard_normal((len(of), 8))), of


def test_clusters_are_the_clouds() -> None:
    rows, of = clouds((12, 7, 20, 5))
    found = cluster(rows, 4)
    assert len(found) == 4
    for episode in range(4):
        assert len(np.unique(of[found.members(episode)])) == 1
    np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1, rtol=1e-6)
    means = unit(np.stack([rows[found.labels == e].mean(0) for e in range(4)]))
    np.testing.assert_allclose(found.centroids, means, rtol=1e-6)


def test_numbers_follow_first_occurrence_and_the_seed_does_not_matter_here() -> None:
    rows, _ = clouds((6, 6, 6))
    found = cluster(rows, 3, seed=1)
    _, first = np.unique(found.labels, return_index=True)
    assert (np.diff(first) > 0).all()
    np.testing.assert_array_equal(cluster(rows, 3, seed=2).labels, found.labels)


def test_no_more_clusters_than_different_segments() -> None:
    rows = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
    assert len(cluster(rows, 9)) == 3
    assert len(cluster(rows[:4], 2)) == 1
    one = cluster(rows[:1], 4)
    assert one.labels.tolist() == [0]


def test_medoids_are_the_nearest_in_order_of_the_conversation() -> None:
    angles = np.array([0.9, 0.1, 0.4, 0.0, 2.0])
    rows = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    episodes = Episodes(np.array([0, 0, 0, 0, 1]), rows[[3, 4]])
    assert medoids(rows, episodes, 0, 2).tolist() == [1, 3]
    assert medoids(rows, episodes, 0, 9).tolist() == [0, 1, 2, 3]
    assert medoids(rows, episodes, 1, 2).tolist() == [4]


def test_bad_input_is_refused() -> None:
    rows, _ = clouds((3, 3))
    with pytest.raises(KVQuantError, match=r"shape \(0, 8\)"):
        cluster(rows[:0], 2)
    with pytest.raises(KVQuantError, match="0 episodes"):
        cluster(rows, 0)
    with pytest.raises(KVQuantError, match="episode 2: there are 2"):
        medoids(rows, cluster(rows, 2), 2, 1)


def test_scikit_learn_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.cluster", None)
    with pytest.raises(KVQuantError, match=r"pip install 'sglang-kvq\[episodes\]'"):
        cluster(clouds((3, 3))[0], 2)
