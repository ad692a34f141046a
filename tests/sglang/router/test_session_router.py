"""Turns of a session: what is computed and read, and what follows an eviction or an abort."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi import HTTPException

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.embedding import Embedder
from sglang_kvq.sessions.messages import SELECTION, Selection
from sglang_kvq.sglang.router import router as session_router
from sglang_kvq.sglang.runtime import attach
from tests.sglang.router.session_model import BUDGET, CONFIG, EPISODIC, LONG, NAME, Manager, http, request_of


def test_without_a_session_a_request_is_sglangs():
    manager, obj = Manager(), request_of(input_ids=LONG.tolist())
    asyncio.run(manager.heard(obj, http()))
    assert manager.sent == [obj] and len(manager.router.store) == 0


@pytest.mark.parametrize("config", [None, replace(CONFIG, episodic=None)], ids=["plain", "no policy"])
def test_a_server_without_the_policy_has_no_sessions(config):
    args = SimpleNamespace()
    attach(config, args)
    manager = SimpleNamespace(server_args=args)
    found = session_router.around_generate_request(lambda *words: words, manager, request_of(), NAME)
    assert found[0] is manager and session_router.router_of(manager) is None


def test_the_policys_router_is_made_once(monkeypatch):
    manager, loaded = Manager(embedder_device="cuda:1"), []
    monkeypatch.setattr(
        session_router, "load_embedder", lambda *words: loaded.append(words) or Embedder(manager.words, words[1])
    )
    del manager._kvq_router
    router = session_router.router_of(manager)
    assert router is session_router.router_of(manager) and router.manager is manager
    assert loaded == [("folder", "cuda:1")]


def test_a_request_for_embeddings_is_sglangs():
    manager, obj = Manager(), SimpleNamespace(input_ids=LONG.tolist())  # SGLang's class for these has no sessions
    assert session_router.around_generate_request(lambda *words: words, manager, obj, NAME) == (manager, obj, NAME)


def test_a_prompt_within_the_budget_is_the_clients_own_object():
    manager, obj = Manager(), request_of(input_ids=LONG[:BUDGET].tolist())
    asyncio.run(manager.heard(obj))
    assert manager.sent == [obj] and obj.extra_key is None
    session = manager.session
    assert session.latest.tokens.tolist() == [*LONG[:BUDGET], 7, 8] and session.latest.exact == BUDGET
    assert len(session.latest.index) == BUDGET // P


def test_a_longer_prompt_is_computed_read_in_parts_and_computed_on():
    manager, obj = Manager(), request_of(input_ids=LONG.tolist(), rid="client")
    (out,) = asyncio.run(manager.heard(obj))
    history, answer, behind = manager.sent
    assert history.rid == answer.rid == "client" and behind.rid != "client"
    # The last 256 tokens serve as the question; the history ends at most a block before the prompt's end.
    folded = len(history.input_ids)
    assert LONG[:folded].tolist() == history.input_ids.tolist() and 0 < len(LONG) - folded <= EPISODIC.block
    assert history.extra_key is None and history.sampling_params["max_new_tokens"] == 1
    chosen = Selection.decode(answer.sampling_params["custom_params"][SELECTION])
    assert chosen.history.tolist() == history.input_ids.tolist() and answer.extra_key == chosen.name
    assert answer.input_ids == [*chosen.tokens, *LONG[folded:]] and len(answer.input_ids) <= BUDGET
    assert {0, folded // P - 1, folded // P - 2} <= set(chosen.pages.tolist())
    assert behind.input_ids.tolist() == [*LONG, 7, 8][: (len(LONG) + 2) // P * P]
    assert obj.input_ids == LONG.tolist() and obj.extra_key is None and SELECTION not in str(obj.sampling_params)
    assert out["meta_info"]["prompt_tokens"] == len(LONG) and out["meta_info"]["cached_tokens"] == 0
    session = manager.session
    assert session.latest.exact == len(behind.input_ids) and session.hot == len(answer.input_ids)


def test_the_next_turn_computes_its_tail_only():
    manager = Manager()
    asyncio.run(two_turns(manager, [450, 451, 452]))
    answer = manager.sent[-1]
    chosen = Selection.decode(answer.sampling_params["custom_params"][SELECTION])
    assert len(manager.sent) == 4  # history, answer, the new pages; then an answer that completes no page
    assert len(chosen.history) == (len(LONG) + 2) // P * P
    # Tokens 400 to 500 are in the segment of pages 6 and 7, and the question names them.
    assert {6, 7} <= set(chosen.pages.tolist())
    session = manager.session
    assert (session.matches[0].start, session.matches[0].end) == (384, 512)
    assert {match.start // P for match in session.matches} <= set(session.pages)


def test_a_history_is_read_in_the_namespace_of_its_request():
    manager = Manager()
    manager.ask(LONG, extra_key="mine")
    history, answer, behind = manager.sent
    chosen = Selection.decode(answer.sampling_params["custom_params"][SELECTION])
    assert history.extra_key == behind.extra_key == chosen.namespace == "mine"


async def two_turns(manager, question):
    await manager.turn(LONG)
    return await manager.turn([*LONG.tolist(), 7, 8, *question])


@pytest.mark.parametrize("first,read", [(P // 2, False), (P + 1, True)])
def test_the_system_prompt_is_always_read(first, read):
    """It ends at the first user message; later messages do not count."""
    manager, said = Manager(), LONG.copy()
    manager.router.marker = np.array([3901, 3902])
    for at in (first, 1500):
        said[at : at + 2] = manager.router.marker

    async def run():
        await manager.turn(said)
        await manager.turn([*said.tolist(), 7, 8, 450, 451])

    asyncio.run(run())
    assert (1 in manager.session.pages) == read and {0, 6, 7} <= set(manager.session.pages)


@pytest.mark.parametrize("tokens", [4000, 4094, 4095])
def test_an_answer_ends_where_the_models_context_does(tokens):
    manager = Manager()
    manager.ask(range(tokens), sampling_params={"max_new_tokens": 4096})
    (answer,) = [obj for obj in manager.sent if obj.extra_key]
    assert answer.sampling_params["max_new_tokens"] == max(0, manager.context_len - tokens - 2)


def test_an_evicted_history_is_computed_again_once():
    errors = iter([KVQuantError("64 of 64 tokens of the history are no longer cached")])

    def script(obj):
        return next(errors, None) if obj.extra_key else None

    manager = Manager(script)
    counted = manager.counted()
    (out,) = manager.ask(LONG)
    kinds = ["answer" if obj.extra_key else len(obj.input_ids) for obj in manager.sent]
    assert kinds == [kinds[0], "answer", kinds[0], "answer", (len(LONG) + 2) // P * P]
    assert out["output_ids"] == [7, 8] and manager.session.rebuilt == counted.rebuilds == 1
    assert counted.read == ["chosen"] and manager.session.selected == 1


def test_a_history_that_does_not_stay_is_read_whole(caplog):
    manager = Manager(lambda obj: KVQuantError("is no longer cached") if obj.extra_key else None)
    obj, counted = request_of(input_ids=LONG.tolist()), manager.counted()
    (out,) = asyncio.run(manager.heard(obj))
    assert manager.sent[-1] is obj and out["meta_info"]["prompt_tokens"] == len(LONG)
    assert "evicted as soon as it is computed" in caplog.text
    assert counted.read == ["whole"] and manager.session.selected == 0


def test_other_errors_are_the_clients():
    manager = Manager(lambda obj: ValueError("no such grammar") if obj.extra_key else None)
    with pytest.raises(ValueError, match="^no such grammar"):
        manager.ask(LONG)


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_computed():
    manager = Manager()
    with pytest.raises(ValueError, match="longer than the model's context length"):
        manager.ask([1] * 4096)
    assert manager.sent == []


def test_an_abort_while_the_history_is_computed_ends_the_request():
    manager = Manager(lambda obj: manager.abort_request("client"))
    counted = manager.counted()
    (out,) = manager.ask(LONG, rid="client")
    assert counted.state == (1, manager.session.nbytes) and counted.read == []
    assert out["meta_info"]["finish_reason"]["type"] == "abort" and out["meta_info"]["id"] == "client"
    assert len(manager.sent) == 1 and not manager.router.workers.preparing and not manager.router.workers.aborted


def test_a_client_that_leaves_aborts_what_runs_for_it():
    async def leave(manager):
        manager.pause = 60
        job = asyncio.ensure_future(manager.turn(LONG, rid="client"))
        while "client" not in manager.rid_to_state:
            await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    manager = Manager()
    asyncio.run(leave(manager))
    assert manager.aborted == ["client"]
    session = manager.session
    assert not session.planning.locked() and not session.computing.locked()


@pytest.mark.parametrize("ours", [True, False])
def test_only_the_routers_own_request_is_aborted(ours):
    """Another request may have the same id."""

    async def answers(obj, request):
        yield {"meta_info": {"finish_reason": None}}

    async def run(manager):
        inner = SimpleNamespace(rid="client")
        manager.rid_to_state["client"] = SimpleNamespace(obj=inner if ours else obj)
        outputs = manager.router.workers.sent(SimpleNamespace(send=answers, request=None), inner)
        await anext(outputs)
        await outputs.aclose()

    manager, obj = Manager(), request_of(rid="client")
    asyncio.run(run(manager))
    assert manager.aborted == (["client"] if ours else [])


def test_a_request_in_the_background_outlives_its_client():
    """SGLang aborts the requests of a client that left, unless they are marked as background."""

    async def left(self, obj, request=None):
        if not obj.background:
            raise ValueError("Request is disconnected from the client side (type 1).")
        async for out in Manager.generate_request(self, obj, request):
            yield out

    async def run(manager):
        obj = request_of(input_ids=LONG.tolist(), background=True)
        return await manager.heard(obj, send=left)

    manager = Manager()
    (out,) = asyncio.run(run(manager))
    assert out["output_ids"] == [7, 8] and len(manager.sent) >= 2


def test_an_abort_while_the_prompt_becomes_tokens_ends_the_request():
    manager = Manager()

    async def tokenize(texts):
        manager.abort_request("client")
        return LONG[:100].tolist(), None

    manager._tokenize_texts = tokenize
    said = asyncio.run(manager.heard(request_of(text="x", input_ids=None, rid="client")))[-1]
    assert said["meta_info"]["finish_reason"]["message"] == "Abort before its answer began"
    assert manager.sent == []


def test_an_abort_while_another_turn_is_planned_computes_nothing():
    async def run(manager):
        session = manager.router.store.use("", "a")
        await session.planning.acquire()
        turn = asyncio.ensure_future(manager.turn(LONG, rid="client"))
        while not session.planning._waiters:
            await asyncio.sleep(0)
        manager.abort_request("client")
        session.planning.release()
        assert (await turn)[-1]["meta_info"]["finish_reason"]["message"] == "Abort before its answer began"

    manager = Manager()
    asyncio.run(run(manager))
    assert manager.sent == []


def test_two_requests_of_one_id_are_not_prepared_at_once():
    """An abort would mean both of them, and only one would notice it."""
    manager = Manager()

    async def run():
        return await asyncio.gather(*(manager.turn(LONG, rid="client") for _ in range(2)), return_exceptions=True)

    (out,), error = asyncio.run(run())
    assert out["output_ids"] == [7, 8]
    assert isinstance(error, KVQuantError) and "request client: another request has this id" in str(error)


@pytest.mark.parametrize("stream", [False, True])
def test_an_embedder_that_fails_is_the_servers_problem(stream):
    def fails(sentences, **options):
        raise RuntimeError("CUDA out of memory.\nMore lines")

    manager = Manager()
    manager.words.encode = fails
    message = "sglang-kvq: the embedder failed: CUDA out of memory. Send the request again"
    if stream:
        reason = manager.ask(LONG, stream=True)[-1]["meta_info"]["finish_reason"]
        assert reason["status_code"] == 503 and reason["message"].startswith(message)
        return
    with pytest.raises(HTTPException, match=message):
        manager.ask(LONG)


def test_a_prompt_that_is_read_whole_counts_what_it_computed():
    """SGLang finds the history in its cache, but this request had it computed."""

    async def cached(self, obj, request=None):
        async for out in Manager.generate_request(self, obj, request):
            if obj is asked:
                out["meta_info"]["cached_tokens"] = len(self.sent[0].input_ids)
            yield out

    manager = Manager(lambda obj: KVQuantError("is too small for it") if obj.extra_key else None)
    asked = request_of(input_ids=LONG.tolist())
    (out,) = asyncio.run(manager.heard(asked, send=cached))
    assert out["meta_info"]["prompt_tokens"] == len(LONG) and out["meta_info"]["cached_tokens"] == 0


def test_an_abort_while_an_evicted_history_waits_to_be_computed_again_ends_the_request():
    """While the request waits for another one of its session, SGLang knows nothing of it and notes no abort."""

    async def run(manager):
        def script(obj):
            if obj.extra_key is None:
                return None
            with contextlib.suppress(StopIteration):
                session.computing.acquire().send(None)  # takes the lock immediately
            asyncio.get_running_loop().call_later(0.05, manager.abort_request, "client")
            asyncio.get_running_loop().call_later(0.1, session.computing.release)
            return KVQuantError("is no longer cached")

        session = manager.router.store.use("", "a")
        manager.script = script
        said = (await manager.turn(LONG, rid="client"))[-1]
        assert said["meta_info"]["finish_reason"]["message"] == "Abort before its answer began"

    manager = Manager()
    asyncio.run(run(manager))
    assert not manager.router.workers.preparing and not manager.router.workers.aborted
