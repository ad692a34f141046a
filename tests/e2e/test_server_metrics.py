"""``GET /metrics``: SGLang's own figures stay true with ``--kv-quant``, and the tiers add theirs."""

from __future__ import annotations

import threading
import time

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_kvq.constants import PAGE_SIZE
from tests.e2e.client import Client
from tests.e2e.conftest import ON_GPU
from tests.e2e.test_serving import CHAT, STRICT

TOKENS = 4096
#: Recent tokens in the window of ``CHAT``'s server.
RECENT = 64
#: Tokens to generate: the server must still decode when its figures are read, which takes a busy machine a second.
ANSWER = 1200 if ON_GPU else 300


@pytest.fixture
def client(servers) -> Client:
    client = Client(servers(*CHAT, env=STRICT, model=servers.shallow))
    client.flush()
    return client


def scrape(client: Client) -> dict[str, float]:
    """Returns values by name, followed by the tier in brackets if there is one; the server has one worker."""
    response = requests.get(f"{client.url}/metrics", timeout=300)
    assert response.status_code == 200
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            tier = sample.labels.get("tier")
            found[f"{sample.name}[{tier}]" if tier else sample.name] = sample.value
    return found


def eventually(client: Client, holds, timeout: float = 300) -> dict[str, float]:
    """Returns the first scrape for which ``holds(values)``; SGLang writes figures every few steps and when idle."""
    deadline = time.time() + timeout
    while not holds(values := scrape(client)):
        assert time.time() < deadline, {k: v for k, v in values.items() if "token" in k or "kvq" in k}
        time.sleep(0.2)
    return values


def test_figures_of_a_running_request_and_of_an_idle_server(client):
    written = scrape(client).get("sglang_kvq_quantized_pages_total", 0)
    prompt = list(range(200, 900))
    job = threading.Thread(target=client.generate, args=(prompt, ANSWER))
    job.start()

    def decoding(values: dict[str, float]) -> bool:
        assert job.is_alive(), "the request ended before a scrape saw it"
        return values.get("sglang:num_running_reqs") == 1 and values["sglang:decode_sum_seq_lens"] > 716

    busy = eventually(client, decoding)
    # The prompt and the decoded tokens fill whole pages; the next step may have begun one more.
    used, stored = busy["sglang:kv_used_tokens"], busy["sglang:decode_sum_seq_lens"]
    assert busy["sglang:num_used_tokens"] == used and used % PAGE_SIZE == 0 and 0 <= used - stored < 2 * PAGE_SIZE
    assert busy["sglang:token_usage"] == pytest.approx(used / TOKENS, abs=0.006)  # some releases round it
    assert (
        busy["sglang:kv_available_tokens"] + busy["sglang:kv_used_tokens"] + busy["sglang:kv_evictable_tokens"]
        == TOKENS
    )
    job.join()

    # All pages are quantized except the sink and the window's: most by the prefill, the others by decode steps.
    stored = len(prompt) + ANSWER - 1
    old = (stored - RECENT) // PAGE_SIZE - 1
    name = "sglang_kvq_quantized_pages_total"
    idle = eventually(client, lambda v: v["sglang:num_running_reqs"] == 0 and v[name] - written == old, timeout=300)
    assert idle["sglang:kv_used_tokens"] == 0 and idle["sglang:token_usage"] == 0
    whole = stored // PAGE_SIZE * PAGE_SIZE
    assert idle["sglang:kv_evictable_tokens"] == whole and idle["sglang:kv_available_tokens"] == TOKENS - whole

    state = client.state()
    assert idle["sglang_kvq_bits_per_element"] == pytest.approx(state["bits_per_element"], abs=1e-3)
    assert idle["sglang_kvq_info"] == 1
    assert idle["sglang_kvq_bf16_equivalent_tokens"] == state["bf16_tokens_same_memory"]
    assert idle["sglang_kvq_lost_window_pages"] == idle["sglang_kvq_held_back_requests"] == 0
    assert idle["sglang_kvq_pool_tokens[quantized]"] == state["tokens"] == TOKENS
    assert idle["sglang_kvq_pool_tokens[bf16]"] == state["bf16_pages"] * 64
    assert idle["sglang_kvq_held_tokens[quantized]"] == state["tiers"]["quantized_tokens"]
    held = lambda v: v["sglang_kvq_held_tokens[bf16]"] == state["tiers"]["bf16_tokens"]  # noqa: E731
    eventually(client, held, timeout=300)  # pages that the request gave back appear in the next report
    assert idle["sglang_kvq_held_tokens[quantized]"] == old * PAGE_SIZE


def test_an_error_that_a_plan_counts_is_logged_while_the_request_runs(servers, faulty):
    """``/metrics`` and ``/server_info`` count the error too; the idle check is off, because it would end the server."""
    env = {**faulty("counted_error"), "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}
    server = servers(*CHAT, env=env, fresh=True, model=servers.shallow)
    client, line = Client(server), "the cache counted errors on the device, 1 so far"
    job = threading.Thread(target=client.generate, args=(list(range(200, 900)), ANSWER))
    job.start()
    deadline = time.time() + 300
    while line not in server.log():
        assert job.is_alive(), "the request ended first"
        assert time.time() < deadline, server.log_tail()
        time.sleep(0.05)
    eventually(client, lambda v: v.get("sglang_kvq_errors_total") == 1, timeout=300)
    job.join()
    assert client.state()["errors"] == 1
    assert server.log().count(line) == 1
