"""A session remembers the right parts of a conversation that grows, is edited, or is sent in another namespace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sessions import session as session_module
from sglang_kvq.sessions.episodes import EpisodesOfSession
from sglang_kvq.sessions.index import NewPages
from sglang_kvq.sessions.planning import common_length
from sglang_kvq.sessions.session import BRANCHES, Branch, Session

NAMES = (None, None)


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Returns tokens: ``count`` times ``value``, part after part."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts])


def sums(prompt: np.ndarray, count: int) -> np.ndarray:
    """Returns a stand-in for embeddings: each page's sum, in hundreds."""
    return prompt[: count * P].reshape(count, P).sum(1, keepdims=True).astype(np.float32) / 100


def embed(session: Session, prompt: np.ndarray, count: int) -> None:
    """Embeds the first ``count`` pages of a prompt; a page's text is its first token."""
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


def test_what_a_turn_asks_several_times_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated comparisons are cached, also for a prefix and after the conversation grew, but never across arrays."""
    compared = []

    def counted(a: np.ndarray, b: np.ndarray) -> int:
        compared.append(len(b))
        return common_length(a, b)

    monkeypatch.setattr(session_module, "common_length", counted)
    branch, said = Branch(ids((1, 500)), 500), ids((1, 300), (2, 400))
    assert [branch.common(part) for part in (said, said[:400], said[:200], said)] == [300, 300, 200, 300]
    assert branch.common(branch.tokens[:450]) == 450 and compared == [700]
    assert branch.common(said[1:]) == 299  # the same array from another offset
    whole = ids((1, 500))
    assert branch.common(whole[:100]) == 100 and branch.common(whole) == 500  # longer than what was compared before
    branch.follow(said, 300, 700, NAMES)
    assert branch.common(said[:600]) == 600 and branch.common(whole) == 300


def known() -> tuple[Session, np.ndarray]:
    """Returns a session of 600 tokens, with nine pages computed and eight embedded, and its tokens."""
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
    # A request that continues the original conversation finds its pages, too.
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
    """The template may leave out the model's reasoning, and with it the end of the prompt."""
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
    # Counts the tokens, and the block of 64 pages that is cut.
    assert session.nbytes - before < again.nbytes + before // 3
    assert {id(block) for block in session.branches[0].blocks()} & {id(block) for block in session.branches[1].blocks()}


def test_another_namespace_knows_nothing_of_the_cache() -> None:
    session = Session("", "s")
    said = ids((1, 300))
    session.follow(said, NAMES)
    session.computed(said[: 4 * P], NAMES)
    session.computed(said[: 4 * P], ("other", None))
    assert session.exact_of(said, NAMES) == 4 * P and session.exact_of(said, ("other", None)) == 0
    assert session.said(said[:200], NAMES) == 200 and session.said(said, ("other", None)) == 0
    assert session.follow(said, ("other", None)) == 300 and session.latest.exact == 0
    session.computed(said[: 4 * P], NAMES)
    assert session.exact_of(said, NAMES) == session.exact_of(said, ("other", None)) == 0


def test_late_results_of_what_was_not_said_count_only_as_far_as_it_was() -> None:
    """A background request may end after the conversation took another course."""
    session = Session("", "s")
    said, edited = ids((1, 600)), ids((1, 300), (2, 400))
    session.follow(edited, NAMES)
    session.computed(said[: 9 * P], NAMES)
    assert session.latest.exact == 4 * P
    embed(session, said, 8)  # page 4 lies partly in the edited part
    assert_indexed(session, edited, 4)


def test_episodes_are_kept_if_their_tokens_were_not_edited() -> None:
    session = Session("", "s")
    session.follow(ids((1, 300), (2, 400)), NAMES)
    before, kept = EpisodesOfSession(tokens=301), EpisodesOfSession(tokens=300)
    session.divided(ids((1, 600)), before)
    assert session.latest.episodes is not before
    session.divided(ids((1, 600)), kept)
    assert session.latest.episodes is kept


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
    """Prompts keep a part of the previous prompt and then differ; each is embedded and computed."""
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
