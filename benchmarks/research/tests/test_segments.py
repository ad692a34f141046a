"""Segments cover a conversation once, in order, and do not change when it grows."""

from __future__ import annotations

import pytest

from benchmarks.research.episodes.segments import Turn, segment
from sglang_kvq.errors import KVQuantError


def turns(*lengths: int) -> list[Turn]:
    """Returns as many turns in each session as given."""
    sessions = [session for session, length in enumerate(lengths) for _ in range(length)]
    return [Turn("AB"[n % 2], f"says {n}", session) for n, session in enumerate(sessions)]


def test_every_turn_is_in_one_segment_of_one_session() -> None:
    of = turns(9, 1, 4, 3)
    found = segment(of, size=4)
    assert [n for one in found for n in one.turns] == list(range(len(of)))
    assert [len(one.turns) for one in found] == [4, 4, 1, 1, 4, 3]
    assert all(len({of[n].session for n in one.turns}) == 1 for one in found)


def test_text_is_the_turns_lines() -> None:
    (one,) = segment([Turn("Ann", "Hello."), Turn("Bob", "Hi!")])
    assert one.text == "Ann: Hello.\nBob: Hi!\n"


@pytest.mark.parametrize("size", [1, 3, 4])
def test_growing_changes_the_last_segment_only(size: int) -> None:
    of = turns(7, 6)
    for count in range(1, len(of)):
        before, after = segment(of[:count], size), segment(of[: count + 1], size)
        assert after[: len(before) - 1] == before[:-1]


def test_bad_input_is_refused() -> None:
    with pytest.raises(KVQuantError, match="segments of 0 turns"):
        segment(turns(2), size=0)
    with pytest.raises(KVQuantError, match="turn 1 is of session 2, the one before it of session 3"):
        segment([Turn("A", "x", 3), Turn("B", "y", 2)])
    assert segment([]) == []
