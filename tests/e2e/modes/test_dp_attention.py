"""Data-parallel attention: each worker has whole requests and a cache of its own, and idles while others run."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.answers import another_page, check, greedy, token_difference
from benchmarks.tiny_models import VOCABULARY
from launch.server import Server
from tests.e2e.client import Client, together
from tests.e2e.modes.tiny import FLAGS, LONG, OURS, SHORT, after_windows, read, write
from tests.gpu.families import ROUNDING, prompt

WORKERS = 2
#: Of the server, whose workers share them.
REQUESTS = 8
LAYOUT = ("--tp-size", str(WORKERS), "--dp-size", str(WORKERS), "--enable-dp-attention")
#: SGLang's check between steps knows nothing of a worker's empty batches.
ENV = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}


@pytest.fixture(scope="module")
def start(servers, tmp_path_factory):
    """``start(*flags)``: a server alone. Qwen3's class, unlike Llama's, divides requests and not its heads."""
    if torch.cuda.is_available() and torch.cuda.device_count() < WORKERS:
        pytest.skip(f"needs {WORKERS} GPUs or none")
    model = write(tmp_path_factory.mktemp("parallel"), "qwen3")
    flags = (*FLAGS, *OURS, "--max-running-requests", str(REQUESTS))
    yield lambda *more: servers(*flags, *more, model=model, env=ENV if more else {}, alone=True)
    servers.stop()


@pytest.fixture(scope="module")
def one_worker(start) -> dict[str, list[float]]:
    server, long = start(), prompt("long", LONG)
    prompts = {"short": prompt("short", SHORT), "long": long, "wrong page": another_page(long, 1, 0, VOCABULARY)}
    return {name: read(server, ids) for name, ids in prompts.items()}


@pytest.fixture
def server(one_worker, start) -> Server:
    """Starts once one worker has said what it has to say."""
    return start(*LAYOUT)


def test_each_worker_answers_like_one_alone_while_the_other_idles(server, one_worker):
    wrong = after_windows(one_worker["wrong page"], one_worker["long"]).mean
    for rank in range(WORKERS):
        short, long = (
            read(server, prompt(name, n), routed_dp_rank=rank) for name, n in (("short", SHORT), ("long", LONG))
        )
        found = token_difference(short, one_worker["short"]), after_windows(long, one_worker["long"])
        print(f"worker {rank}: {found[0]}; with a history {found[1]}, a wrong page {wrong:.3f}")
        assert found[0].mean < ROUNDING and found[1].mean < wrong / 4
        held = [state["tiers"]["quantized_tokens"] > 0 for state in Client(server).states()]
        assert held == [worker <= rank for worker in range(WORKERS)], "a worker served another's request"


def test_workers_share_the_running_requests(server):
    states = Client(server).states()
    assert [state["max_running_requests"] for state in states] == [REQUESTS // WORKERS] * WORKERS


def test_one_worker_decodes_while_the_other_prefills_and_idles(server):
    first, second = prompt("first", 300), prompt("second", 700)

    def later() -> dict:
        time.sleep(1.0)
        return greedy(server, second, 10, routed_dp_rank=1)

    replies = together([lambda: greedy(server, first, 80, routed_dp_rank=0), later])
    for rank, (ids, reply) in enumerate(zip((first, second), replies)):
        found = check(server, ids, reply, routed_dp_rank=rank)
        print(f"worker {rank}: {found}")
        assert found.mean < 3 * ROUNDING
    client = Client(server)
    client.flush()
    for rank in range(WORKERS):
        client.generate([1, 2, 3], 2, routed_dp_rank=rank)  # the next plan applies what was recorded
    client.flush()
    time.sleep(1)  # SGLang's idle check runs, and ours; a leak ends the server
    for state in client.states():
        assert state["errors"] == 0 and state["tiers"] == {"bf16_tokens": 0, "quantized_tokens": 0}
