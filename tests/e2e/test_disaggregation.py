"""A prefill server and a decode server on one machine exchange quantized pages by Mooncake over TCP or by NIXL."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from launch.server import Server
from sglang_kvq.server_process import free_port
from sglang_kvq.sglang import compat, hooks
from tests.e2e.client import Client, together
from tests.e2e.conftest import ON_GPU, lacks
from tests.e2e.test_serving import CHAT, STRICT

#: Flags that ``test_serving`` has too: its server gives the answers to compare with.
QUANT = ("--kv-quant", "hadamard", "--kv-quant-recent", "64")
#: Each server starts while the other one holds memory.
ROOM = ("--mem-fraction-static", "0.9", "--max-total-tokens", "4096")
#: The prefill server keeps more pages in host memory. It has BF16 pages for two requests, which others soon take over.
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--enable-cache-report"),
    *("--max-running-requests", "2"),
)
#: Windows that may be in transfer: one for each running request (``launch.server.CPU_FLAGS``).
WINDOWS = 8
#: Steps after which the decode server retracts a request, if two run.
RETRACTS = "5"
RETRACTED = "#retracted_reqs: 1"
#: Lengths of prompts and of their answers: with and without history; a page ends and another fills.
LENGTHS = {40: 4, 128: 4, 310: 12, 700: 8}
#: More than twice BF16's rounding of these log-probabilities, less than the effect of a wrong page.
NOISE = 0.3


#: Each transfer engine's module and packages; Mooncake needs the distribution's RDMA libraries even for TCP.
ENGINES = {
    "mooncake_tcp": (
        "mooncake.engine",
        "mooncake-transfer-engine-non-cuda, libibverbs1, librdmacm1, libnl-route-3-200",
    ),
    "nixl": ("nixl._api", "nixl"),
}


def why_not(backend: str) -> str | None:
    """Returns the reason why a transfer back end cannot run; None if it can."""
    if not compat.applies(hooks.TRANSFERS, compat.sglang_version()):
        return "this SGLang release sends plain pages only"
    return lacks(*ENGINES[backend])


def any_engine() -> str:
    """Returns the first back end that can run here; skips the test if none can."""
    reasons = {backend: why_not(backend) for backend in ENGINES}
    for backend, reason in reasons.items():
        if reason is None:
            return backend
    pytest.skip("; ".join(map(str, reasons.values())))


pytestmark = pytest.mark.skipif(ON_GPU, reason="the servers of this test run on CPUs")


@dataclass
class Pair:
    prefill: Server
    decode: Server
    port: int  # port of the prefill server's bootstrap

    def post(self, server: Server, ids: list[int], tokens: int, room: int, **more) -> requests.Response:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **where, **more}
        return requests.post(f"{server.url}/generate", json=body, timeout=600)

    def answer(self, ids: list[int], tokens: int) -> list[tuple[float, int]]:
        """Returns log-probability and token, for each that the decode server gives.

        A prompt in ``expected`` must be computed from its beginning, because a cached prefix is read from records.
        """
        return self.places_and_answer(ids, tokens)[1]

    def places_and_answer(self, ids: list[int], tokens: int) -> tuple[dict[str, int], list[tuple[float, int]]]:
        """Sends the request to both servers; also returns how many tokens the prefill server found in each place."""
        room = random.getrandbits(30)
        read, response = together([lambda s=s: self.post(s, ids, tokens, room) for s in (self.prefill, self.decode)])
        assert response.status_code == 200, response.text
        found = [(x[0], x[1]) for x in response.json()["meta_info"]["output_token_logprobs"]]
        return read.json()["meta_info"].get("cached_tokens_details") or {}, found


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(100, 40000) for _ in range(length)]


@pytest.fixture(scope="module", params=ENGINES)
def backend(request) -> str:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def expected(servers) -> dict[int, list[tuple[float, int]]]:
    """Returns the answers of a single server."""
    client = Client(servers(*CHAT, env=STRICT))
    answers = {n: client.generate(prompt(n), tokens, return_logprob=True) for n, tokens in LENGTHS.items()}
    return {n: [(x[0], x[1]) for x in a["meta_info"]["output_token_logprobs"]] for n, a in answers.items()}


@pytest.fixture(scope="module")
def pair(backend, servers, expected, plugins) -> Pair:
    """Returns both servers. ``expected`` must come first, because only two servers are kept at a time."""
    port, env = free_port(), {**STRICT, **plugins("transfers_on_cpu", "small_host")}
    common = (*QUANT, *ROOM, "--disaggregation-transfer-backend", backend, "--disaggregation-mode")
    prefill = servers(*common, "prefill", "--disaggregation-bootstrap-port", str(port), *HICACHE, env=env)
    more = {"KVQ_TEST_RETRACT": RETRACTS}
    decode = servers(*common, "decode", "--disaggregation-decode-enable-radix-cache", env={**env, **more})
    return Pair(prefill, decode, port)


def assert_same(found: list[tuple[float, int]], wanted: list[tuple[float, int]]) -> None:
    """Asserts equal greedy tokens up to the first near tie, after which everything may differ."""
    for at, ((logprob, token), (other, right)) in enumerate(zip(found, wanted, strict=True)):
        if token != right:
            assert at > 0 and abs(logprob - other) < NOISE, f"token {at}: {token} at {logprob}, {right} at {other}"
            return
        assert abs(logprob - other) < NOISE, f"token {at}: {logprob} and {other}"


def test_more_requests_of_one_token_than_windows_on_their_way(pair):
    """Requests of one token end without the decode step after which a window's room is given back."""
    found = together([lambda n=n: pair.answer(prompt(130 + n), 1) for n in range(WINDOWS + 4)])
    assert all(len(answer) == 1 for answer in found)
    assert pair.decode.kv_quant()["errors"] == 0


def test_answers_are_those_of_one_server(pair, expected):
    for length, tokens in LENGTHS.items():
        assert_same(pair.answer(prompt(length), tokens), expected[length])
    for server in (pair.prefill, pair.decode):
        assert server.kv_quant()["errors"] == 0


def test_a_cached_prefix_is_not_sent_again(pair, expected):
    """The decode server has the last answer's pages for this prompt in its tree, and answers the same."""
    pair.prefill.drain()
    assert_same(pair.answer(prompt(700), LENGTHS[700]), expected[700])


def test_pages_from_the_prefill_servers_host_memory_are_sent(pair):
    """The answer equals that of pages that stayed on the device while other prompts took their BF16 copies."""

    def ask() -> tuple[dict[str, int], list[tuple[float, int]]]:
        pair.decode.drain()  # all pages are sent
        return pair.places_and_answer(prompt(700), LENGTHS[700])

    pair.prefill.drain()
    ask()
    for length in range(310, 316):
        pair.answer(prompt(length), 1)
    places, stayed = ask()
    assert places["device"] == 640, places
    for length in range(900, 908):
        pair.answer(prompt(length), 1)
    places, came_back = ask()
    assert places["host"] == 640, places
    assert came_back == stayed


def test_requests_are_retracted_and_go_on_where_they_were(pair, expected):
    pair.prefill.drain()
    before = pair.decode.log().count(RETRACTED)
    lengths = (40, 310)
    answers = together([lambda n=n: pair.answer(prompt(n), 60) for n in lengths])  # so many that both run at a time
    assert pair.decode.log().count(RETRACTED) > before
    for n, found in zip(lengths, answers):
        assert_same(found[: LENGTHS[n]], expected[n])


def test_requests_that_wait_for_their_cache_can_be_aborted(pair, expected):
    """The aborts outnumber the entries for windows, and the prefill server never hears of these requests."""
    for room in range(10):
        rid = f"waiting-{room}"
        waiting = threading.Thread(target=pair.post, args=(pair.decode, prompt(200), 4, room), kwargs={"rid": rid})
        waiting.start()
        time.sleep(0.2)
        while waiting.is_alive():
            requests.post(f"{pair.decode.url}/abort_request", json={"rid": rid}, timeout=300)
            waiting.join(0.5)
    pair.prefill.drain()
    assert_same(pair.answer(prompt(310), LENGTHS[310]), expected[310])


def test_a_server_with_another_cache_is_refused(pair, expected):
    """A bootstrap server that copies this prefill server's answer, except for the method, is refused."""
    where = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    route = requests.get(f"http://127.0.0.1:{pair.port}{where}", timeout=300).json()
    name = route["kv_cache_dtype"]
    assert name.startswith("kvq1-hadamard-codes:")

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({**route, "kv_cache_dtype": name.replace("hadamard", "int4", 1)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        response = pair.post(pair.decode, prompt(200), 4, 77, bootstrap_port=other.server_port)
        other.shutdown()
    pair.prefill.drain()
    assert response.status_code == 400
    assert name in response.text and "kvq1-int4-codes:" in response.text and "Give both servers" in response.text
    assert_same(pair.answer(prompt(310), LENGTHS[310]), expected[310])


def test_both_caches_are_empty_in_the_end(pair):
    """Both servers are idle, flushed and checked; a leak would end a server."""
    for server in (pair.prefill, pair.decode):
        server.drain(120)
    assert len(pair.answer(prompt(3), 2)) == 2  # the next plan applies the recorded events
    for server in (pair.prefill, pair.decode):
        server.drain(120)
        time.sleep(1)  # SGLang's idle check runs, and ours
        state = server.kv_quant()
        assert state["tiers"] == {"bf16_tokens": 0, "quantized_tokens": 0} and state["errors"] == 0
        assert server.running
