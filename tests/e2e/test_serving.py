"""The server's behavior: turns, sessions, pressure, aborts, limits."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise

import pytest
import requests

from tests.e2e.client import Client, together

#: A pool of 24 pages for eight requests at a time, which SGLang and our checks inspect whenever idle.
TINY = (
    *("--kv-quant", "hadamard", "--kv-quant-recent", "64", "--max-total-tokens", "1536", "--max-running-requests", "8"),
    *("--chunked-prefill-size", "192", "--schedule-conservativeness", "0.01"),
)
#: Flags of ``test_server_metrics`` too, which runs first: its counts need a server that has done nothing before.
CHAT = (
    *("--kv-quant", "hadamard", "--kv-quant-recent", "64", "--enable-cache-report"),
    *("--enable-metrics", "--decode-log-interval", "4", "--enable-streaming-session"),
)
#: Cached tokens of turns of 75 tokens with answers of 10, the last of which is not stored yet.
STREAMED = [0, 84, 169, 254]
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
#: SGLang's own switch retracts as if memory had run out, because its releases differ in how full memory may get.
PRESSED = {**STRICT, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "30"}


@pytest.fixture
def chat(servers) -> Client:
    return Client(servers(*CHAT, env=STRICT, model=servers.shallow))


@pytest.fixture
def tiny(servers) -> Client:
    return Client(servers(*TINY, env=PRESSED, model=servers.shallow))


def assert_empties(client: Client) -> None:
    """Asserts that an idle, flushed and checked server holds nothing in both pools and still answers."""
    client.flush()
    client.generate([1, 2, 3], 2)  # the next plan applies the recorded events
    client.flush()
    time.sleep(1)  # SGLang's idle check runs, and ours; a leak would end the server
    deadline = time.monotonic() + 60
    while any((held := client.state()["tiers"]).values()):  # ours may run only after ``observe.QUIET`` seconds
        assert time.monotonic() < deadline, held
        time.sleep(0.5)
    assert requests.get(f"{client.url}/health", timeout=300).status_code == 200


def test_later_turns_find_earlier_ones_cached_with_the_answers(chat):
    messages, turns = [], []
    filler = "Here is a longer remark so that a turn spans more than a page of the cache. " * 4
    for turn in range(4):
        messages.append({"role": "user", "content": f"Turn {turn}. {filler}"})
        body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 20}
        reply = chat.post("/v1/chat/completions", **body).json()
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        turns.append(reply["usage"])
    for before, now in pairwise(turns):
        cached = now["prompt_tokens_details"]["cached_tokens"]
        # The whole previous exchange with its answer is cached, down to the page (and a few re-tokenized words).
        assert cached >= (before["total_tokens"] - 4) // 64 * 64 - 64
    cached = [t["prompt_tokens_details"]["cached_tokens"] for t in turns[1:]]
    print("cached tokens by turn:", cached)
    assert cached[-1] > turns[-2]["prompt_tokens"] - 64, "the assistant's own tokens are not reused"
    assert_empties(chat)


def test_generated_tokens_are_reused_without_retokenising(chat):
    prompt = list(range(100, 250))
    first = chat.generate(prompt, 60)
    again = chat.generate(prompt + first["output_ids"] + [5, 6, 7], 1)
    assert again["meta_info"]["cached_tokens"] >= (150 + 59) // 64 * 64
    assert_empties(chat)


def test_server_info_tells_what_is_allocated(chat):
    state = chat.state()
    assert state["method"] == "hadamard" and state["record_bits_per_element"] == 2.5
    assert state["rotations"] == "fixed" and state["rotations_sha256"] is None
    assert state["tokens"] == 4096 and state["bf16_pages"] >= 8 * 3
    assert state["bits_per_element"] == pytest.approx(16 * state["bf16_tokens_same_memory"] / state["tokens"], rel=1e-2)


def test_log_says_how_many_requests_fit_and_is_short(servers):
    server = servers(*CHAT, env=STRICT, model=servers.shallow)
    for path in ("/health", "/metrics"):
        assert requests.get(f"{server.url}{path}", timeout=300).status_code == 200
    log = server.log()
    assert "GET /health" not in log and "GET /metrics" not in log
    assert all(len(line) < 400 for line in log.splitlines() if "kv-quant" in line)
    assert re.search(r"kv-quant at 2K: BF16 \d+ → 2 requests", log), "the server's contexts end at 2K"


def test_sessions_that_are_not_streaming_reuse_whole_pages(chat):
    session = chat.post("/open_session", capacity_of_str_len=100000).json()
    cached, rid = [], None
    for turn in range(3):
        ids = list(range(2000 + 90 * turn, 2000 + 90 * turn + 80))
        reply = chat.generate(ids, 10, session_params={"id": session, "rid": rid})
        rid = reply["meta_info"]["id"]
        cached.append(reply["meta_info"]["cached_tokens"])
    chat.post("/close_session", session_id=session)
    assert cached[0] == 0 and cached[1] == 64 and cached[2] >= 128, cached
    assert_empties(chat)


#: Tokens of the shortest answer of many streams.
SHORTEST = 40


def test_many_streams_with_shared_prefixes_aborts_and_no_room(tiny, servers):
    """Requests are evicted and retracted, nothing is lost, and both pools end empty."""
    rng = random.Random(3)
    shared = [list(range(50, 50 + n)) for n in (130, 400)]

    def stream(index: int) -> str:
        wanted = SHORTEST + 8 * (index % 4)
        prompt = shared[index % 2] + [rng.randrange(1000, 9000) for _ in range(20 + 37 * (index % 5))]
        tokens, chunks = 0, tiny.stream(prompt, wanted)  # a chunk has several tokens if the machine is busy
        for chunk in chunks:
            tokens = chunk["meta_info"]["completion_tokens"]
            if index % 3 == 2 and tokens > 10:
                chunks.close()  # closing the connection aborts the request
                return "aborted"
        return "finished" if tokens == wanted else f"{tokens} tokens instead of {wanted}"

    # SGLang retracts only if requests run at once. On a slow host each stream could end before the next arrives.
    beside = [lambda: tiny.generate([shared[0] + [n] * 90 for n in range(4)], 2 * SHORTEST) and "finished"]
    results = together([*(lambda i=i: stream(i) for i in range(8)), *beside])
    assert sorted(set(results)) == ["aborted", "finished"], results
    assert_empties(tiny)
    log = servers(*TINY, env=PRESSED, model=servers.shallow).log()
    assert "#retracted_reqs" in log, "no request was retracted"


def test_the_same_answer_under_pressure(tiny):
    """Retraction, eviction and sharing change no token of a greedy answer beyond rounding."""
    prompt = list(range(300, 600))
    alone = tiny.generate(prompt, 24)["output_ids"]
    tiny.flush()
    noise = [lambda i=i: tiny.generate(list(range(i, i + 350)), 36) for i in range(700, 704)]
    crowd = together([lambda: tiny.generate(prompt, 24), *noise])[0]["output_ids"]
    same = next((i for i, (a, b) in enumerate(zip(alone, crowd)) if a != b), 24)
    assert same >= 8, f"only {same} tokens agree"
    assert_empties(tiny)


def test_aborting_everything_at_once(tiny):
    params = {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}
    ask = partial(tiny.post, "/generate", sampling_params=params)
    running = tiny.stream([50] * 120, 900)
    next(running)
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(ask, input_ids=[60 + n] * 120) for n in range(3)]
        while wait(others, timeout=0.5).not_done:  # some may arrive after the first abort
            assert tiny.post("/abort_request", rid="", abort_all=True).status_code == 200
    assert list(running)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert all(len(other.result().json().get("output_ids", [])) < 900 for other in others)
    assert_empties(tiny)


def test_a_prompt_that_cannot_fit_gets_a_400(tiny):
    response = tiny.post("/generate", input_ids=list(range(1, 2000)) * 3, sampling_params={"max_new_tokens": 4})
    assert response.status_code == 400, response.text
    tiny.generate([1, 2, 3], 1)


def test_a_prompt_gets_an_answer_or_a_400(tiny):
    """A cache of 1,536 tokens is smaller than the model's context. SGLang admits by pages, and refuses by tokens."""
    longest = 1536 - 2 * 64
    assert tiny.generate([9] * (longest - 1), 5)["meta_info"]["completion_tokens"] == 5
    for tokens in (longest, 1536 - 64, 1536 - 7):
        body = {"input_ids": [9] * tokens, "sampling_params": {"max_new_tokens": 5}}
        response = requests.post(f"{tiny.url}/generate", json=body, timeout=120)
        assert response.status_code == 400 and f"maximum allowed length ({longest} tokens)" in response.text
    assert_empties(tiny)


def streaming_turns(client: Client) -> list[int]:
    """Returns the cached tokens of each turn of a session that sends only its new tokens."""
    session = client.post("/open_session", capacity_of_str_len=100000, streaming=True).json()
    cached = []
    for turn in range(4):
        ids = list(range(1000 + 90 * turn, 1000 + 90 * turn + 75))
        reply = client.generate(ids, 10, session_params={"id": session})
        cached.append(reply["meta_info"]["cached_tokens"])
        client.generate([1] * 130, 3)  # other requests run while the session holds its row
    client.post("/close_session", session_id=session)
    return cached


def test_streaming_sessions_resume_in_the_middle_of_a_page(chat):
    chat.flush()
    cached = streaming_turns(chat)
    assert cached == STREAMED and cached[-1] % 64, "resumed in the middle of a page"
    assert_empties(chat)


def test_streaming_sessions_find_as_much_as_in_plain_sglang(servers):
    assert streaming_turns(Client(servers("--enable-streaming-session", env=STRICT, model=servers.shallow))) == STREAMED
