"""Requests of sessions as SGLang's own objects, the routes behind SGLang's API keys, and what is refused at start."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.episodic.config import EpisodicConfig
from sglang_kvq.episodic.embed import Embedder
from sglang_kvq.episodic.lexical import Lexical
from sglang_kvq.episodic.plan import Plan
from sglang_kvq.episodic.selection import PARAMETER, Selection
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import episodic_checks, flags, session_routes, sessions
from sglang_kvq.sglang import session_requests as requests
from sglang_kvq.sglang.runtime import attach
from tests.sglang.test_checks import GPT_OSS, HYBRID

BUDGET = 10 * P
EPISODIC = EpisodicConfig("late", BUDGET, 2 * P, "folder", 2 * P, sessions=3, idle_seconds=0)
CONFIG = KVQuantConfig("int4", recent_tokens=2 * P, episodic=EPISODIC)


def request_of(**fields):
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(**{"input_ids": list(range(9)), **fields})


def http(**headers):
    async def is_disconnected() -> bool:
        return False

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return SimpleNamespace(headers=named, is_disconnected=is_disconnected)


class Words:
    """Embeds a text of numbers by which hundreds they are of; remembers the texts of whole pages."""

    def __init__(self):
        self.pages = []

    def encode(self, sentences, **options):
        self.pages += [text for text in sentences if len(text.split()) == P]
        rows = np.zeros((len(sentences), 40), np.float32)
        for row, text in zip(rows, sentences):
            row[39] = 1e-3
            for word in text.split():
                row[int(word) // 100 % 39 if word.isdigit() else 39] += 1
        return rows


class Manager:
    """What the router uses of a TokenizerManager: answers by ``script``, and remembers what it was sent."""

    context_len, incremental_streaming_output, preferred_sampling_params = 4096, False, None
    #: Seconds until a request is answered.
    pause = 0.0

    def __init__(self, script=None, **episodic):
        self.server_args = SimpleNamespace()
        config = replace(CONFIG, episodic=replace(EPISODIC, **episodic))
        attach(config, self.server_args)
        self.tokenizer = SimpleNamespace(decode=lambda ids, **options: " ".join(map(str, ids)))
        self.script, self.sent, self.aborted, self.rid_to_state = script, [], [], {}
        self.words = Words()
        self._kvq_router = sessions.Router(self, config, config.episodic, Embedder(self.words))

    @property
    def router(self) -> sessions.Router:
        return self._kvq_router

    def _validate_one_request(self, obj, ids):
        if len(ids) >= self.context_len:
            raise ValueError("longer than the model's context length")

    def abort_request(self, rid="", abort_all=False):
        sessions.before_abort(self, rid, abort_all)
        self.aborted.append(rid)

    async def generate_request(self, obj, request=None):
        self.sent.append(obj)
        obj.normalize_batch_and_arguments()
        self.rid_to_state[obj.rid] = SimpleNamespace(obj=obj)
        await asyncio.sleep(self.pause)
        if self.script is not None and (error := self.script(obj)) is not None:
            raise error
        custom = obj.sampling_params.get("custom_params", {})
        out = {
            "text": "x",
            "output_ids": [7, 8],
            "meta_info": {
                "id": obj.rid,
                "prompt_tokens": len(obj.input_ids or ()),
                "cached_tokens": len(Selection.decode(custom[PARAMETER]).pages) * P if custom else 0,
                "finish_reason": {"type": "length"},
            },
        }
        del self.rid_to_state[obj.rid]
        yield out

    async def ask(self, obj, request=None):
        """All chunks, once what goes on in the background has ended."""
        ask = sessions.around_generate_request(Manager.generate_request, self, obj, request)
        found = [out async for out in ask]
        while self.router.background:
            await asyncio.sleep(0.01)
        return found


LONG = np.arange(1, 2001, dtype=np.int32)
NAME = http(X_Session_Id="a")


# -- the router ---------------------------------------------------------------------------------------------


def test_without_a_session_a_request_is_sglangs():
    manager, obj = Manager(), request_of(input_ids=LONG.tolist())
    asyncio.run(manager.ask(obj, http()))
    assert manager.sent == [obj] and len(manager.router.store) == 0


def test_a_prompt_within_the_budget_is_the_clients_own_object():
    manager, obj = Manager(), request_of(input_ids=LONG[:BUDGET].tolist())
    asyncio.run(manager.ask(obj, NAME))
    assert manager.sent == [obj] and obj.extra_key is None
    session = manager.router.store.get("", "a")
    assert session.latest.tokens.tolist() == [*LONG[:BUDGET], 7, 8] and session.latest.exact == BUDGET
    assert len(session.latest.index) == BUDGET // P


def test_a_longer_prompt_is_computed_read_in_parts_and_computed_on():
    manager, obj = Manager(), request_of(input_ids=LONG.tolist(), rid="client")
    (out,) = asyncio.run(manager.ask(obj, NAME))
    history, answer, behind = manager.sent
    assert history.rid == answer.rid == "client" and behind.rid != "client"
    # The last 256 tokens stand for the question; what is before them is history up to the block.
    folded = len(history.input_ids)
    assert LONG[:folded].tolist() == history.input_ids and 0 < len(LONG) - folded <= EPISODIC.block
    assert history.extra_key is None and history.sampling_params["max_new_tokens"] == 1
    chosen = Selection.decode(answer.sampling_params["custom_params"][PARAMETER])
    assert chosen.history.tolist() == history.input_ids and answer.extra_key == chosen.name
    assert answer.input_ids == [*chosen.tokens, *LONG[folded:]] and len(answer.input_ids) <= BUDGET
    assert {0, folded // P - 1, folded // P - 2} <= set(chosen.pages.tolist())
    assert behind.input_ids == [*LONG, 7, 8][: (len(LONG) + 2) // P * P]
    assert obj.input_ids == LONG.tolist() and obj.extra_key is None and PARAMETER not in str(obj.sampling_params)
    assert out["meta_info"]["prompt_tokens"] == len(LONG) and out["meta_info"]["cached_tokens"] == 0
    session = manager.router.store.get("", "a")
    assert session.latest.exact == len(behind.input_ids) and session.hot == len(answer.input_ids)


def test_the_next_turn_computes_its_tail_only():
    manager = Manager()
    asyncio.run(two_turns(manager, [450, 451, 452]))
    answer = manager.sent[-1]
    chosen = Selection.decode(answer.sampling_params["custom_params"][PARAMETER])
    assert len(manager.sent) == 4  # history, answer, what comes after; answer, after which no page is new
    assert len(chosen.history) == (len(LONG) + 2) // P * P
    # Tokens 400 to 500 are in the segment of pages 6 and 7; the question names them.
    assert {6, 7} <= set(chosen.pages.tolist())
    session = manager.router.store.get("", "a")
    assert (session.matches[0].start, session.matches[0].end) == (384, 512)


async def two_turns(manager, question):
    await manager.ask(request_of(input_ids=LONG.tolist()), NAME)
    return await manager.ask(request_of(input_ids=[*LONG.tolist(), 7, 8, *question]), NAME)


def test_an_evicted_history_is_computed_again_once():
    errors = iter([KVQuantError("64 of 64 tokens of the history are no longer cached")])

    def script(obj):
        return next(errors, None) if obj.extra_key else None

    manager = Manager(script)
    (out,) = asyncio.run(manager.ask(request_of(input_ids=LONG.tolist()), NAME))
    kinds = ["answer" if obj.extra_key else len(obj.input_ids) for obj in manager.sent]
    assert kinds == [kinds[0], "answer", kinds[0], "answer", (len(LONG) + 2) // P * P]
    assert out["output_ids"] == [7, 8] and manager.router.store.get("", "a").rebuilt == 1


def test_a_history_that_does_not_stay_is_read_whole(caplog):
    manager = Manager(lambda obj: KVQuantError("is no longer cached") if obj.extra_key else None)
    obj = request_of(input_ids=LONG.tolist())
    (out,) = asyncio.run(manager.ask(obj, NAME))
    assert manager.sent[-1] is obj and out["meta_info"]["prompt_tokens"] == len(LONG)
    assert "evicted as soon as it is computed" in caplog.text


def test_other_errors_are_the_clients():
    manager = Manager(lambda obj: ValueError("no such grammar") if obj.extra_key else None)
    with pytest.raises(ValueError, match="no such grammar"):
        asyncio.run(manager.ask(request_of(input_ids=LONG.tolist()), NAME))


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_computed():
    manager = Manager()
    with pytest.raises(ValueError, match="longer than the model's context length"):
        asyncio.run(manager.ask(request_of(input_ids=[1] * 4096), NAME))
    assert manager.sent == []


def test_an_abort_while_the_history_is_computed_ends_the_request():
    manager = Manager(lambda obj: manager.abort_request("client"))
    (out,) = asyncio.run(manager.ask(request_of(input_ids=LONG.tolist(), rid="client"), NAME))
    assert out["meta_info"]["finish_reason"]["type"] == "abort" and out["meta_info"]["id"] == "client"
    assert len(manager.sent) == 1 and not manager.router.preparing and not manager.router.aborted


def test_a_client_that_leaves_aborts_what_runs_for_it():
    async def leave(manager):
        manager.pause = 60
        ask = sessions.around_generate_request(
            Manager.generate_request, manager, request_of(input_ids=LONG.tolist(), rid="client"), NAME
        )
        job = asyncio.ensure_future(ask.__anext__())
        while "client" not in manager.rid_to_state:
            await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    manager = Manager()
    asyncio.run(leave(manager))
    assert manager.aborted == ["client"]
    session = manager.router.store.get("", "a")
    assert not session.planning.locked() and not session.computing.locked()


def test_two_requests_of_one_session_compute_its_history_once():
    async def both(manager):
        requests_ = [request_of(input_ids=[*LONG.tolist(), *more]) for more in ([450], [1250])]
        return await asyncio.gather(*(manager.ask(obj, NAME) for obj in requests_))

    manager = Manager()
    first, second = asyncio.run(both(manager))
    assert first[0]["output_ids"] == second[0]["output_ids"] == [7, 8]
    # Up to the block of the first; what it said, by either of them.
    assert [len(obj.input_ids) for obj in manager.sent if obj.extra_key is None] == [30 * P, 31 * P]
    assert len([obj for obj in manager.sent if obj.extra_key]) == 2


def test_tenants_read_copies_of_their_own():
    manager = Manager()

    async def both():
        for key in ("Bearer one", "Bearer two"):
            await manager.ask(request_of(input_ids=LONG.tolist()), http(X_Session_Id="a", Authorization=key))

    asyncio.run(both())
    assert len({obj.extra_key for obj in manager.sent if obj.extra_key}) == 2
    assert len(manager.router.store) == 2 and "one" not in str(manager.router.store.of(requests.tenant_of(None)))


async def beside(manager, side):
    """A turn, and requests of the same session that end while the turn's question is embedded."""
    question, waiting = manager.router.thread.question, Future()
    manager.router.thread.question = lambda text: waiting
    turn = asyncio.ensure_future(manager.ask(request_of(input_ids=LONG.tolist(), rid="turn"), NAME))
    while len(manager.sent) < 1 or not manager.router.store.get("", "a").planning.locked():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not turn.done()
    served = []
    for number, ids in enumerate(side):
        asked = request_of(input_ids=ids, rid=f"side {number}")
        served += [
            out async for out in sessions.around_generate_request(Manager.generate_request, manager, asked, NAME)
        ]
    manager.router.thread.question = question
    waiting.set_result(question("450 451").result())
    return await turn, served


TITLE = [5000 + n for n in range(100)]


@pytest.mark.parametrize(
    "side",
    [[TITLE], [LONG[:BUDGET].tolist()], [TITLE, [*LONG[:300].tolist(), *TITLE], *[[9000 + n] * 70 for n in range(9)]]],
    ids=["title", "older turn", "many"],
)
def test_a_turn_is_served_beside_other_requests_of_its_session(side):
    """Those that do not go on with the conversation: none fails, and nothing of it is embedded or computed again."""
    manager = Manager()
    (out,), served = asyncio.run(beside(manager, side))
    assert out["output_ids"] == [7, 8] and len(served) == len(side)
    session = manager.router.store.get("", "a")
    assert len(session.index_of(LONG)) == len(LONG) // P and session.exact_of(LONG, (None, None)) == len(LONG) // P * P


@pytest.mark.parametrize("side", [TITLE, LONG[:BUDGET].tolist(), [*LONG[:500].tolist(), *TITLE]], ids=len)
def test_a_request_between_two_turns_costs_the_conversation_nothing(side):
    manager = Manager()

    async def run():
        await manager.ask(request_of(input_ids=LONG.tolist()), NAME)
        await manager.ask(request_of(input_ids=side), NAME)
        manager.sent.clear()
        manager.words.pages.clear()
        await manager.ask(request_of(input_ids=[*LONG.tolist(), 7, 8, 450, 451]), NAME)

    asyncio.run(run())
    assert len(manager.sent) == 1 and manager.words.pages == []


def test_an_older_turn_that_is_answered_again_becomes_the_conversation():
    """With all that is known of what both have in common; and the first answer can still be gone on with."""
    manager, older = Manager(), LONG[:1500].tolist()

    async def run():
        await manager.ask(request_of(input_ids=LONG.tolist()), NAME)
        await manager.ask(request_of(input_ids=older), NAME)
        manager.words.pages.clear()
        await manager.ask(request_of(input_ids=[*older, 7, 8, *range(3000, 3100)]), NAME)
        await manager.ask(request_of(input_ids=[*LONG.tolist(), 7, 8, *range(4000, 4100)]), NAME)

    asyncio.run(run())
    # On either way what is new: two pages of the one, one page of the other.
    assert [text.split()[0] for text in manager.words.pages] == ["1473", "3034", "1985"]
    history = Selection.decode(manager.sent[-2].sampling_params["custom_params"][PARAMETER]).history
    assert len(history) > 1900 and history.tolist() == [*LONG.tolist(), 7, 8, 4000][: len(history)]


def test_a_request_in_the_background_outlives_its_client():
    """SGLang aborts what runs for a client that left, unless the request says that it may."""

    async def left(self, obj, request=None):
        if not obj.background:
            raise ValueError("Request is disconnected from the client side (type 1).")
        async for out in Manager.generate_request(self, obj, request):
            yield out

    async def run(manager):
        obj = request_of(input_ids=LONG.tolist(), background=True)
        return [out async for out in sessions.around_generate_request(left, manager, obj, NAME)]

    manager = Manager()
    (out,) = asyncio.run(run(manager))
    assert out["output_ids"] == [7, 8] and len(manager.sent) >= 2


def test_an_abort_while_the_prompt_becomes_tokens_ends_the_request():
    manager = Manager()

    async def tokenize(texts):
        manager.abort_request("client")
        return [LONG[:100].tolist()]

    manager._tokenize_texts = tokenize
    said = asyncio.run(manager.ask(request_of(text="x", input_ids=None, rid="client"), NAME))[-1]
    assert said["meta_info"]["finish_reason"]["message"] == "Abort before its answer began"
    assert manager.sent == []


def test_an_abort_while_an_evicted_history_waits_to_be_computed_again_ends_the_request():
    """Another request of the session computes; nothing is sent under this one's id, so SGLang notes no abort."""

    async def run(manager):
        def script(obj):
            if obj.extra_key is None:
                return None
            with contextlib.suppress(StopIteration):
                session.computing.acquire().send(None)  # at once
            asyncio.get_running_loop().call_later(0.05, manager.abort_request, "client")
            asyncio.get_running_loop().call_later(0.1, session.computing.release)
            return KVQuantError("is no longer cached")

        session = manager.router.store.use("", "a")
        manager.script = script
        said = (await manager.ask(request_of(input_ids=LONG.tolist(), rid="client"), NAME))[-1]
        assert said["meta_info"]["finish_reason"]["message"] == "Abort before its answer began"

    manager = Manager()
    asyncio.run(run(manager))
    assert not manager.router.preparing and not manager.router.aborted


def test_tokens_that_are_none_are_refused():
    with pytest.raises(KVQuantError, match=f"input_ids {1 << 40}: not a token"):
        asyncio.run(Manager().ask(request_of(input_ids=[1, 1 << 40]), NAME))


def test_a_tenant_that_asks_much_forgets_nobody_elses_session():
    """Not the one that is answered, nor one that waits for its next turn."""

    async def run(manager):
        await manager.ask(request_of(input_ids=LONG.tolist()), http(X_Session_Id="a", Authorization="alice"))
        for number in range(20):
            key = http(X_Session_Id=str(number), Authorization="mallory")
            await manager.ask(request_of(input_ids=LONG[:P].tolist()), key)

    manager = Manager()
    asyncio.run(run(manager))
    store = manager.router.store
    assert len(store.of(requests.tenant_of(http(Authorization="alice")))) == 1
    assert len(store.of(requests.tenant_of(http(Authorization="mallory")))) == 2


def test_states_memory_is_bounded_while_it_grows():
    manager = Manager(state_memory=1, sessions=1000)
    manager.context_len = 1 << 20

    async def run():
        for number in range(6):
            said = (np.arange(20_000, dtype=np.int32) * 7919 % 50_000 + number).tolist()
            await manager.ask(request_of(input_ids=said), http(X_Session_Id=str(number)))
            assert 0 < manager.router.store.bytes <= 1 << 20

    asyncio.run(run())
    kept = manager.router.store.of("")
    assert 1 <= len(kept) < 6 and kept[0].id == "5"
    assert manager.router.store.bytes == sum(session.nbytes for session in kept)


# -- tenants ------------------------------------------------------------------------------------------------


def test_a_gateways_header_tells_tenants_apart():
    """With one API key, as a gateway has it; and equal values of two keys are two tenants."""
    manager = Manager(tenant_header="X-Tenant")
    keys = {"k": {"Authorization": "Bearer k"}, "other": {"Authorization": "Bearer other"}, "none": {}}
    several = [http(X_Session_Id="a", X_Tenant=name, **keys[key]) for key in keys for name in ("one", "two")]

    async def run():
        for request in several:
            await manager.ask(request_of(input_ids=LONG[:P].tolist()), request)

    manager.router.store.most = 9
    asyncio.run(run())
    tenants = {requests.tenant_of(request, "X-Tenant") for request in several}
    assert len(tenants) == len(manager.router.store) == 6
    assert "one" not in requests.tenant_of(http(X_Tenant="one"), "X-Tenant")


@pytest.mark.parametrize("request_", [None, http(X_Session_Id="a"), http(X_Tenant="")], ids=["grpc", "none", "empty"])
def test_a_request_without_the_gateways_header_is_refused(request_):
    manager = Manager(tenant_header="X-Tenant")
    with pytest.raises(KVQuantError, match="--episodic-tenant-header X-Tenant: this request has no such header"):
        asyncio.run(manager.ask(request_of(session_id="a"), request_))
    assert manager.sent == [] and len(manager.router.store) == 0
    asyncio.run(manager.ask(request_of(), http()))  # of no session: SGLang's own
    assert len(manager.sent) == 1


# -- the event loop -----------------------------------------------------------------------------------------


async def gaps_while(job, beat=0.001):
    """Seconds that the event loop was late, the longest first, while ``job`` ran."""
    asked, gaps, last = asyncio.ensure_future(job), [], time.perf_counter()
    while not asked.done():
        await asyncio.sleep(beat)
        now = time.perf_counter()
        gaps.append(now - last - beat)
        last = now
    await asked
    return sorted(gaps, reverse=True)


@pytest.mark.parametrize("slow", ["HashingVectorizer.transform", "Lexical.scores"])
def test_other_sessions_go_on_while_one_is_searched_and_indexed(monkeypatch, slow):
    from sklearn.feature_extraction.text import HashingVectorizer

    owner, name = {"HashingVectorizer": HashingVectorizer, "Lexical": Lexical}[slow.split(".")[0]], slow.split(".")[1]
    original, called = getattr(owner, name), []

    def slowly(*args, **options):
        called.append(name)
        time.sleep(0.3)
        return original(*args, **options)

    async def run(manager):
        await manager.ask(request_of(input_ids=LONG[: BUDGET + 2 * P].tolist()), NAME)
        monkeypatch.setattr(owner, name, slowly)
        return await gaps_while(manager.ask(request_of(input_ids=LONG[: BUDGET + 5 * P].tolist()), NAME))

    assert asyncio.run(run(Manager()))[0] < 0.2 and called


def test_a_long_conversation_stops_nobody():
    """300,000 tokens, embedded, indexed and searched: 0.5 s of work, of which the loop feels 25 ms at most."""
    manager = Manager()
    manager.context_len = 1 << 20
    said = (np.arange(300_000, dtype=np.int32) * 7919 % 50_000).tolist()

    async def run():
        await manager.ask(request_of(input_ids=LONG.tolist()), http(X_Session_Id="warm"))
        first = request_of(input_ids=said)
        await gaps_while(manager.ask(first, NAME))
        after = request_of(input_ids=[*said, 7, 8, *said[1000:1200]])
        return await gaps_while(manager.ask(after, NAME))

    assert asyncio.run(run())[0] < 0.1


# -- requests -----------------------------------------------------------------------------------------------


def made(obj, plan=None, room=1000):
    plan = plan or Plan(20 * P, 18 * P, False, 3)
    obj.normalize_batch_and_arguments()
    selection = Selection(LONG[: plan.history], None, [0, 5, 17])
    return requests.answer_request(obj, LONG[: plan.tokens], plan, selection, {}, room)


@pytest.mark.parametrize(
    "given,expected",
    [({}, 128), ({"max_new_tokens": 5}, 5), ({"max_new_tokens": 5000}, 1000), ({"max_new_tokens": None}, 1000)],
)
def test_answers_end_where_the_models_context_does(given, expected):
    inner = made(request_of(sampling_params={**given, "min_new_tokens": 3000, "custom_params": {"mine": 1}}))
    assert inner.sampling_params["max_new_tokens"] == expected
    assert inner.sampling_params["min_new_tokens"] == min(3000, expected)
    assert set(inner.sampling_params["custom_params"]) == {"mine", PARAMETER}


def test_positions_of_log_probabilities():
    assert made(request_of(return_logprob=True)).logprob_start_len == -1
    assert made(request_of(logprob_start_len=3)).logprob_start_len == -1  # nothing was asked for
    assert made(request_of(return_logprob=True, logprob_start_len=18 * P)).logprob_start_len == 3 * P
    assert made(request_of(return_logprob=True, logprob_start_len=19 * P)).logprob_start_len == 4 * P
    for start in (0, 18 * P - 1, 20 * P):
        with pytest.raises(KVQuantError, match=f"logprob_start_len {start}: .* possible are 1152 to 1279, and -1"):
            made(request_of(return_logprob=True, logprob_start_len=start))


def test_usage_counts_the_clients_prompt():
    obj = request_of(return_prompt_token_ids=True)
    meta = {"prompt_tokens": 300, "cached_tokens": 192, "cached_tokens_details": {"device": 192, "host": 0}}
    out = requests.answer_output({"meta_info": meta}, obj, LONG, computed=100)
    assert out["meta_info"]["prompt_tokens"] == len(LONG)
    assert out["meta_info"]["cached_tokens"] == len(LONG) - 100 - 108
    assert out["meta_info"]["cached_tokens_details"] == {"device": len(LONG) - 208, "host": 0}
    assert out["prompt_token_ids"] == LONG.tolist()


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"sampling_params": {"custom_params": {PARAMETER: "x"}}}, "no client may choose what is read"),
        ({"sampling_params": [{}, {"custom_params": {PARAMETER: None}}]}, "no client may choose what is read"),
        ({"extra_key": "kvq-late-1"}, "extra_key kvq-late-1"),
        ({"extra_key": ["x", "kvq-late-1"]}, "extra_key kvq-late-1"),
    ],
    ids=str,
)
def test_what_only_the_router_may_say_is_refused_from_everybody(fields, message):
    manager = Manager()
    with pytest.raises(KVQuantError, match=message):
        asyncio.run(manager.ask(request_of(**fields), None))
    assert manager.sent == []


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"text": ["a", "b"], "input_ids": None}, "several prompts"),
        ({"input_ids": [[1], [2]]}, "several prompts"),
        ({"sampling_params": {"n": 2}}, "n 2: a session goes on with one answer"),
        ({"sampling_params": {"beam_width": 4}}, "beam_width 4"),
        ({"session_params": {"id": "x"}}, "session_params in a request of a session"),
        ({"input_embeds": [[0.0]], "input_ids": None}, "input_embeds in a request of a session"),
        ({"image_data": "x"}, "image_data in"),
        ({"video_data": ["x"]}, "video_data in"),
        ({"audio_data": "x"}, "audio_data in"),
        ({"lora_path": "x"}, "lora_path in"),
        ({"return_hidden_states": True}, "return_hidden_states in"),
        ({"return_routed_experts": True}, "return_routed_experts in"),
        ({"session_id": "b"}, "session_id 'b' and X-Session-Id 'a': give one of them"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_session_has_no_place_for_is_refused(fields, message):
    manager = Manager()
    with pytest.raises(KVQuantError, match=message):
        asyncio.run(manager.ask(request_of(**fields), NAME))
    assert manager.sent == [] and len(manager.router.store) == 0


@pytest.mark.parametrize("name", ["", "x" * 257], ids=["empty", "long"])
def test_names_of_sessions(name):
    with pytest.raises(KVQuantError, match="a session id of .* characters"):
        asyncio.run(Manager().ask(request_of(session_id=name)))


# -- routes -------------------------------------------------------------------------------------------------


@pytest.fixture
def app():
    """The routes behind SGLang's middleware for API keys."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from sglang.srt.utils.auth import add_api_key_middleware

    manager, app = Manager(), FastAPI()
    app.include_router(session_routes.routes(manager, CONFIG, (10.0, 100.0)))
    add_api_key_middleware(app, api_key="secret", admin_api_key=None)
    asyncio.run(
        manager.ask(request_of(input_ids=LONG.tolist()), http(X_Session_Id="a/b", Authorization="Bearer secret"))
    )
    return TestClient(app)


def test_routes_ask_for_the_api_key(app):
    for method, path in (("GET", ""), ("GET", "/a/b"), ("DELETE", "/a/b")):
        assert app.request(method, f"/v1/sessions{path}").status_code == 401
        wrong = app.request(method, f"/v1/sessions{path}", headers={"Authorization": "Bearer other"})
        assert wrong.status_code == 401


def test_routes_list_describe_and_forget(app):
    app.headers["Authorization"] = "Bearer secret"
    (listed,) = app.get("/v1/sessions").json()["data"]
    one = app.get("/v1/sessions/a/b").json()
    assert one == listed and one["history_tokens"] == len(LONG) + 2 and one["computed_tokens"] == 31 * P
    tail = len(LONG) - one["read"]["of_tokens"]
    assert one["hot_tokens"] == len(one["read"]["pages"]) * P + tail <= BUDGET
    window = CONFIG.slots_per_request * P
    assert one["hot_bytes"] == 10 * one["hot_tokens"] + 100 * window
    assert one["total_bytes"] == one["hot_bytes"] + 10 * 31 * P
    assert {"start", "end", "score"} == set(one["matches"][0])
    assert app.delete("/v1/sessions/a/b").json() == {"id": "a/b", "object": "session.deleted", "deleted": True}
    assert app.get("/v1/sessions/a/b").status_code == app.delete("/v1/sessions/a/b").status_code == 404
    assert app.get("/v1/sessions").json()["data"] == []


def test_routes_show_each_tenant_its_own():
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    manager, app = Manager(tenant_header="X-Tenant"), FastAPI()
    app.include_router(session_routes.routes(manager, CONFIG, (10.0, 100.0)))
    client = TestClient(app)
    asyncio.run(manager.ask(request_of(input_ids=LONG[:P].tolist()), http(X_Session_Id="a", X_Tenant="one")))
    one, two = {"X-Tenant": "one"}, {"X-Tenant": "two"}
    assert [found["id"] for found in client.get("/v1/sessions", headers=one).json()["data"]] == ["a"]
    assert client.get("/v1/sessions", headers=two).json()["data"] == []
    assert client.get("/v1/sessions/a", headers=one).json()["state_bytes"] > 4 * P
    for method in ("GET", "DELETE"):
        assert client.request(method, "/v1/sessions/a", headers=two).status_code == 404
        assert client.request(method, "/v1/sessions/a").status_code == 400
    refused = client.get("/v1/sessions")
    assert refused.status_code == 400 and "X-Tenant: this request has no such header" in refused.json()["message"]
    assert client.delete("/v1/sessions/a", headers=one).json()["deleted"]


# -- start --------------------------------------------------------------------------------------------------


ON = ("--kv-quant", "int4", "--episodic-policy", "late", "--episodic-embedder", "folder")


def parsed(*argv):
    import argparse

    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return flags.parse_config(vars(parser.parse_args(argv)))


def test_flags_reach_the_config():
    more = "--episodic-budget 4096 --episodic-block 512 --episodic-segment 256 --episodic-sessions 7 --episodic-idle 60"
    more += " --episodic-embedder-device cuda:1 --episodic-state-memory 99 --episodic-tenant-share 0.5"
    more += " --episodic-tenant-header X-Tenant"
    expected = EpisodicConfig(
        *("late", 4096, 512, "folder", 256, 7, 60.0),
        embedder_device="cuda:1",
        state_memory=99,
        tenant_share=0.5,
        tenant_header="X-Tenant",
    )
    assert parsed(*ON, *more.split()).episodic == expected
    assert parsed(*ON).episodic == EpisodicConfig("late", embedder="folder")
    assert parsed("--kv-quant", "int4", "--episodic-policy", "off").episodic is None


@pytest.mark.parametrize(
    "argv,message",
    [
        (ON[2:], "--episodic-policy late chooses pages of the quantized cache; add --kv-quant"),
        (("--kv-quant", "int4", "--episodic-budget", "4096"), "--episodic-budget has no effect without"),
        ((*ON, "--episodic-budget", "1024"), "--episodic-budget 1024: sinks and recent tokens"),
    ],
    ids=["no method", "no policy", "budget"],
)
def test_flags_that_cannot_be_served(argv, message):
    with pytest.raises(KVQuantError, match=message):
        parsed(*argv)


def test_a_device_that_is_not_here(monkeypatch):
    def refuses(*_, device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr("torch.empty", refuses)
    with pytest.raises(KVQuantError, match=r"--episodic-embedder-device cuda:3: Torch not .* give cpu"):
        sessions.load_embedder("folder", "cuda:3")


def test_a_device_without_such_a_name():
    with pytest.raises(KVQuantError, match=r"--episodic-embedder-device gpu: .* give cpu"):
        sessions.load_embedder("folder", "gpu")


@pytest.fixture
def loaded(monkeypatch):
    """The embedder's folders that were loaded."""
    found = []
    monkeypatch.setattr(sessions, "load_embedder", lambda folder, device: found.append(folder))
    return found


NGRAM = ("--speculative-algorithm", "NGRAM")
SMALL = ("--episodic-budget", "1024", "--episodic-block", "256")


def check(server_args):
    from sglang_kvq.sglang import checks
    from sglang_kvq.sglang.runtime import config_of

    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    checks.check_resolved(server_args, config_of(server_args))


def test_the_embedder_is_loaded_at_start(command_line, loaded):
    check(command_line(*ON, *SMALL))
    assert loaded == ["folder"]


@pytest.mark.parametrize(
    "argv,message",
    [
        (("--tokenizer-worker-num", "2"), "--tokenizer-worker-num 2: sessions are known to one process"),
        (("--dp-size", "2"), "--dp-size 2: a session's history would be in another worker's cache"),
        (("--disable-radix-cache",), "--disable-radix-cache True: histories are kept in the prefix cache"),
        (("--skip-tokenizer-init",), "--skip-tokenizer-init True: questions and histories are compared as text"),
        (
            (*NGRAM, "--speculative-ngram-max-bfs-breadth", "1"),
            "--speculative-algorithm NGRAM: drafts stand at positions of their own",
        ),
        (("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"), "--enable-lora True"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_settings_that_sessions_cannot_have(command_line, loaded, argv, message):
    with pytest.raises((KVQuantError, SystemExit), match=message):
        check(command_line(*ON, *SMALL, *argv))


def test_a_budget_beyond_the_models_context(command_line, loaded):
    with pytest.raises(
        (KVQuantError, SystemExit), match="--episodic-budget 2048: the model takes 2048 tokens.*at most 1984"
    ):
        check(command_line(*ON, "--episodic-budget", "2048", "--episodic-block", "256"))


def test_another_server_is_refused(command_line, loaded, monkeypatch):
    server_args = command_line(*ON, *SMALL)
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises((KVQuantError, SystemExit), match="SGLANG_RUST_SERVER=1: sessions are known to one process"):
        check(server_args)


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({}, None),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [16, 8, 8]}}, "positions of several axes"),
        (GPT_OSS, "sliding windows: chosen pages lack"),
        (HYBRID, "recurrent states: chosen pages lack"),
    ],
    ids=["plain", "mrope", "windows", "states"],
)
def test_models_whose_pages_are_not_their_state(applied, model_folder, changes, expected):
    from sglang.srt.configs.model_config import ModelConfig

    found = next(episodic_checks.unsupported(ModelConfig(model_folder(**changes))), None)
    assert found is None if expected is None else found.startswith(expected)


def test_such_a_model_is_refused(command_line, loaded, model_folder):
    model = model_folder(rope_scaling={"rope_type": "default", "mrope_section": [16, 8, 8]})
    with pytest.raises((KVQuantError, SystemExit), match="has positions of several axes"):
        check(command_line(*ON, *SMALL, model=model))
