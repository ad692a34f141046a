"""The router of EpiCache, with a stand-in for SGLang that knows which episodes are cached."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from fastapi import HTTPException

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.config import PROMPT_TOKENS, EpisodicConfig
from sglang_kvq.sessions.episodes import cluster
from sglang_kvq.sessions.messages import FOLD, PREFIX, Fold, FoldedPrefix
from tests.sglang.router import session_model
from tests.sglang.router.session_model import http, request_of

BUDGET, BLOCK = 6 * P, 2 * P
EPISODIC = EpisodicConfig("epicache", BUDGET, BLOCK, "folder", 2 * P, sessions=3, idle_seconds=0, episodes=2)
CONFIG = KVQuantConfig("oscar", recent_tokens=2 * P, episodic=EPISODIC)
#: A prompt about two subjects: numbers in the hundreds 1, then 5.
LONG = np.concatenate([100 + np.arange(8 * P) % 90, 500 + np.arange(8 * P) % 90]).astype(np.int32)


class Manager(session_model.Manager):
    """Answers requests, caches folds under their names, and requires a request's episode to be cached.

    Args:
        problems: errors for the first requests, one each.
    """

    context_len, says = 8192, (7, 8)

    def __init__(self, *problems: Exception, **episodic) -> None:
        super().__init__(config=CONFIG, **episodic)
        self.tokenizer.encode = lambda text, **options: [int(word) % 3000 for word in text.split() if word.isdigit()]
        self.problems, self.cached = list(problems), set()

    async def generate_request(self, obj, request=None):
        self.sent.append(obj)
        obj.normalize_batch_and_arguments()
        await asyncio.sleep(0)
        if self.problems:
            raise self.problems.pop(0)
        custom = obj.sampling_params.get("custom_params", {})
        if PREFIX in custom and obj.extra_key not in self.cached:
            raise KVQuantError("320 of 384 tokens of the episode are no longer cached.")
        if FOLD in custom:
            self.cached.add(Fold.decode(custom[FOLD]).name)
        reason = {"type": "length"}
        meta = {"id": obj.rid, "prompt_tokens": len(obj.input_ids), "cached_tokens": 0, "finish_reason": reason}
        yield {"text": "x", "output_ids": list(self.says), "meta_info": meta}

    def custom(self, at, parameter):
        return self.sent[at].sampling_params.get("custom_params", {}).get(parameter)


def test_a_chain_is_built_and_answered_from():
    manager = Manager()
    (out,) = manager.ask(LONG)
    *steps, answer = manager.sent
    # 16 pages, of which the last block or less is not folded: blocks end at pages 8, 10, 12 and 14.
    assert [Fold.decode(manager.custom(i, FOLD)).length for i in range(len(steps))] == [8 * P] * 4
    behind = [FoldedPrefix.decode(manager.custom(i, PREFIX)) for i in (1, 2, 3)]
    assert manager.custom(0, PREFIX) is None and [one.offset for one in behind] == [2 * P, 4 * P, 6 * P]
    for step, end in zip(steps, (8 * P, 10 * P, 12 * P, 14 * P)):
        assert step.input_ids[:BUDGET].tolist() == LONG[:BUDGET].tolist()
        assert step.input_ids[BUDGET : BUDGET + BLOCK].tolist() == LONG[end - BLOCK : end].tolist()
        assert 0 < len(step.input_ids) - BUDGET - BLOCK <= PROMPT_TOKENS
    assert steps[1].extra_key == Fold.decode(manager.custom(0, FOLD)).name
    assert answer.extra_key == Fold.decode(manager.custom(3, FOLD)).name
    assert answer.input_ids == [*LONG[:BUDGET], *LONG[14 * P :]]
    assert FoldedPrefix.decode(manager.custom(-1, PREFIX)) == FoldedPrefix(BUDGET, 8 * P)
    assert out["meta_info"]["prompt_tokens"] == len(LONG) and manager.session.hot == BUDGET + 2 * P


@pytest.mark.parametrize("sinks,pinned", [(0, P), (P, P), (3 * P, 3 * P)])
def test_every_episode_keeps_the_sinks(sinks, pinned):
    manager = session_model.Manager(config=replace(CONFIG, sink_tokens=sinks))
    assert manager.router.episodes.plan.pinned == pinned


@pytest.mark.parametrize("system,pages", [(0, 1), (P // 2, 1), (P + 1, 2), (3 * P, 2)])
def test_every_episode_keeps_the_system_prompt(system, pages):
    """It ends at the first user message, and may take a quarter of the budget."""
    manager, said = Manager(budget=8 * P), LONG.copy()
    manager.router.marker = np.array([1901, 1902])
    for at in (system, 12 * P):
        said[at : at + 2] = manager.router.marker
    manager.ask(said)
    assert {Fold.decode(manager.custom(i, FOLD)).pinned for i in range(len(manager.sent) - 1)} == {pages * P}


def test_the_episode_is_the_questions():
    """The prompts for the two subjects' episodes consist of their own segments."""
    manager = Manager()
    manager.ask(LONG)
    said = np.append(LONG, [7, 8])
    for subject in (1, 5):
        manager.ask([*said, *[100 * subject + 5] * 20])
        prompt = manager.sent[-2].input_ids[BUDGET + BLOCK :]
        assert np.mean(np.array(prompt) // 100 == subject) > 0.9, prompt
    clusters = manager.session.latest.episodes.clusters
    assert clusters is not None and len(clusters) == 2


def test_the_next_turn_folds_what_is_new_only():
    manager = Manager()
    manager.ask(LONG)
    before = len(manager.sent)
    more = np.concatenate([LONG, [7, 8], 500 + np.arange(2 * P + 10) % 90])
    manager.ask(more)
    # The episode is the same: one block continues its chain at page 14, then comes the answer.
    assert len(manager.sent) - before == 2
    assert manager.sent[before].extra_key == manager.sent[before - 1].extra_key
    again = len(manager.sent)
    manager.ask(more)
    assert len(manager.sent) == again + 1


def test_other_sessions_go_on_while_one_is_divided(monkeypatch):
    beats = []

    def slow(rows, count, seed=0):
        before, deadline = len(beats), time.monotonic() + 60
        while len(beats) <= before + 5:
            assert time.monotonic() < deadline, "the event loop stood still"
            time.sleep(0.01)
        return cluster(rows, count, seed)

    async def run():
        asked = asyncio.ensure_future(manager.turn(LONG))
        while not asked.done():
            beats.append(None)
            await asyncio.sleep(0.01)
        return await asked

    monkeypatch.setattr("sglang_kvq.sessions.episodes.cluster", slow)
    manager = Manager()
    assert asyncio.run(run())[0]["text"] == "x"


def test_an_edit_divides_anew():
    manager = Manager()
    manager.ask(LONG)
    names = set(manager.cached)
    edited = LONG.copy()
    edited[100:200] = 900
    manager.ask(edited)
    assert len(manager.cached) == 2 * len(names)


def test_a_short_prompt_is_the_clients_own():
    manager = Manager()
    counted = manager.counted()
    for tokens in (BUDGET, BUDGET + BLOCK):  # the second exceeds the budget by less than a block before its question
        manager.ask(LONG[:tokens])
        assert manager.sent[-1].input_ids == LONG[:tokens].tolist() and manager.sent[-1].extra_key is None
    assert len(manager.sent) == 2 and counted.read == ["whole"] * 2 and manager.session.selected == 0


def test_what_was_evicted_is_built_again():
    manager = Manager()
    counted = manager.counted()
    manager.ask(LONG)
    manager.cached.clear()
    before = len(manager.sent)
    manager.ask(LONG)
    assert len(manager.sent) - before == 1 + 4 + 1 and manager.session.rebuilt == 1  # a refusal, four steps, the answer
    # If a chain is broken in the middle, its earlier steps are tried from the beginning.
    manager.cached.clear()
    before = len(manager.sent)
    manager.ask([*LONG, 7, 8, *LONG[-300:]])
    assert manager.session.rebuilt == counted.rebuilds == 2 and manager.custom(before, PREFIX)


def test_no_room_waits_and_then_says_so(monkeypatch):
    monkeypatch.setattr("sglang_kvq.sglang.router.episodes.PAUSE", 1e-4)
    full = [ValueError("sglang-kvq: no room for the 384 tokens of a fold. Send the request again.") for _ in range(20)]
    manager = Manager(*full[:3])
    manager.ask(LONG)
    assert len(manager.sent) == 3 + 4 + 1
    with pytest.raises(HTTPException, match="503: .*folding tokens 384 to 512 of the conversation failed: .*no room"):
        Manager(*full).ask(LONG)


def test_an_episode_that_does_not_stay_is_the_servers_problem():
    class Nothing(set):
        def __contains__(self, name):
            return False

    manager = Manager()
    manager.cached = Nothing()
    with pytest.raises(HTTPException, match="503: sglang-kvq: an episode is evicted as soon as it is built"):
        manager.ask(LONG)


def test_other_problems_are_the_clients():
    with pytest.raises(
        KVQuantError, match="^session 'a': folding tokens 384 to 512 of the conversation failed: something else"
    ):
        Manager(ValueError("something else")).ask(LONG)


def test_an_abort_ends_the_chain():
    manager = Manager()

    async def run():
        asked = asyncio.ensure_future(manager.turn(LONG, rid="client"))
        while not manager.sent:
            await asyncio.sleep(0)
        manager.abort_request("client")
        assert (await asked)[0]["meta_info"]["finish_reason"]["message"] == "Abort before its answer began"

    asyncio.run(run())
    assert len(manager.sent) == 1


def test_an_abort_while_another_session_folds_sends_nothing():
    manager = Manager()

    async def run():
        folding = manager.router.episodes._folding
        await folding.acquire()
        asked = asyncio.ensure_future(manager.turn(LONG, rid="client"))
        while not folding._waiters:
            await asyncio.sleep(0)
        manager.abort_request("client")
        folding.release()
        assert (await asked)[0]["meta_info"]["finish_reason"]["message"] == "Abort before its answer began"

    asyncio.run(run())
    assert manager.sent == []


def test_an_abort_ends_a_chain_that_is_built_again():
    manager = Manager()

    async def run():
        await manager.turn(LONG)
        manager.cached.clear()
        before = len(manager.sent)
        asked = asyncio.ensure_future(manager.turn(LONG, rid="client"))
        while len(manager.sent) < before + 2:  # a refusal, then the first step again
            await asyncio.sleep(0)
        manager.abort_request("client")
        assert (await asked)[0]["meta_info"]["finish_reason"]["message"] == "Abort before its answer began"
        return len(manager.sent) - before

    assert asyncio.run(run()) == 2
    assert not manager.router.workers.preparing and not manager.router.workers.aborted


#: Other requests: a title, an older turn, and a long unrelated prompt.
SIDES = [[2000 + n for n in range(64)], LONG[: BUDGET + BLOCK], 2000 + np.arange(16 * P) % 90]


@pytest.mark.parametrize("side", SIDES, ids=len)
def test_a_request_between_two_turns_costs_no_episode(side):
    manager = Manager()

    async def run():
        await manager.turn(LONG)
        clusters = manager.session.latest.episodes.clusters
        await manager.turn(side)
        manager.sent.clear()
        await manager.turn(np.concatenate([LONG, [7, 8], 500 + np.arange(2 * P + 10) % 90]))
        assert manager.session.latest.episodes.clusters is clusters

    asyncio.run(run())
    assert len(manager.sent) == 2  # one more block, then the answer


def test_requests_of_one_session_at_once_are_served():
    manager = Manager()

    async def run():
        return await asyncio.gather(*(manager.turn(ids) for ids in (LONG, *SIDES, LONG[: 12 * P])))

    assert [out["text"] for (out,) in asyncio.run(run())] == ["x"] * 5


def test_another_conversation_has_other_episodes():
    """A conversation that begins within the budget gets its own episodes when its first answer makes it long."""
    manager = Manager()
    short = np.arange(2000, 2000 + BUDGET)

    async def run():
        await manager.turn(LONG[: 10 * P + 1])
        others = manager.session.latest.episodes.clusters
        manager.says = list(range(2400, 2400 + 3 * P))
        await manager.turn(short)
        manager.sent.clear()
        await manager.turn(long := np.concatenate([short, manager.says, np.arange(2600, 2600 + 5 * P)]))
        assert others is not None and manager.session.latest.episodes.clusters is not others
        return long

    long = asyncio.run(run())
    steps = manager.sent[:-1]
    assert steps and all(set(step.input_ids) <= set(long.tolist()) for step in steps)


def test_patched_prompts_stay_within_the_models_context():
    manager = Manager()
    manager.context_len = 10 * P + PROMPT_TOKENS
    manager.ask(LONG)
    assert manager.session.history == 10 * P


def test_one_fold_at_a_time():
    manager, running, most = Manager(), 0, 0
    original = Manager.generate_request

    async def counted(self, obj, request=None):
        nonlocal running, most
        running += FOLD in obj.sampling_params.get("custom_params", {})
        most = max(most, running)
        async for out in original(self, obj, request):
            yield out
        running -= FOLD in obj.sampling_params.get("custom_params", {})

    async def one(name):
        return await manager.heard(request_of(input_ids=LONG.tolist()), http(X_Session_Id=name), send=counted)

    async def run():
        return await asyncio.gather(one("a"), one("b"))

    assert len(asyncio.run(run())) == 2 and most == 1


def test_tenants_build_their_own():
    manager = Manager()

    async def run():
        for key in ("one", "two"):
            await manager.turn(LONG, http(X_Session_Id="a", Authorization=f"Bearer {key}"))

    asyncio.run(run())
    assert len(manager.cached) == 8
