"""Sessions longer than their budget, end to end: the pages read, the state remembered, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import time

import numpy as np
import psutil
import pytest
import requests
from transformers import AutoTokenizer

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sessions.messages import SELECTION, Selection
from tests.e2e import word_embeddings
from tests.e2e.client import Client, held_out_text, together
from tests.e2e.test_selection import CLOSE, expected
from tests.e2e.test_serving import assert_empties

BUDGET, BLOCK = 640, 192
FLAGS = (
    *("--kv-quant", "int4", "--kv-quant-recent", "128", "--episodic-policy", "retrieve"),
    *("--episodic-budget", str(BUDGET), "--episodic-block", str(BLOCK), "--enable-metrics"),
)
FACT = "The password of the lighthouse keeper is walrus seventeen."
QUESTION = "\nWhich password did the lighthouse keeper have? The password of the lighthouse keeper is"


class Sessions(Client):
    """A client that is one tenant."""

    def __init__(self, server, key: str | None = None) -> None:
        super().__init__(server)
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def send(self, ids: list[int] | str, session: str | None, tokens: int = 4, **options) -> requests.Response:
        source = {"text": ids} if isinstance(ids, str) else {"input_ids": ids}
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **options.pop("sampling_params", {})}
        headers = {**self.headers, **({"X-Session-Id": session} if session else {})}
        body = {**source, "sampling_params": params, "return_logprob": True, **options}
        return requests.post(f"{self.url}/generate", json=body, headers=headers, timeout=600)

    def turn(self, ids: list[int] | str, session: str | None, tokens: int = 4, **options) -> dict:
        response = self.send(ids, session, tokens, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str = "") -> requests.Response:
        return requests.get(f"{self.url}/v1/sessions{path}", headers=self.headers, timeout=300)

    def session(self, name: str) -> dict:
        response = self.get(f"/{name}")
        assert response.status_code == 200, response.text
        return response.json()

    def computed_tokens(self) -> float:
        """Returns how many tokens of sessions the model has computed since the server started."""
        return self.metric("sglang_kvq_session_computed_tokens_total ")

    def metric(self, name: str) -> float:
        """Returns the sum of the samples of a metric; ``name`` ends with what follows it, a space or ``{``."""
        lines = requests.get(f"{self.url}/metrics", timeout=300).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def delete(self, name: str) -> requests.Response:
        return requests.delete(f"{self.url}/v1/sessions/{name}", headers=self.headers, timeout=300)

    def wait_computed(self, name: str, tokens: int) -> None:
        """Waits until the background has computed so many tokens and SGLang has seen its request end."""
        deadline = time.time() + 300
        while self.session(name)["computed_tokens"] < tokens:
            assert time.time() < deadline, self.session(name)
            time.sleep(0.05)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> tuple[str, str]:
    return word_embeddings.install(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def server(servers, words):
    return serve(servers, words)


def serve(servers, words, *flags: str):
    path, folder = words
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    return servers(*FLAGS, *flags, "--episodic-embedder", folder, env={"PYTHONPATH": paths})


@pytest.fixture
def client(server) -> Sessions:
    return Sessions(server)


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def text(tokenizer) -> list[int]:
    """Returns 1,500 tokens of prose with the fact at token 300."""
    prose = tokenizer(held_out_text()).input_ids
    fact = tokenizer(f"\n{FACT}\n").input_ids
    return [*prose[:300], *fact, *prose[300 : 1500 - len(fact)]]


@pytest.fixture(scope="module")
def question(tokenizer) -> list[int]:
    return tokenizer(QUESTION).input_ids


def logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def assert_read(
    client: Sessions, model, name: str, ids: list[int], answer: dict, control: bool = False, close: float = CLOSE
) -> dict:
    """Asserts that the answer is the model's, if it reads the session's listed pages and no others.

    Args:
        control: also assert that other pages give another answer, which needs pages that differ in the answer's
            subject.
        close: nats per token that the answer may be from the model's.
    """
    session = client.session(name)
    history, pages = session["read"]["of_tokens"], session["read"]["pages"]
    tail = ids[history:]
    assert len(pages) * P + len(tail) == session["hot_tokens"] and BUDGET - P < session["hot_tokens"] <= BUDGET
    got = logprobs(answer)
    want = expected(model, Selection(ids[:history], None, pages), tail, answer["output_ids"])[-len(got) :]
    assert np.abs(np.subtract(got, want)).mean() < close, (got, want)
    if control:
        others = [page for page in range(history // P) if page not in pages]
        wrong = expected(model, Selection(ids[:history], None, others), tail, answer["output_ids"])[-len(got) :]
        assert np.abs(np.subtract(got, wrong)).mean() > 2 * close, (got, wrong)
    return session


def test_within_the_budget_nothing_changes(client, text):
    prompt = text[:BUDGET]
    client.flush()
    plain = client.turn(prompt, None, 8, logprob_start_len=0)
    client.flush()
    ours = client.turn(prompt, "short", 8, logprob_start_len=0)
    assert ours["output_ids"] == plain["output_ids"] and ours["text"] == plain["text"]
    for key in ("input_token_logprobs", "output_token_logprobs", "prompt_tokens", "cached_tokens", "finish_reason"):
        assert ours["meta_info"][key] == plain["meta_info"][key], key
    session = client.session("short")
    assert session["hot_tokens"] == BUDGET and session["read"] == {"of_tokens": 0, "pages": []}
    assert session["history_tokens"] == BUDGET + 8


def test_a_question_reads_what_it_is_about(client, model, text, question):
    """A question after a whole conversation finds the fact; the rest is cached."""
    client.flush()
    first = client.turn(text, "asked", 6)
    assert_read(client, model, "asked", text, first)
    assert first["meta_info"]["prompt_tokens"] == len(text) and first["meta_info"]["cached_tokens"] == 0
    client.wait_computed("asked", (len(text) + 6) // P * P)
    prompt = text + question
    answer = client.turn(prompt, "asked", 6)
    best = assert_read(client, model, "asked", prompt, answer, control=True)["matches"][0]
    assert best["start"] <= 300 < best["end"]
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] == len(prompt) and meta["cached_tokens"] == len(text) // P * P


def test_turns_grow_and_history_is_exact(client, model, text, question):
    """After each answer, the history is computed as an ordinary prefill would compute it."""
    client.flush()
    said, name = text[:600], f"growing-{time.time()}"
    for part in (text[600:680], text[680:800], text[800:900], question):
        answer = client.turn([*said, *part], name, 6)
        said = [*said, *part]
        if len(said) > BUDGET:
            assert_read(client, model, name, said, answer)
        said += answer["output_ids"]
        client.wait_computed(name, (len(said) - 1) // P * P)
        assert client.session(name)["history_tokens"] == len(said)
    assert answer["meta_info"]["cached_tokens"] >= len(said) - 6 - len(question) - 2 * P
    assert client.session(name)["rebuilt"] == 0
    start = len(said) // P * P
    kept = client.turn(said, None, 4, logprob_start_len=start)["meta_info"]
    assert kept["cached_tokens"] >= start - P
    client.flush()
    fresh = client.turn(said, None, 4, logprob_start_len=start)["meta_info"]
    both = [[e[0] for e in m["input_token_logprobs"][1:] + m["output_token_logprobs"]] for m in (kept, fresh)]
    # Turn by turn, some parts were read in 4 bits; computed at once, they are read in BF16.
    assert np.abs(np.subtract(*both)).mean() < CLOSE


def test_a_flushed_history_is_computed_again(client, model, text, question):
    client.turn(text + question, "flushed", 2)
    client.wait_computed("flushed", len(text) // P * P)
    client.flush()
    for stream in (False, True):
        rebuilt = client.session("flushed")["rebuilt"]
        client.flush()
        prompt = text + question
        if stream:
            (*_, answer) = streamed(client.send(prompt, "flushed", 4, stream=True))
        else:
            answer = client.turn(prompt, "flushed", 4)
        assert client.session("flushed")["rebuilt"] == rebuilt + 1
        if not stream:
            assert_read(client, model, "flushed", prompt, answer)
        client.wait_computed("flushed", len(prompt) // P * P)


def streamed(response: requests.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_streams_chunk_by_chunk(client, text, question):
    prompt = text + question
    whole = client.turn(prompt, "whole", 6)
    chunks = streamed(client.send(prompt, "streamed", 6, stream=True))
    assert len(chunks) >= 6 and chunks[-1]["output_ids"] == whole["output_ids"]
    assert {chunk["meta_info"]["prompt_tokens"] for chunk in chunks} == {len(prompt)}
    assert client.session("streamed")["history_tokens"] == len(prompt) + 6


def test_an_edited_conversation(client, model, text, question):
    """The tokens before an edit are still known, those after it are not."""
    prompt = text + question
    client.turn(prompt, "edited", 2)
    client.wait_computed("edited", len(prompt) // P * P)
    edited = [*text[:700], *text[760:], *question]
    answer = client.turn(edited, "edited", 4)
    session = assert_read(client, model, "edited", edited, answer)
    assert session["history_tokens"] == len(edited) + 4
    assert answer["meta_info"]["cached_tokens"] >= 700 // P * P
    assert client.session("edited")["rebuilt"] == 0


def test_log_probabilities_of_the_tail(client, text, question):
    prompt = text + question
    client.turn(prompt, "scores", 2)
    start = len(prompt) - 12
    answer = client.turn(prompt, "scores", 2, logprob_start_len=start)["meta_info"]
    assert [entry[1] for entry in answer["input_token_logprobs"]] == prompt[start:]
    refused = client.send(prompt, "scores", 2, logprob_start_len=5)
    assert refused.status_code == 400 and f"Use -1, or a value from 1472 to {len(prompt) - 1}" in refused.text


def test_chat_remembers_a_fact(client, tokenizer):
    """A chat completion finds a fact: session_id in the body, a system prompt, turns marked by the template."""
    pause = tokenizer.decode(tokenizer(held_out_text()).input_ids[:700])
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": FACT + pause},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "Which password does the lighthouse keeper have?"},
    ]
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 8, "session_id": "chat"}
    answer = client.post("/v1/chat/completions", **body).json()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert answer["usage"]["prompt_tokens"] == len(prompt) > BUDGET
    session = client.session("chat")
    assert session["read"]["pages"][0] == 0 and session["matches"][0]["start"] == 0
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    again = client.post("/v1/chat/completions", **{**body, "messages": messages}).json()
    assert again["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"]
    assert client.session("chat")["requests_with_chosen_pages"] == 2


def test_sessions_and_plain_traffic_at_once(client, text, question):
    """Each answer equals the one that is given alone, although pages are evicted and return while all run."""
    prompts = [text + question, [*text[200:1100], *question], text[:500], text[500:1400]]
    names = ["one", "two", "three", None]
    alone = [logprobs(client.turn(ids, name, 4)) for ids, name in zip(prompts, names)]
    for name in names[:3]:
        client.delete(name)
    client.flush()
    jobs = [lambda i=i, n=n: logprobs(client.turn(i, n, 4)) for i, n in zip(prompts, names)]
    for got, want in zip(together(jobs), alone, strict=True):
        assert np.abs(np.subtract(got, want)).mean() < CLOSE


def test_tenants_never_meet(server, text, question):
    one, other = Sessions(server, "key-one"), Sessions(server, "key-other")
    prompt = text[:900] + question
    one.turn(prompt, "mine", 4)
    assert one.session("mine")["history_tokens"] == len(prompt) + 4
    assert other.get("/mine").status_code == 404 and other.delete("mine").status_code == 404
    assert [session["id"] for session in one.get().json()["data"]] == ["mine"] and other.get().json()["data"] == []
    assert other.turn(text[:300], "mine", 2)["meta_info"]["prompt_tokens"] == 300
    assert one.session("mine")["history_tokens"] == len(prompt) + 4


def test_metrics(client, text):
    def counted() -> dict[str, float]:
        lines = requests.get(f"{client.url}/metrics", timeout=300).text.splitlines()
        return {
            line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if line.startswith("sglang_kvq_session")
        }

    before = counted()
    for name, prompt in (("counted", text[:100]), ("counted too", text), ("counted", text[:200])):
        client.turn(prompt, name, 1)
    after = counted()
    changes = {name: after[name] - before.get(name, 0) for name in after}
    assert after["sglang_kvq_sessions"] >= 2
    state = sum(session["state_bytes"] for session in client.get().json()["data"])
    assert after["sglang_kvq_session_state_bytes"] > state / 2  # embedding may still run
    assert changes['sglang_kvq_session_requests_total{read="whole"}'] == 2
    assert changes['sglang_kvq_session_requests_total{read="chosen"}'] == 1
    assert changes["sglang_kvq_session_computed_tokens_total"] <= len(text), "earlier tests left most of it cached"


def test_metrics_count_computed_tokens(client, text):
    before, prompt = client.computed_tokens(), text[::-1]
    client.turn(prompt, "backwards", 1)
    new = client.computed_tokens() - before
    assert len(prompt) <= new <= len(prompt) + 2 * BLOCK, "a prompt's end may be computed with chosen pages and without"
    client.turn(prompt, "backwards", 1)
    assert client.computed_tokens() - before - new <= 2 * BLOCK, "what is cached is not counted"


def test_deleted_and_aborted_sessions_leave_nothing(client, text, question):
    prompt = text + question
    client.turn(prompt, "gone", 2)
    assert client.delete("gone").json()["deleted"] and client.get("/gone").status_code == 404
    client.flush()
    for wait in (0.0, 0.3, 3.0):  # while the history is computed, and while the answer is
        with client_stream(client, prompt) as response:
            if wait == 3.0:
                next(response.iter_lines())
            else:
                time.sleep(wait)
    assert_empties(client)  # SGLang's strict checks would stop the server if a page were lost


def client_stream(client: Sessions, prompt: list[int]):
    """Sends a streamed request, which its client will leave."""
    params = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True, "rid": f"left-{time.time()}"}
    try:
        return requests.post(
            f"{client.url}/generate", json=body, headers={"X-Session-Id": "left"}, stream=True, timeout=(60, 600)
        )
    except requests.ReadTimeout:
        pytest.fail("no answer began")


@pytest.mark.parametrize(
    "options,message",
    [
        ({"sampling_params": {"custom_params": {SELECTION: "x"}}}, "no client may choose what is read"),
        ({"extra_key": "kvq-pages-0"}, "are the server's"),
        ({"sampling_params": {"n": 2}}, "n 2: a session continues with exactly one answer"),
        ({"session_id": "another"}, "Send one of them"),
        ({"session_params": {"id": "x"}}, "session_params in a request of a session"),
        ({"image_data": "x.png"}, "image_data in a request of a session"),
        ({"lora_path": "x"}, "lora_path in a request of a session"),
        ({"sampling_params": {"max_new_tokens": 900}}, "exceeds the model's maximum context length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_session_cannot_serve_is_said(client, text, options, message):
    response = client.send(text, "bad", **options)
    assert response.status_code == 400 and message in response.text, response.text


def test_other_bad_requests(client, text):
    assert client.send([text[:100], text[:90]], "bad").status_code == 400
    assert "must have 1 to 256" in client.send(text, "x" * 257).text
    plain = client.send(text[:100], None, sampling_params={"custom_params": {SELECTION: "x"}})
    assert plain.status_code == 400 and "no client may choose what is read" in plain.text
    assert "longer than the model's context length" in client.send(text + text, "bad").text


@pytest.fixture
def small(servers, words):
    """Returns a client of a server with a pool of 27 pages, in which two requests run at once."""
    # Metrics are written with each log line of decoding.
    flags = ("--max-total-tokens", str(27 * P), "--max-running-requests", "2", "--decode-log-interval", "4")
    client = Sessions(serve(servers, words, *flags))
    client.flush()
    return client


def test_a_pool_too_small_for_history_and_copies_reads_the_prompt_whole(small, model, text, question):
    """With 27 pages, a history of 15 leaves room for 7 copies; a history of 21 does not."""
    fits, exceeds = [*text[:1130], *question], text
    assert_read(small, model, "fits", fits, small.turn(fits, "fits", 4))
    small.flush()
    answer = small.turn(exceeds, "exceeds", 4)
    session = small.session("exceeds")
    assert session["read"] == {"of_tokens": 0, "pages": []} and session["hot_tokens"] == len(exceeds)
    plain = small.turn(exceeds, None, 4)
    assert answer["output_ids"] == plain["output_ids"] and np.allclose(logprobs(answer), logprobs(plain), atol=CLOSE)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_abort_in_the_queue_is_sglangs_own(small, text, stream):
    """SGLang itself ends an aborted request, without a session or with a history that waits to be computed."""

    def waits_for(running: int, waiting: int) -> None:
        deadline, names = time.monotonic() + 300, ("sglang:num_running_reqs{", "sglang:num_queue_reqs{")
        while (found := [small.metric(name) for name in names]) != [running, waiting]:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    def blocked(session: str | None):
        waits_for(2, int(session is not None))
        response = small.send(text[:1000], session, 4, rid=f"abort-{session}-{stream}", stream=stream)
        return streamed(response)[-1] if stream else response.json()

    def abort() -> None:
        waits_for(2, 2)
        for rid in (f"abort-None-{stream}", f"abort-queued-{stream}", "busy-0", "busy-300"):
            small.post("/abort_request", rid=rid)
            time.sleep(0.5)

    def busy(start: int) -> None:
        small.turn(text[start : start + 100], None, 500, rid=f"busy-{start}")

    jobs = [lambda: busy(0), lambda: busy(300), lambda: blocked(None), lambda: blocked("queued"), abort]
    _, _, plain, ours, _ = together(jobs)
    assert ours["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]
    assert ours["meta_info"]["finish_reason"]["type"] == "abort" and ours["output_ids"] == plain["output_ids"] == []


def test_a_killed_scheduler_takes_its_server_along_and_text_is_enough(server, servers, words, text, question):
    """No request hangs and no process remains; the next server answers from the text that the client sends."""
    prompt, client = text + question, Sessions(server)
    before = client.turn(prompt, "killed")
    assert client.session("killed")["requests_with_chosen_pages"] == 1
    main = psutil.Process(server.process.pid)
    processes = [main, *main.children(recursive=True)]
    (scheduler,) = [one for one in processes if "scheduler" in one.name() or "scheduler" in " ".join(one.cmdline())]
    with client_stream(client, prompt) as response:
        next(response.iter_lines())
        scheduler.kill()
        with contextlib.suppress(requests.RequestException):  # the stream may also end as if the answer were complete
            list(response.iter_lines())
    server.process.wait(120)
    _, alive = psutil.wait_procs(processes, timeout=300)
    assert not alive

    again = Sessions(serve(servers, words))
    assert again.get("/killed").status_code == 404
    after = again.turn(prompt, "killed")
    assert after["output_ids"] == before["output_ids"] and np.allclose(logprobs(after), logprobs(before), atol=CLOSE)
    assert again.session("killed")["read"] and after["meta_info"]["cached_tokens"] == 0
    assert_empties(again)
