"""Requests of sessions as SGLang's own objects, and the requests that a session refuses."""

from __future__ import annotations

import asyncio

import pytest

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.messages import SELECTION, Selection
from sglang_kvq.sessions.planning import Plan
from sglang_kvq.sglang.router import requests
from tests.sglang.router.session_model import LONG, Manager, http, request_of


def made(obj, plan=None, room=1000):
    plan = plan or Plan(20 * P, 18 * P, False, 3)
    obj.normalize_batch_and_arguments()
    selection = Selection(LONG[: plan.history], None, [0, 5, 17])
    start = requests.Beginning.of_pages(selection)
    return requests.answer_request(obj, LONG[: plan.tokens], plan, start, {}, room)


@pytest.mark.parametrize(
    "given,expected",
    [({}, 128), ({"max_new_tokens": 5}, 5), ({"max_new_tokens": 5000}, 1000), ({"max_new_tokens": None}, 1000)],
)
def test_answers_end_where_the_models_context_does(given, expected):
    inner = made(request_of(sampling_params={**given, "min_new_tokens": 3000, "custom_params": {"mine": 1}}))
    assert inner.sampling_params["max_new_tokens"] == expected
    assert inner.sampling_params["min_new_tokens"] == min(3000, expected)
    assert set(inner.sampling_params["custom_params"]) == {"mine", SELECTION}


def test_positions_of_log_probabilities():
    assert made(request_of(return_logprob=True)).logprob_start_len == -1
    assert made(request_of(logprob_start_len=3)).logprob_start_len == -1  # no log-probabilities were asked for
    assert made(request_of(return_logprob=True, logprob_start_len=18 * P)).logprob_start_len == 3 * P
    assert made(request_of(return_logprob=True, logprob_start_len=19 * P)).logprob_start_len == 4 * P
    for start in (0, 18 * P - 1, 20 * P):
        with pytest.raises(KVQuantError, match=f"logprob_start_len {start}: .* Use -1, or a value from 1152 to 1279"):
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
        ({"sampling_params": {"custom_params": {SELECTION: "x"}}}, "no client may choose what is read"),
        ({"sampling_params": [{}, {"custom_params": {SELECTION: None}}]}, "no client may choose what is read"),
        ({"extra_key": "kvq-pages-1"}, "extra_key kvq-pages-1"),
        ({"extra_key": ["x", "kvq-pages-1"]}, "extra_key kvq-pages-1"),
    ],
    ids=str,
)
def test_what_only_the_router_may_say_is_refused_from_everybody(fields, message):
    manager = Manager()
    with pytest.raises(KVQuantError, match=message):
        asyncio.run(manager.heard(request_of(**fields), None))
    assert manager.sent == []


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"text": ["a", "b"], "input_ids": None}, "several prompts"),
        ({"input_ids": [[1], [2]]}, "several prompts"),
        ({"sampling_params": {"n": 2}}, "n 2: a session continues with exactly one answer"),
        ({"sampling_params": {"beam_width": 4}}, "beam_width 4"),
        ({"sampling_params": {"custom_params": [1]}}, r"custom_params \[1\]: must be an object"),
        ({"session_params": {"id": "x"}}, "session_params in a request of a session"),
        ({"input_embeds": [[0.0]], "input_ids": None}, "input_embeds in a request of a session"),
        ({"image_data": "x"}, "image_data in"),
        ({"video_data": ["x"]}, "video_data in"),
        ({"audio_data": "x"}, "audio_data in"),
        ({"lora_path": "x"}, "lora_path in"),
        ({"return_hidden_states": True}, "return_hidden_states in"),
        ({"return_routed_experts": True}, "return_routed_experts in"),
        ({"session_id": "b"}, "session_id 'b' and X-Session-Id 'a' differ. Send one of them"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_session_has_no_place_for_is_refused(fields, message):
    manager = Manager()
    with pytest.raises(KVQuantError, match=message):
        asyncio.run(manager.heard(request_of(**fields)))
    assert manager.sent == [] and len(manager.router.store) == 0


@pytest.mark.parametrize(
    "name,message",
    [
        ("", "a session id of 0 characters: must have 1 to 256"),
        ("x" * 257, "a session id of 257 characters"),
        ("\ud800", r"session id '\\ud800': half of a surrogate pair"),
        (5, "session id 5: must be a string"),
        (["a"], r"session id \['a'\]: must be a string"),
    ],
    ids=["empty", "long", "surrogate", "number", "list"],
)
def test_names_of_sessions(name, message):
    with pytest.raises(KVQuantError, match=message):
        asyncio.run(Manager().heard(request_of(session_id=name), None))


def test_a_header_names_a_session_in_utf8():
    """HTTP servers decode headers as Latin-1; bodies and URLs are UTF-8."""
    manager = Manager()
    header = http(X_Session_Id="Zoë 会话".encode().decode("latin-1"))
    manager.ask(LONG[:P], header, session_id="Zoë 会话")
    assert [session.id for session in manager.router.store.of("")] == ["Zoë 会话"]
    manager.ask(LONG[:P], http(X_Session_Id="Zo\xeb"))  # Latin-1, which is not UTF-8
    assert manager.router.store.of("")[0].id == "Zoë"


def test_another_header_may_name_sessions():
    """A session may be named by the header that SGLang's router forwards and by which it tells sessions apart."""
    manager = Manager(session_header="X-SMG-Routing-Key")
    manager.ask(LONG[:P], http(X_Session_Id="a"))
    assert len(manager.router.store) == 0
    # HTTP ignores a header's case; this stand-in does not.
    manager.ask(LONG[:P], http(**{"X-SMG-Routing-Key": "b", "X-Session-Id": "a"}))
    assert [session.id for session in manager.router.store.of("")] == ["b"]
    with pytest.raises(KVQuantError, match="session_id 'c' and X-SMG-Routing-Key 'b' differ. Send one of them"):
        manager.ask(LONG[:P], http(**{"X-SMG-Routing-Key": "b"}), session_id="c")


def test_computed_tokens_are_counted():
    """Tokens are counted if they are computed, in the history or after it; cached ones are not."""

    manager = Manager()
    counted = manager.counted()
    manager.ask(LONG[:P])
    assert counted.tokens == P
    manager.ask(LONG)
    pages = manager.session.pages
    sent = [len(obj.input_ids) for obj in manager.sent[1:]]
    assert len(sent) > 1 and counted.tokens == P + sum(sent) - len(pages) * P


@pytest.mark.parametrize("wrong", [1 << 40, -1])
@pytest.mark.parametrize("before", [1, requests.TOKENS_AT_ONCE, requests.TOKENS_AT_ONCE + 1])
def test_tokens_that_are_none_are_refused(before, wrong):
    with pytest.raises(KVQuantError, match=f"^session 'a': input_ids {wrong}: not a token"):
        Manager().ask([1] * before + [wrong])


@pytest.mark.parametrize("count", [0, 1, requests.TOKENS_AT_ONCE, 2 * requests.TOKENS_AT_ONCE + 5])
def test_prompts_become_arrays_in_parts(count):
    assert asyncio.run(requests.token_ids(list(range(count)))).tolist() == list(range(count))
