"""The episode and segments that a question gets, in cases where centroid and best segments disagree."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.research.episodes.matching import match, rank_segments
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.embedding import unit
from sglang_kvq.sessions.episodes import Episodes

#: Episode 0 is narrow around x; episode 1 is wide around y and has one segment close to the question.
ANGLES = np.radians([0, 4, -4, 38, 90, 120, 150])


ROWS = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1).astype(np.float32)


LABELS = np.array([0, 0, 0, 1, 1, 1, 1])


EPISODES = Episodes(LABELS, unit(np.stack([ROWS[e == LABELS].mean(0) for e in range(2)])))


QUESTION = np.array([np.cos(np.radians(36)), np.sin(np.radians(36))], dtype=np.float32)


def test_centroid_and_best_segment_disagree() -> None:
    assert match(QUESTION[None], ROWS, EPISODES, "centroid").tolist() == [0]
    assert match(QUESTION[None], ROWS, EPISODES, "segments", best=1).tolist() == [1]
    # Averaged over a whole cluster, the wide one loses again.
    assert match(QUESTION[None], ROWS, EPISODES, "segments", best=9).tolist() == [0]


def test_questions_are_matched_one_by_one() -> None:
    questions = np.stack([QUESTION, ROWS[0], ROWS[6]])
    for matching in ("centroid", "segments"):
        together = match(questions, ROWS, EPISODES, matching)
        assert together.tolist() == [int(match(q[None], ROWS, EPISODES, matching)[0]) for q in questions]
        assert together[1:].tolist() == [0, 1]


def test_rank_by_segments_is_by_cosine() -> None:
    order = rank_segments(QUESTION, ROWS)
    assert order[0] == 3 and (np.diff((ROWS @ QUESTION)[order]) <= 0).all()


def test_rank_by_centroid_goes_episode_by_episode() -> None:
    order = rank_segments(QUESTION, ROWS, EPISODES, "centroid")
    assert LABELS[order].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert order.tolist() == [1, 0, 2, 3, 4, 5, 6]


def test_another_matching_is_refused() -> None:
    with pytest.raises(KVQuantError, match="matching 'nearest': choose centroid or segments"):
        match(QUESTION[None], ROWS, EPISODES, "nearest")
    with pytest.raises(KVQuantError, match="by centroid needs episodes"):
        rank_segments(QUESTION, ROWS, None, "centroid")
