"""What a session knows of a conversation that grows, is edited, or is sent under other names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvq.config import PAGE_SIZE as P
from sglang_kvq.episodic.session import Session
from sglang_kvq.episodic.store import SessionStore
from sglang_kvq.errors import KVQuantError

NAMES = (None, None)
SEGMENT = 2 * P


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Tokens: ``count`` times ``value``, part after part."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts])


def rows_for(prompt: np.ndarray, count: int) -> np.ndarray:
    """What stands for embeddings: of a segment its sum."""
    return prompt[: count * SEGMENT].reshape(count, SEGMENT).sum(1, keepdims=True).astype(np.float32)


def test_a_conversation_that_grows() -> None:
    session = Session("", "s", SEGMENT)
    first = ids((1, 300))
    assert session.follow(first, NAMES) == 0 and session.exact == 0
    session.computed(first[: 4 * P], NAMES)
    session.add_rows(first, 0, rows_for(first, 2))
    grown = ids((1, 300), (2, 100))
    assert session.follow(grown, NAMES) == 300
    assert session.exact == 4 * P and len(session.rows) == 2
    session.add_rows(grown, 2, rows_for(grown, 3)[2:])
    np.testing.assert_array_equal(session.rows_of(grown), rows_for(grown, 3))


def test_an_edit_counts_from_where_it_is() -> None:
    session = Session("", "s", SEGMENT)
    said = ids((1, 600))
    session.follow(said, NAMES)
    session.computed(said[: 9 * P], NAMES)
    session.add_rows(said, 0, rows_for(said, 4))
    edited = ids((1, 300), (2, 400))
    assert session.follow(edited, NAMES) == 300
    assert session.exact == 4 * P and len(session.rows) == 2


def test_another_namespace_knows_nothing_of_the_cache() -> None:
    session = Session("", "s", SEGMENT)
    said = ids((1, 300))
    session.follow(said, NAMES)
    session.computed(said[: 4 * P], NAMES)
    session.computed(said[: 4 * P], ("other", None))
    assert session.exact == 4 * P
    assert session.follow(said, ("other", None)) == 300 and session.exact == 0
    session.computed(said[: 4 * P], NAMES)
    assert session.exact == 0


def test_late_results_of_what_was_not_said_count_only_as_far_as_it_was() -> None:
    """A request in the background ends after the conversation went another way."""
    session = Session("", "s", SEGMENT)
    said, edited = ids((1, 600)), ids((1, 300), (2, 400))
    session.follow(edited, NAMES)
    session.computed(said[: 9 * P], NAMES)
    assert session.exact == 4 * P
    session.add_rows(said, 0, rows_for(said, 2))
    session.add_rows(said, 2, rows_for(said, 4)[2:])  # segment 2 is of the edited part
    assert len(session.rows) == 2


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 700)), min_size=1, max_size=12))
def test_rows_and_exact_are_always_of_what_was_said(steps: list[tuple[int, int]]) -> None:
    """Prompts that keep a part of the last one and go on differently, each embedded and computed."""
    session, prompt = Session("", "s", SEGMENT), np.empty(0, np.int32)
    truth: set[bytes] = set()
    for number, (keep, more) in enumerate(steps):
        kept = prompt[: len(prompt) * keep // 12]
        prompt = np.concatenate([kept, np.full(more, number, np.int32)])
        session.follow(prompt, NAMES)
        assert prompt[: session.exact].tobytes() in truth | {b""}
        np.testing.assert_array_equal(
            session.rows_of(prompt).reshape(-1), rows_for(prompt, len(session.rows_of(prompt))).reshape(-1)
        )
        count = len(prompt) // SEGMENT
        have = len(session.rows_of(prompt))
        session.add_rows(prompt, have, rows_for(prompt, count)[have:])
        assert len(session.rows) == count
        whole = prompt[: len(prompt) // P * P]
        truth |= {whole[: n * P].tobytes() for n in range(len(whole) // P + 1)}
        session.computed(whole, NAMES)
        assert session.exact == len(whole)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_session_used_longest_ago_is_forgotten() -> None:
    store = SessionStore(2, 0, SEGMENT, Clock())
    a, _ = store.use("t", "a"), store.use("t", "b")
    assert store.use("t", "a") is a
    store.use("t", "c")
    assert [session.id for session in store.of("t")] == ["c", "a"] and store.evicted == 1
    with pytest.raises(KVQuantError, match="session 'b': not known"):
        store.get("t", "b")


def test_idle_sessions_expire() -> None:
    clock = Clock()
    store = SessionStore(9, 60, SEGMENT, clock)
    old = store.use("t", "old")
    clock.now += 50
    store.use("t", "new")
    assert len(store) == 2
    clock.now += 11
    assert len(store) == 1 and store.expired == 1 and not store.holds(old)
    assert store.use("t", "old") is not old
    clock.now += 1e9
    assert store.of("t") == []


def test_sessions_without_expiry_stay() -> None:
    clock = Clock()
    store = SessionStore(9, 0, SEGMENT, clock)
    session = store.use("t", "a")
    clock.now += 1e9
    assert store.get("t", "a") is session


def test_tenants_have_sessions_of_their_own() -> None:
    store = SessionStore(9, 0, SEGMENT, Clock())
    one, other = store.use("one", "a"), store.use("other", "a")
    assert one is not other and store.of("one") == [one]
    store.delete("one", "a")
    assert store.of("one") == [] and store.get("other", "a") is other
    with pytest.raises(KVQuantError, match="not known"):
        store.delete("one", "a")
