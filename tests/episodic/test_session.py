"""What a session knows of a conversation that grows, is edited, or is sent under other names."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.episodic.lexical import Lexical
from sglang_kvq.episodic.page_index import NewPages, PageIndex
from sglang_kvq.episodic.session import BRANCHES, Session
from sglang_kvq.episodic.store import SessionStore
from sglang_kvq.errors import KVQuantError

NAMES = (None, None)


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Tokens: ``count`` times ``value``, part after part."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts])


def sums(prompt: np.ndarray, count: int) -> np.ndarray:
    """Stand-ins for embeddings: a page's sum, in hundreds."""
    return prompt[: count * P].reshape(count, P).sum(1, keepdims=True).astype(np.float32) / 100


def embed(session: Session, prompt: np.ndarray, count: int) -> None:
    """Embeds the first ``count`` pages of a prompt, whose texts are their first tokens."""
    index = session.index_of(prompt)
    first = len(index)
    texts = [f"word{prompt[at * P]}" for at in range(first, count)]
    if texts:
        index.add(NewPages.made(sums(prompt, count)[first:], texts))
    session.learn(prompt, index)


def assert_indexed(session: Session, prompt: np.ndarray, pages: int) -> None:
    index = session.index_of(prompt)
    assert len(index) == len(index.letters) == pages
    np.testing.assert_allclose(index.rows().reshape(-1), sums(prompt, pages).reshape(-1), rtol=1e-3)


def test_a_conversation_that_grows() -> None:
    session = Session("", "s")
    first = ids((1, 300))
    assert session.follow(first, NAMES) == 0 and session.latest.exact == 0
    session.computed(first[: 4 * P], NAMES)
    embed(session, first, 4)
    grown = ids((1, 300), (2, 100))
    assert session.follow(grown, NAMES) == 300
    assert session.exact_of(grown, NAMES) == 4 * P
    assert_indexed(session, grown, 4)
    embed(session, grown, 6)
    assert_indexed(session, grown, 6)
    assert len(session.branches) == 1


def known() -> tuple[Session, np.ndarray]:
    """A conversation of 600 tokens, of which nine pages are computed and eight embedded."""
    session, said = Session("", "s"), ids((1, 600))
    session.follow(said, NAMES)
    session.computed(said[: 9 * P], NAMES)
    embed(session, said, 8)
    return session, said


def test_an_edit_counts_from_where_it_is() -> None:
    session, said = known()
    edited = ids((1, 300), (2, 400))
    assert session.follow(edited, NAMES) == 300
    assert session.exact_of(edited, NAMES) == 4 * P
    assert_indexed(session, edited, 4)
    # Whoever goes on with what was edited finds that, too.
    assert session.exact_of(said, NAMES) == 9 * P
    assert_indexed(session, said, 8)
    session.follow(ids((1, 300), (2, 450)), NAMES)
    assert len(session.latest.tokens) == 750 and len(session.branches) == 2


SIDES = {
    "titles": [ids((7, 100), (n, 70)) for n in range(9)],
    "titles that grow": [ids((7, 100 + 20 * n)) for n in range(9)],
    "kinds": [ids((10 + n % 3, 100), (n, 70)) for n in range(12)],
    "older turns": [ids((1, 128 + 70 * (n % 3)), (n + 2, 70)) for n in range(9)],
    "the same once more": [ids((1, 128))] * 9,
}


@pytest.mark.parametrize("side", SIDES.values(), ids=SIDES)
def test_requests_beside_the_conversation_leave_it_alone(side: list[np.ndarray]) -> None:
    session, said = known()
    for prompt in side:
        session.follow(prompt, NAMES)
        embed(session, prompt, len(prompt) // P)
    assert len(session.branches) <= BRANCHES
    assert session.exact_of(said, NAMES) == 9 * P
    assert_indexed(session, said, 8)
    assert session.follow(ids((1, 600), (3, 9)), NAMES) == 600


def test_an_answer_that_comes_back_in_other_tokens_is_the_same_conversation() -> None:
    """As of a model whose reasoning its template leaves out, and with it the end of the prompt."""
    session, said = known()
    session.follow(ids((1, 600), (8, 500)), NAMES, asked=600)
    session.follow(ids((1, 590), (9, 40), (2, 50)), NAMES)
    assert len(session.branches) == 1
    assert_indexed(session, said, 8)


def test_branches_share_memory() -> None:
    session, said = Session("", "s"), np.arange(200 * P, dtype=np.int32) % 997
    session.follow(said, NAMES)
    embed(session, said, 200)
    before = session.nbytes
    again = said[: 190 * P]
    session.follow(again, NAMES)
    assert len(session.branches) == 2
    assert_indexed(session, again, 190)
    # Its tokens, and the block of 64 pages that is cut.
    assert session.nbytes - before < again.nbytes + before // 3
    assert {id(block) for block in session.branches[0].blocks()} & {id(block) for block in session.branches[1].blocks()}


def test_another_namespace_knows_nothing_of_the_cache() -> None:
    session = Session("", "s")
    said = ids((1, 300))
    session.follow(said, NAMES)
    session.computed(said[: 4 * P], NAMES)
    session.computed(said[: 4 * P], ("other", None))
    assert session.exact_of(said, NAMES) == 4 * P and session.exact_of(said, ("other", None)) == 0
    assert session.follow(said, ("other", None)) == 300 and session.latest.exact == 0
    session.computed(said[: 4 * P], NAMES)
    assert session.exact_of(said, NAMES) == session.exact_of(said, ("other", None)) == 0


def test_late_results_of_what_was_not_said_count_only_as_far_as_it_was() -> None:
    """A request in the background ends after the conversation went another way."""
    session = Session("", "s")
    said, edited = ids((1, 600)), ids((1, 300), (2, 400))
    session.follow(edited, NAMES)
    session.computed(said[: 9 * P], NAMES)
    assert session.latest.exact == 4 * P
    embed(session, said, 8)  # page 4 is in part of the edited part
    assert_indexed(session, edited, 4)


def test_what_one_request_looks_at_no_other_changes() -> None:
    session, said = known()
    index = session.index_of(said)
    edited = ids((1, 580), (2, 40))
    session.follow(edited, NAMES)
    embed(session, edited, 9)
    assert len(index) == 8
    np.testing.assert_allclose(index.rows().reshape(-1), sums(said, 8).reshape(-1), rtol=1e-3)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 700)), min_size=1, max_size=12))
def test_index_and_exact_are_always_of_what_was_said(steps: list[tuple[int, int]]) -> None:
    """Prompts that keep a part of the last one and go on differently, each embedded and computed."""
    session, prompt = Session("", "s"), np.empty(0, np.int32)
    truth: set[bytes] = set()
    for number, (keep, more) in enumerate(steps):
        kept = prompt[: len(prompt) * keep // 12]
        prompt = np.concatenate([kept, np.full(more, number, np.int32)])
        session.follow(prompt, NAMES)
        assert prompt[: session.exact_of(prompt, NAMES)].tobytes() in truth | {b""}
        assert_indexed(session, prompt, len(session.index_of(prompt)))
        count = len(prompt) // P
        embed(session, prompt, count)
        assert_indexed(session, prompt, count)
        whole = prompt[: len(prompt) // P * P]
        truth |= {whole[: n * P].tobytes() for n in range(len(whole) // P + 1)}
        session.computed(whole, NAMES)
        assert session.exact_of(prompt, NAMES) == len(whole)
        for branch in session.branches:
            assert_indexed(session, branch.tokens, len(branch.index))


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


# -- limits -------------------------------------------------------------------------------------------------


def say(store: SessionStore, session: Session, pages: int) -> Session:
    """Has the session say and embed so many pages."""
    said = np.arange(pages * P, dtype=np.int32)
    session.follow(said, NAMES)
    index = PageIndex()
    index.add(NewPages.made(np.ones((pages, 384), np.float32), ["a page of few words"] * pages))
    session.learn(said, index)
    store.weigh(session)
    return session


#: A session of one page, and of a hundred.
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
    """A tenant that holds little loses nothing to one that holds much, whoever was used last."""
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
    """Within a third of what Python and NumPy say they hold, of sessions with embeddings of 384 elements."""
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
