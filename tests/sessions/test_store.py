"""A server remembers sessions within its limits and forgets idle ones."""

from __future__ import annotations

import contextlib
import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.index import Lexical, NewPages, PageIndex
from sglang_kvq.sessions.session import Session
from sglang_kvq.sessions.store import LOOK, SessionStore

NAMES = (None, None)


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
    with pytest.raises(KVQuantError, match="session 'b': unknown"):
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


def test_a_session_that_is_used_again_expires_later() -> None:
    clock = Clock()
    store = SessionStore(9, 60, clock)
    used, idle = store.use("t", "used"), store.use("t", "idle")
    assert store.expires_in() == 60
    clock.now += 50
    store.use("t", "used")
    assert store.expires_in() == 10
    clock.now += 20
    assert store.expires_in() == LOOK
    assert store.of("t") == [used] and not store.holds(idle) and store.expires_in() == 40
    store.delete("t", "used")
    assert store.expires_in() is None


def test_a_session_is_not_idle_while_it_answers() -> None:
    clock = Clock()
    store = SessionStore(9, 60, clock)
    slow, quick = store.use("t", "slow"), store.use("t", "quick")
    with store.answering(slow), store.answering(slow):
        clock.now += 1000
        assert store.of("t") == [slow] and store.expired == 1 and not store.holds(quick)
    assert slow.answering == 0 and slow.idle_since == clock.now
    later = store.use("t", "later")
    clock.now += 59
    assert store.of("t") == [later, slow]
    clock.now += 2
    assert store.of("t") == []


def test_a_session_is_not_idle_while_its_next_turn_is_prepared() -> None:
    clock = Clock()
    store = SessionStore(9, 60, clock)
    session = store.use("t", "a")
    with store.preparing(session):
        clock.now += 61
        store.expire()
        assert store.holds(session) and store.expired == 0
    store.expire()
    assert not store.holds(session)


def test_a_session_forgotten_while_it_answers_stays_forgotten() -> None:
    store = SessionStore(9, 60, Clock())
    with store.answering(store.use("t", "a")):
        store.delete("t", "a")
    assert len(store) == 0


def test_a_wall_clock_that_jumps_forgets_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = SessionStore(9, 60), time.time()
    session = store.use("t", "a")
    monkeypatch.setattr(time, "time", lambda: now + 1e6)
    assert store.use("t", "a") is session and session.used == now + 1e6 and session.created < now + 1


def test_sessions_without_expiry_stay() -> None:
    clock = Clock()
    store = SessionStore(9, 0, clock)
    session = store.use("t", "a")
    clock.now += 1e9
    assert store.get("t", "a") is session and store.expires_in() is None


def test_tenants_have_sessions_of_their_own() -> None:
    store = SessionStore(9, 0, Clock())
    one, other = store.use("one", "a"), store.use("other", "a")
    assert one is not other and store.of("one") == [one]
    store.delete("one", "a")
    assert store.of("one") == [] and store.get("other", "a") is other
    with pytest.raises(KVQuantError, match="unknown; it was never used with this key"):
        store.delete("one", "a")


def say(store: SessionStore, session: Session, pages: int) -> Session:
    """Gives the session ``pages`` pages of tokens with embeddings."""
    said = np.arange(pages * P, dtype=np.int32)
    session.follow(said, NAMES)
    index = PageIndex()
    index.add(NewPages.made(np.ones((pages, 384), np.float32), ["a page of few words"] * pages))
    session.learn(said, index)
    store.weigh(session)
    return session


#: Bytes of a session of one page, and of a session of a hundred pages.
SMALL, LARGE = (say(SessionStore(9, 0), Session("", "s"), pages).nbytes for pages in (1, 100))


def test_tiny_sessions_of_one_tenant_forget_no_other_tenants() -> None:
    store = SessionStore(1024, 0)
    idle, answered = store.use("alice", "idle"), store.use("alice", "work")
    with store.answering(answered):
        for number in range(2000):
            store.use("mallory", str(number))
        assert store.holds(answered) and store.holds(idle)
    assert len(store) == 1024 and len(store.of("mallory")) == 1022 and store.evicted == 978
    assert [session.id for session in store.of("mallory")][:2] == ["1999", "1998"]


def test_memory_is_bounded() -> None:
    store = SessionStore(1 << 20, 0, memory=5.5 * LARGE)
    for number in range(50):
        say(store, store.use("t", str(number)), 100)
        assert store.bytes <= 5.5 * LARGE
    assert [session.id for session in store.of("t")] == ["49", "48", "47", "46", "45"]
    assert store.bytes == sum(session.nbytes for session in store.of("t"))
    for session in store.of("t"):
        store.delete("t", session.id)
    assert store.bytes == 0


def test_memory_of_one_tenant_is_that_tenants() -> None:
    """A tenant that holds little loses nothing to one that holds much, whichever was used last."""
    store = SessionStore(1 << 20, 0, memory=5.5 * LARGE)
    own = say(store, store.use("alice", "a"), 100)
    for number in range(20):
        say(store, store.use("mallory", str(number)), 100)
    assert store.holds(own) and len(store.of("mallory")) == 4
    for number in range(20):
        say(store, store.use("bob", str(number)), 1)
    assert store.holds(own) and len(store.of("bob")) == 20 and len(store.of("mallory")) == 3


def test_a_tenant_holds_no_more_than_its_share() -> None:
    store = SessionStore(100, 0, memory=10 * LARGE, share=0.25)
    for number in range(40):
        store.use("many", str(number))
    assert len(store.of("many")) == 25
    for number in range(5):
        say(store, store.use("much", str(number)), 100)
    assert [session.id for session in store.of("much")] == ["4", "3"] and len(store.of("many")) == 25


@pytest.mark.parametrize("made", [SessionStore.answering, SessionStore.preparing], ids=["answer", "next turn"])
def test_a_session_for_which_something_is_made_is_not_forgotten(made: Callable[..., Any]) -> None:
    store = SessionStore(2, 0, memory=2 * LARGE)
    with contextlib.ExitStack() as work:
        running = []
        for number in range(4):
            running.append(store.use("t", str(number)))
            work.enter_context(made(store, running[-1]))
            say(store, running[-1], 100)
        assert all(store.holds(session) for session in running) and store.bytes == 4 * LARGE
    assert len(store) == 2 and store.bytes <= 2 * LARGE


def test_a_conversation_that_alone_is_too_much_is_forgotten_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    store = SessionStore(9, 0, memory=2 * LARGE)
    other = say(store, store.use("t", "other"), 1)
    with store.answering(large := store.use("t", "large")):
        say(store, large, 500)
        assert store.holds(large)
    assert not store.holds(large) and store.holds(other)
    assert "session 'large' is forgotten" in caplog.text and "--episodic-state-memory" in caplog.text


@pytest.mark.parametrize("pages", [0, 1, 100, 2000])
def test_state_is_counted_as_it_is_allocated(pages: int) -> None:
    """Counted bytes are within a third of what Python and NumPy report, for embeddings of 384 elements."""
    rng, count = np.random.default_rng(0), max(1, min(200, 400 // max(1, pages)))
    vocabulary = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 9)))) for _ in range(4000)]
    texts = [" ".join(rng.choice(vocabulary, 45)) for _ in range(pages)]
    Lexical().add(["load everything"])
    store = SessionStore(1000, 0)

    def make(number: int) -> Session:
        session = store.use("", f"session {number}")
        said = np.arange(pages * P + 20, dtype=np.int32)
        session.follow(said, NAMES)
        index = session.index_of(said)
        for at in range(0, pages, 8):
            new = texts[at : at + 8]
            index.add(NewPages.made(rng.standard_normal((len(new), 384)).astype(np.float32), new))
            session.learn(said, index)
        return session

    tracemalloc.start()
    try:
        sessions = [make(number) for number in range(count)]
        del make
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
    assert held / 1.33 < sessions[0].nbytes < held * 1.33, (held, sessions[0].nbytes)
