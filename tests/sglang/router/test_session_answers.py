"""Answers of sessions that were aborted, or restarted after a part had been sent, with a stand-in for SGLang."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import SimpleNamespace

import fastapi
import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.messages import GONE, SELECTION, TOO_SMALL
from sglang_kvq.sglang.router import answers as session_answers
from tests.sglang.router import test_session_episodes as episodes
from tests.sglang.router.session_model import LONG, Manager, http, request_of

EVICTED = f"sglang-kvq: 64 of 1600 tokens of the history are {GONE}. Send them again."
SENTENCE = ["The ", "capital ", "is ", "Paris."]


def reason(message: str, status: HTTPStatus | None = None) -> dict:
    """Returns a finish reason as ``FINISH_ABORT.to_json`` does."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": status and status.name}


class Scripted(Manager):
    """A ``Manager`` that answers one kind of requests by a script.

    Args:
        runs: the answers to these requests, one after the other: an exception, the ``finish_reason`` of a request that
            never ran, or words that come chunk by chunk, with an optional ``finish_reason`` at the end.
        answers: True for requests with chosen pages, False for those that compute a history.
    """

    def __init__(self, *runs, answers: bool = True, incremental: bool = False):
        super().__init__()
        self.runs, self.answers, self.incremental_streaming_output = list(runs), answers, incremental

    async def generate_request(self, obj, request=None):
        chosen = SELECTION in (obj.sampling_params or {}).get("custom_params", {})
        if chosen != self.answers or not self.runs:
            async for out in Manager.generate_request(self, obj, request):
                yield out
            return
        run = self.runs.pop(0)
        self.sent.append(obj)
        obj.normalize_batch_and_arguments()
        if isinstance(run, Exception):
            raise run
        if isinstance(run, dict):  # as in TokenizerManager._handle_abort_req
            if run["status_code"] is not None and not obj.stream:
                raise fastapi.HTTPException(run["status_code"], run["message"])
            yield {"text": "", "output_ids": [], "meta_info": {"id": obj.rid, "finish_reason": run}}
            return
        said = [word for word in run if isinstance(word, str)]
        for n in range(1, len(run) + 1):
            ending = run[n - 1] if isinstance(run[n - 1], dict) else {"type": "stop"} if n == len(run) else None
            if not obj.stream and ending is None:
                continue
            words = said[n - 1 : n] if self.incremental_streaming_output and obj.stream else said[:n]
            yield {
                "text": "".join(words),
                "output_ids": [hash(word) % 1000 for word in words],
                "meta_info": {
                    "id": obj.rid,
                    "prompt_tokens": len(obj.input_ids),
                    "cached_tokens": 0,
                    "completion_tokens": min(n, len(said)),
                    "finish_reason": ending,
                },
            }


def ask(manager, **fields):
    return manager.ask(LONG, rid="client", **fields)


def heard(outs: list[dict]) -> str:
    """Returns the text that a chat client gets from cumulative chunks, as SGLang's ``serving_chat`` builds it."""
    text = ""
    for out in outs:
        text += out["text"][len(text) :]
    return text


def ending(outs: list[dict]) -> dict:
    return outs[-1]["meta_info"]["finish_reason"]


# -- answers that are restarted -----------------------------------------------------------------------------


def test_the_same_answer_goes_on_where_it_stopped():
    manager = Scripted([*SENTENCE[:3], reason(EVICTED, HTTPStatus.BAD_REQUEST)], SENTENCE)
    outs = ask(manager, stream=True)
    texts = [out["text"] for out in outs]
    assert texts == ["The ", "The capital ", "The capital is ", "The capital is Paris."]
    assert [out["meta_info"]["completion_tokens"] for out in outs] == [1, 2, 3, 4] and ending(outs) == {"type": "stop"}
    assert manager.session.rebuilt == 1


@pytest.mark.parametrize("other", [["Sure! ", "It ", "might ", "be ", "Lyon."], ["The ", "capital "], ["The "] * 9])
def test_another_answer_ends_with_an_error_instead_of_being_spliced(other):
    outs = ask(Scripted([*SENTENCE[:3], reason(EVICTED, HTTPStatus.BAD_REQUEST)], other), stream=True)
    assert heard(outs) == "The capital is "
    assert ending(outs)["type"] == "abort" and ending(outs)["status_code"] is HTTPStatus.SERVICE_UNAVAILABLE
    assert "Send the request again" in ending(outs)["message"]
    assert outs[-1]["text"] == "The capital is " and outs[-1]["meta_info"]["completion_tokens"] == 3


def test_increments_cannot_be_told_to_go_on():
    evicted = [*SENTENCE[:3], reason(EVICTED, HTTPStatus.BAD_REQUEST)]
    outs = ask(Scripted(evicted, SENTENCE, incremental=True), stream=True)
    assert "".join(out["text"] for out in outs) == "The capital is "
    assert ending(outs)["status_code"] is HTTPStatus.SERVICE_UNAVAILABLE


@pytest.mark.parametrize("sent", [("", [7]), ("x", [])], ids=["half a character", "text"])
def test_part_of_an_increment_cannot_be_told_to_go_on_either(sent):
    delivery = session_answers.Delivery(request_of(stream=True), incremental=True)
    delivery.begin_again()  # nothing was sent yet
    assert delivery.passes({"text": sent[0], "output_ids": sent[1], "meta_info": {}})
    with pytest.raises(session_answers.Ended, match="Send the request again"):
        delivery.begin_again()


def test_an_answer_without_ids_is_compared_by_its_text():
    def passes(text):
        return delivery.passes({"text": text, "meta_info": {}})

    delivery = session_answers.Delivery(request_of(stream=True), incremental=False)
    assert passes("Par")
    delivery.begin_again()
    assert not passes("Pa") and not passes("Par")
    with pytest.raises(session_answers.Ended, match="Send the request again"):
        passes("Lyo")


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_before_anything_was_sent_an_answer_is_simply_made_again(stream, incremental):
    gone = [reason(EVICTED, HTTPStatus.BAD_REQUEST)] if stream else KVQuantError(EVICTED)
    outs = ask(Scripted(gone, SENTENCE, incremental=incremental), stream=stream)
    text = "".join(out["text"] for out in outs) if incremental and stream else heard(outs)
    assert text == "The capital is Paris." and ending(outs) == {"type": "stop"}


def test_read_whole_it_goes_on_or_ends_too():
    """The history is evicted twice; the third attempt reads the whole prompt with the client's own request."""
    evicted = [*SENTENCE[:3], reason(EVICTED, HTTPStatus.BAD_REQUEST)]
    outs = ask(Scripted(evicted, [reason(EVICTED, HTTPStatus.BAD_REQUEST)]), stream=True)
    assert heard(outs) == "The capital is " and ending(outs)["type"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_a_cache_too_small_for_history_and_copies_reads_the_prompt_whole(stream, caplog):
    small = f"sglang-kvq: the KV cache of 1920 tokens {TOO_SMALL} a history of 1280 tokens"
    manager = Scripted([reason(small, HTTPStatus.BAD_REQUEST)] if stream else KVQuantError(small))
    outs = ask(manager, stream=stream)
    assert ending(outs) == {"type": "length"} and manager.sent[-1].rid == "client"
    assert manager.sent[-1].input_ids == LONG.tolist() and manager.session.rebuilt == 0
    assert "the prompt of session 'a' is read whole: sglang-kvq: the KV cache of 1920 tokens is too" in caplog.text


# -- requests that SGLang ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answers", [False, True], ids=["history", "answer"])
def test_an_abort_in_the_queue_is_sglangs_own(answers, stream):
    outs = ask(Scripted(reason("Abort in waiting queue"), answers=answers), stream=stream)
    (out,) = outs
    assert out["meta_info"]["finish_reason"] == reason("Abort in waiting queue")
    assert (out["text"], out["output_ids"], out["meta_info"]["id"]) == ("", [], "client")
    assert out["meta_info"]["prompt_tokens"] == len(LONG) and out["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("answers", [False, True], ids=["history", "answer"])
def test_a_full_queue_keeps_its_status(answers):
    full = reason("The request queue is full.", HTTPStatus.SERVICE_UNAVAILABLE)
    with pytest.raises(fastapi.HTTPException) as raised:
        ask(Scripted(full, answers=answers))
    assert (raised.value.status_code, raised.value.detail) == (503, "The request queue is full.")
    outs = ask(Scripted(full, answers=answers), stream=True)
    assert [out["meta_info"]["finish_reason"] for out in outs] == [full]  # SGLang's endpoints turn this into an error
    assert isinstance(ending(outs)["status_code"], HTTPStatus)


def test_an_ended_request_has_what_sglangs_endpoints_read():
    (out,) = ask(Scripted(reason("x"), answers=False), return_logprob=True)
    meta = out["meta_info"]
    assert meta["output_token_logprobs"] == [] and meta["output_token_logprobs_length"] == 0
    assert {"completion_tokens", "weight_version"} <= set(meta)
    (out,) = ask(Scripted(reason("x"), answers=False))
    assert not any("logprobs" in name for name in out["meta_info"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_fold_that_sglang_ends_keeps_its_status(stream):
    """A status is kept in EpiCache too, whose chains are many requests."""
    with_status = fastapi.HTTPException(503, "The request queue is full.")
    manager = episodes.Manager(with_status)
    if stream:
        out = manager.ask(episodes.LONG, stream=True)[-1]
        assert out["meta_info"]["finish_reason"] == reason("The request queue is full.", HTTPStatus.SERVICE_UNAVAILABLE)
    else:
        with pytest.raises(fastapi.HTTPException, match="The request queue is full"):
            manager.ask(episodes.LONG)


def test_a_fold_that_is_aborted_in_the_queue_ends_the_request():
    async def aborting(self, obj, request=None):
        obj.normalize_batch_and_arguments()
        meta = {"id": obj.rid, "finish_reason": reason("Abort in waiting queue")}
        yield {"text": "", "output_ids": [], "meta_info": meta}

    obj = request_of(input_ids=episodes.LONG.tolist(), rid="client")
    (out,) = asyncio.run(episodes.Manager().heard(obj, send=aborting))
    assert out["meta_info"]["finish_reason"] == reason("Abort in waiting queue") and out["meta_info"]["id"] == "client"


# -- clients that leave -------------------------------------------------------------------------------------


def leaving(after: int):
    """Returns an HTTP request whose client has left after so many looks."""
    looks = iter(range(10**6))

    async def is_disconnected() -> bool:
        return next(looks) >= after

    return SimpleNamespace(headers=http(X_Session_Id="a").headers, is_disconnected=is_disconnected)


@pytest.mark.parametrize("background", [False, True])
def test_a_client_that_leaves_stops_a_chain(monkeypatch, background):
    """The router must look, because each request is too short for SGLang to notice that the client has left."""
    monkeypatch.setattr(session_answers, "POLL", 0.01)
    manager = episodes.Manager()
    original = episodes.Manager.generate_request

    async def slow(self, obj, request=None):
        await asyncio.sleep(0.05)
        async for out in original(self, obj, request):
            yield out

    async def run():
        obj = request_of(input_ids=episodes.LONG.tolist(), rid="client")
        obj.background = background
        return await manager.heard(obj, leaving(2), send=slow)

    if background:  # nobody waits for the answer, and it is computed all the same
        assert len(asyncio.run(run())) == 1 and len(manager.sent) == 5
        return
    with pytest.raises(KVQuantError, match="request client: its client has left"):
        asyncio.run(run())
    assert len(manager.sent) < 4 and not manager.session.planning.locked() and not manager.session.computing.locked()
