"""Which episode and which segments a question gets, on cases where centroid and best segments disagree."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvq.episodic.cluster import Episodes
from sglang_kvq.episodic.embed import unit
from sglang_kvq.episodic.lexical import Lexical
from sglang_kvq.episodic.match import fuse, match, rank_windows
from sglang_kvq.errors import KVQuantError

#: Episode 0 is narrow around x; episode 1 is wide around y and has one segment close to the question.
ANGLES = np.radians([0, 4, -4, 38, 90, 120, 150])
ROWS = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1).astype(np.float32)
LABELS = np.array([0, 0, 0, 1, 1, 1, 1])
EPISODES = Episodes(LABELS, unit(np.stack([ROWS[e == LABELS].mean(0) for e in range(2)])))
QUESTION = np.array([np.cos(np.radians(36)), np.sin(np.radians(36))], dtype=np.float32)


def test_centroid_and_best_segment_disagree() -> None:
    assert match(QUESTION[None], ROWS, EPISODES, "centroid").tolist() == [0]
    assert match(QUESTION[None], ROWS, EPISODES, "segments", best=1).tolist() == [1]
    # Averaged over all of a cluster, the wide one loses again.
    assert match(QUESTION[None], ROWS, EPISODES, "segments", best=9).tolist() == [0]


def test_questions_are_matched_one_by_one() -> None:
    questions = np.stack([QUESTION, ROWS[0], ROWS[6]])
    for matching in ("centroid", "segments"):
        together = match(questions, ROWS, EPISODES, matching)
        assert together.tolist() == [int(match(q[None], ROWS, EPISODES, matching)[0]) for q in questions]
        assert together[1:].tolist() == [0, 1]


def test_windows_by_meaning_and_letters() -> None:
    texts = ["we sailed", "along the coast", "and ate", "some bread", "in the harbour"]
    index = Lexical()
    index.add(texts)
    pages = unit(np.array([[1, 0], [1, 1], [0, 1], [-1, 0], [0, -1]], dtype=np.float32))
    row = np.array([1, 0], dtype=np.float32)
    for size in (1, 2, 3, 9):
        wide = [" ".join(texts[n : n + size]) for n in range(max(1, len(texts) - size + 1))]
        means = unit(np.stack([pages[n : n + size].sum(0) for n in range(len(wide))]))
        joined = Lexical()
        joined.add(wide)
        wanted = np.argsort(-fuse(means @ row, joined.scores("coast")), kind="stable")
        assert rank_windows("coast", row, pages, index, size).tolist() == wanted.tolist()
    assert rank_windows("coast", row, pages, index)[0] in (0, 1)
    with pytest.raises(KVQuantError, match="embeddings of 4 pages beside an index of 5"):
        rank_windows("coast", row, pages[:4], index)


def test_fusion_is_of_standardized_scores() -> None:
    cosines, words = np.array([0.9, 0.5, 0.7, 0.1], dtype=np.float32), np.array([0.0, 30.0, 20.0, 0.0])
    wanted = sum((of - np.mean(of)) / np.std(of) for of in (cosines.astype(np.float64), words))
    np.testing.assert_allclose(fuse(cosines, words), wanted, rtol=1e-5)
    np.testing.assert_allclose(fuse(100 * cosines - 7, words / 9), wanted, rtol=1e-4)
    np.testing.assert_allclose(fuse(cosines, np.full(4, 3.0), words), wanted, rtol=1e-5)
    assert not fuse(np.full(3, 0.1, dtype=np.float32)).any() and len(fuse(np.empty(0))) == 0


def test_fusion_of_nothing_is_refused() -> None:
    with pytest.raises(KVQuantError, match="fusing scores of \\[\\] items"):
        fuse()
    with pytest.raises(KVQuantError, match="fusing scores of \\[2, 3\\] items"):
        fuse(np.zeros(2), np.zeros(3))


def test_another_matching_is_refused() -> None:
    with pytest.raises(KVQuantError, match="matching 'nearest': choose centroid or segments"):
        match(QUESTION[None], ROWS, EPISODES, "nearest")
