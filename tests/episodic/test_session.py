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


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Tokens: ``count`` times ``value``, part after part."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts])


def rows_for(prompt: np.ndarray, count: int) -> np.ndarray:
    """What stands for embeddings: of a page its sum."""
    return prompt[: count * P].reshape(count, P).sum(1, keepdims=True).astype(np.float32)


def embed(session: Session, prompt: np.ndarray, first: int, count: int) -> None:
    """Pages ``first .. count`` of a prompt, whose texts are their first tokens."""
    texts = [f"word{prompt[at * P]}" for at in range(first, count)]
    session.add_rows(prompt, first, rows_for(prompt, count)[first:], texts)


def test_a_conversation_that_grows() -> None:
    session = Session("", "s")
    first = ids((1, 300))
    assert session.follow(first, NAMES) == 0 and session.exact == 0
    session.computed(first[: 4 * P], NAMES)
    embed(session, first, 0, 4)
    grown = ids((1, 300), (2, 100))
    assert session.follow(grown, NAMES) == 300
    assert session.exact == 4 * P and len(session.rows) == len(session.letters) == 4
    embed(session, grown, 4, 6)
    np.testing.assert_array_equal(session.rows_of(grown), rows_for(grown, 6))


def test_an_edit_counts_from_where_it_is() -> None:
    session = Session("", "s")
    said = ids((1, 600))
    session.follow(said, NAMES)
    session.computed(said[: 9 * P], NAMES)
    embed(session, said, 0, 8)
    edited = ids((1, 300), (2, 400))
    assert session.follow(edited, NAMES) == 300
    assert session.exact == 4 * P and len(session.rows) == len(session.letters) == 4


def test_another_namespace_knows_nothing_of_the_cache() -> None:
    session = Session("", "s")
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
    session = Session("", "s")
    said, edited = ids((1, 600)), ids((1, 300), (2, 400))
    session.follow(edited, NAMES)
    session.computed(said[: 9 * P], NAMES)
    assert session.exact == 4 * P
    embed(session, said, 0, 4)
    embed(session, said, 4, 8)  # page 4 is in part of the edited part
    assert len(session.rows) == len(session.letters) == 4


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 700)), min_size=1, max_size=12))
def test_rows_and_exact_are_always_of_what_was_said(steps: list[tuple[int, int]]) -> None:
    """Prompts that keep a part of the last one and go on differently, each embedded and computed."""
    session, prompt = Session("", "s"), np.empty(0, np.int32)
    truth: set[bytes] = set()
    for number, (keep, more) in enumerate(steps):
        kept = prompt[: len(prompt) * keep // 12]
        prompt = np.concatenate([kept, np.full(more, number, np.int32)])
        session.follow(prompt, NAMES)
        assert prompt[: session.exact].tobytes() in truth | {b""}
        np.testing.assert_array_equal(
            session.rows_of(prompt).reshape(-1), rows_for(prompt, len(session.rows_of(prompt))).reshape(-1)
        )
        count = len(prompt) // P
        have = len(session.rows_of(prompt))
        embed(session, prompt, have, count)
        assert len(session.rows) == len(session.letters) == count
        whole = prompt[: len(prompt) // P * P]
        truth |= {whole[: n * P].tobytes() for n in range(len(whole) // P + 1)}
        session.computed(whole, NAMES)
        assert session.exact == len(whole)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_session_used_longest_ago_is_forgotten() -> None:
    store = SessionStore(2, 0, Clock())
    a, _ = store.use("t", "a"), store.use("t", "b")
    assert store.use("t", "a") is a
    store.use("t", "c")
    assert [session.id for session in store.of("t")] == ["c", "a"] and store.evicted == 1
    with pytest.raises(KVQuantError, match="session 'b': not known"):
        store.get("t", "b")


def test_idle_sessions_expire() -> None:
    clock = Clock()
    store = SessionStore(9, 60, clock)
    old = store.use("t", "old")
    clock.now += 50
    store.use("t", "new")
    assert len(store) == 2
    clock.now += 11
    assert len(store) == 1 and store.expired == 1 and not store.holds(old)
    assert store.use("t", "old") is not old
    clock.now += 1e9
    assert store.of("t") == []


def test_a_session_is_not_idle_while_it_answers() -> None:
    clock = Clock()
    store = SessionStore(9, 60, clock)
    slow, quick = store.use("t", "slow"), store.use("t", "quick")
    with store.answering(slow), store.answering(slow):
        clock.now += 1000
        assert store.of("t") == [slow] and store.expired == 1 and not store.holds(quick)
    assert slow.answering == 0 and slow.used == clock.now
    later = store.use("t", "later")
    clock.now += 59
    assert store.of("t") == [later, slow]
    clock.now += 2
    assert store.of("t") == []


def test_a_session_forgotten_while_it_answers_stays_forgotten() -> None:
    store = SessionStore(9, 60, Clock())
    with store.answering(store.use("t", "a")):
        store.delete("t", "a")
    assert len(store) == 0


def test_sessions_without_expiry_stay() -> None:
    clock = Clock()
    store = SessionStore(9, 0, clock)
    session = store.use("t", "a")
    clock.now += 1e9
    assert store.get("t", "a") is session


def test_tenants_have_sessions_of_their_own() -> None:
    store = SessionStore(9, 0, Clock())
    one, other = store.use("one", "a"), store.use("other", "a")
    assert one is not other and store.of("one") == [one]
    store.delete("one", "a")
    assert store.of("one") == [] and store.get("other", "a") is other
    with pytest.raises(KVQuantError, match="not known"):
        store.delete("one", "a")
