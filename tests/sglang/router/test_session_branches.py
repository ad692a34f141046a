"""Several requests of a session, at once and between its turns; the event loop stays free."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

import numpy as np
import pytest

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sessions.index import Lexical, NewPages, PageIndex, Rows, Terms, split
from sglang_kvq.sessions.messages import SELECTION, Selection
from tests.sglang.router.session_model import BUDGET, LONG, Manager, http, request_of


async def beside(manager, side):
    """Runs a turn, and other requests of its session that end while the turn's question is embedded."""
    question, waiting = manager.router.workers.thread.question, Future()
    manager.router.workers.thread.question = lambda text: waiting
    turn = asyncio.ensure_future(manager.turn(LONG, rid="turn"))
    while len(manager.sent) < 1 or not manager.session.planning.locked():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not turn.done()
    served = []
    for number, ids in enumerate(side):
        asked = request_of(input_ids=ids, rid=f"side {number}")
        served += await manager.heard(asked)
    manager.router.workers.thread.question = question
    waiting.set_result(question("450 451").result())
    return await turn, served


TITLE = [5000 + n for n in range(100)]


@pytest.mark.parametrize(
    "side",
    [[TITLE], [LONG[:BUDGET].tolist()], [TITLE, [*LONG[:300].tolist(), *TITLE], *[[9000 + n] * 70 for n in range(9)]]],
    ids=["title", "older turn", "many"],
)
def test_a_turn_is_served_beside_other_requests_of_its_session(side):
    """Requests that do not continue the conversation neither fail nor cause it to be embedded or computed again."""
    manager = Manager()
    (out,), served = asyncio.run(beside(manager, side))
    assert out["output_ids"] == [7, 8] and len(served) == len(side)
    session = manager.session
    assert len(session.index_of(LONG)) == len(LONG) // P and session.exact_of(LONG, (None, None)) == len(LONG) // P * P


@pytest.mark.parametrize("side", [TITLE, LONG[:BUDGET].tolist(), [*LONG[:500].tolist(), *TITLE]], ids=len)
def test_a_request_between_two_turns_costs_the_conversation_nothing(side):
    manager = Manager()

    async def run():
        await manager.turn(LONG)
        await manager.turn(side)
        manager.sent.clear()
        manager.words.pages.clear()
        await manager.turn([*LONG.tolist(), 7, 8, 450, 451])

    asyncio.run(run())
    assert len(manager.sent) == 1 and manager.words.pages == []


def test_an_older_turn_that_is_answered_again_becomes_the_conversation():
    """It keeps all that both answers have in common, and the first answer can still be continued."""
    manager, older = Manager(), LONG[:1500].tolist()

    async def run():
        await manager.turn(LONG)
        await manager.turn(older)
        manager.words.pages.clear()
        await manager.turn([*older, 7, 8, *range(3000, 3100)])
        await manager.turn([*LONG.tolist(), 7, 8, *range(4000, 4100)])

    asyncio.run(run())
    # Each branch embeds only its new pages: two of the older one, one of the other.
    assert [text.split()[0] for text in manager.words.pages] == ["1473", "3034", "1985"]
    history = Selection.decode(manager.sent[-2].sampling_params["custom_params"][SELECTION]).history
    assert len(history) > 1900 and history.tolist() == [*LONG.tolist(), 7, 8, 4000][: len(history)]


def test_two_requests_of_one_session_compute_its_history_once():
    async def both(manager):
        requests_ = [request_of(input_ids=[*LONG.tolist(), *more]) for more in ([450], [1250])]
        return await asyncio.gather(*(manager.heard(obj) for obj in requests_))

    manager = Manager()
    first, second = asyncio.run(both(manager))
    assert first[0]["output_ids"] == second[0]["output_ids"] == [7, 8]
    # One request computes the history up to the block; one, of either turn, computes what followed.
    assert [len(obj.input_ids) for obj in manager.sent if obj.extra_key is None] == [30 * P, 31 * P]
    assert len([obj for obj in manager.sent if obj.extra_key]) == 2


async def longest_gap(job):
    """Returns the longest CPU time in seconds for which ``job`` kept the event loop from running."""
    asked, longest, last = asyncio.ensure_future(job), 0.0, time.thread_time()
    while not asked.done():
        await asyncio.sleep(0.001)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    await asked
    return longest


@pytest.mark.parametrize("slow", ["HashingVectorizer.transform", "Lexical.scores"])
def test_other_sessions_go_on_while_one_is_searched_and_indexed(monkeypatch, slow):
    from sklearn.feature_extraction.text import HashingVectorizer

    owner, name = {"HashingVectorizer": HashingVectorizer, "Lexical": Lexical}[slow.split(".")[0]], slow.split(".")[1]
    original, went_on, beats = getattr(owner, name), [], []

    def slowly(*args, **options):
        before, deadline = len(beats), time.monotonic() + 60
        while len(beats) < before + 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        went_on.append(len(beats) >= before + 5)  # false if the event loop itself is here
        return original(*args, **options)

    async def run(manager):
        await manager.turn(LONG[: BUDGET + 2 * P])
        monkeypatch.setattr(owner, name, slowly)
        asked = asyncio.ensure_future(manager.turn(LONG[: BUDGET + 5 * P]))
        while not asked.done():
            beats.append(None)
            await asyncio.sleep(0.001)
        await asked

    asyncio.run(run(Manager()))
    assert went_on and all(went_on)


def known_conversation(manager, tokens):
    """Creates a session of so many tokens, all computed, embedded and indexed; returns the tokens."""
    said, pages = (np.arange(tokens, dtype=np.int32) * 7919 % 50_000).astype(np.int32), tokens // P
    one, index = split([" ".join(map(str, said[:P]))]), PageIndex()
    ends = (np.arange(1, pages + 1) * len(one.packed)).astype(np.int32)
    terms = Terms(np.tile(one.packed, pages), ends, np.repeat(one.lengths, pages))
    rows = np.random.default_rng(0).standard_normal((pages, 40)).astype(np.float16)
    index.add(NewPages(Rows(rows), terms))
    session = manager.router.store.use("", "a")
    session.follow(said, (None, None))
    session.computed(said[: pages * P], (None, None))
    session.learn(said, index)
    return said


def test_a_long_conversation_stops_nobody():
    """With a million tokens and four branches, a turn's 0.3 s of work blocks the loop for about 5 ms at a time.

    Both are CPU time, of the process and of the loop's own thread, so the speed of the machine does not count.
    """
    manager = Manager()
    manager.context_len = 1 << 21
    said = known_conversation(manager, 1 << 20)

    async def turn(number):
        """Runs a prompt that continues the conversation, and one that leaves it earlier with each turn."""
        prompts = [[*said.tolist(), 7, 8, *range(number, number + 40)], [*said[: -P * number].tolist(), *range(150)]]
        asked = [request_of(input_ids=prompt) for prompt in prompts]
        await asyncio.sleep(0)
        begun = time.process_time()
        longest = max([await longest_gap(manager.heard(one)) for one in asked])
        return longest / (time.process_time() - begun)

    async def run():
        await manager.turn(LONG, http(X_Session_Id="warm"))
        return [await turn(number) for number in range(3, 6)]

    shares = asyncio.run(run())
    assert len(manager.session.branches) == 4 and manager.session.selected == 6
    assert min(shares) < 0.1, shares
