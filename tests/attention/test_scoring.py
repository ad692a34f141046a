"""Each batch scores the right keys with the right tokens, and it is known when a request's scores are complete."""

from __future__ import annotations

import pytest

from sglang_kvq.attention.scores.scoring import KeyScores, ScoringPart, plan_scoring
from sglang_kvq.errors import KVQuantError


def parts_of(wanted: dict[int, KeyScores], prefix: list[int], new: list[int]) -> list[tuple]:
    parts = plan_scoring(prefix, new, wanted)
    assert all(isinstance(part, ScoringPart) for part in parts)
    return [(part.request, part.stored, part.keys, part.queries) for part in parts]


def test_a_request_in_one_chunk():
    """The block has 100 tokens: 64 are stored, 36 are in the chunk, and 20 queries follow."""
    scores = KeyScores(2, 3, 100, "cpu")
    assert parts_of({0: scores}, [64], [56]) == [(0, 64, (0, 36), (36, 56))]
    assert scores.result(120).shape == (2, 3, 100)


def test_a_request_in_many_chunks():
    """Chunks: most of the block, its end with the prompt's beginning, and the rest of the prompt in two parts."""
    scores = KeyScores(1, 1, 100, "cpu")
    seen = [parts_of({0: scores}, [prefix], [new]) for prefix, new in ((0, 70), (70, 40), (110, 1), (111, 9))]
    assert seen == [[], [(0, 70, (0, 30), (30, 40))], [(0, 100, (0, 0), (0, 1))], [(0, 100, (0, 0), (0, 9))]]
    assert scores.result(120) is scores.values


def test_a_chunk_that_ends_with_the_past_scores_nothing():
    scores = KeyScores(1, 1, 100, "cpu")
    assert parts_of({0: scores}, [64], [36]) == [] and scores.seen == 100
    assert parts_of({0: scores}, [100], [1]) == [(0, 100, (0, 0), (0, 1))]


def test_requests_of_a_batch_are_told_apart():
    scores = {n: KeyScores(1, 1, past, "cpu") for n, past in ((1, 10), (3, 200))}
    assert parts_of(scores, [0, 4, 9, 192], [5, 16, 7, 50]) == [
        (1, 4, (5, 11), (11, 21)),
        (3, 192, (28, 36), (36, 78)),
    ]
    assert [scores[n].seen for n in (1, 3)] == [20, 242]


def test_after_a_retraction_the_prompt_scores_again():
    scores = KeyScores(1, 1, 100, "cpu")
    for prefix, new in ((0, 110), (0, 60), (60, 60)):
        parts_of({0: scores}, [prefix], [new])
    assert scores.result(120) is scores.values


def test_queries_that_were_not_computed_are_missed():
    """The prompt's first 28 tokens came from the prefix cache, so their queries were not computed."""
    scores = KeyScores(1, 1, 100, "cpu")
    parts_of({0: scores}, [128], [12])
    with pytest.raises(KVQuantError, match="tokens 100 to 140: the query of token 100 was not computed. Run"):
        scores.result(140)
    parts_of({0: scores}, [100], [10])
    with pytest.raises(KVQuantError, match="the query of token 110 was not"):
        scores.result(140)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(KVQuantError, match="first 0 tokens"):
        KeyScores(1, 1, 0, "cpu")
    with pytest.raises(KVQuantError, match="request 2 in a batch of 2"):
        plan_scoring([0, 0], [5, 5], {2: KeyScores(1, 1, 1, "cpu")})
    with pytest.raises(KVQuantError, match="100 tokens in a request of 100: a prompt"):
        KeyScores(1, 1, 100, "cpu").result(100)
