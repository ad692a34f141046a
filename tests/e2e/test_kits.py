"""SGLang's own kits (``tests/gpu/kits.py``) on our servers, sized for a CPU, and on plain SGLang where that is cheap.

SGLang checks all servers here after every step; the last tests show that those checks find what is lost.
"""

from __future__ import annotations

import time

import pytest
import requests

from tests.e2e.client import Client
from tests.e2e.test_bf16 import WIDE
from tests.gpu import kits

#: Everything except sinks and 64 recent tokens is read in 4 bits.
OURS = ("--kv-quant", "int4", "--kv-quant-recent", "64", "--enable-streaming-session", "--allow-auto-truncate")
SERVERS = {"plain": (), "wide": WIDE, "ours": OURS}  # the first two are left running by ``test_bf16``
#: Largest KL between decoding and prefilling, as the kits measure it: BF16's own noise, and that plus 4 bits'.
MOST_KL = {"plain": 0.005, "wide": 0.005, "ours": 0.02}


@pytest.fixture
def target(servers, request) -> kits.Target:
    name = request.param
    return kits.Target(servers(*SERVERS[name]).url, kits.CPU, kl=MOST_KL[name])


def against(*names: str):
    return pytest.mark.parametrize("target", names, indirect=True)


if kits.available("jitter"):  # 0.5.16 has none

    @against("wide")
    def test_scores_do_not_depend_on_the_batch(target):
        print(kits.jitter(target))


@against("wide", "plain", "ours")
def test_turns_decode_what_a_prefill_computes(target):
    print(kits.multiturn_kl(target))


@against("plain", "ours")
def test_branches_find_their_prefix(target):
    print(kits.branching(target))


@against("ours")
@pytest.mark.parametrize("kit", ["cache_hit", "radix_tree", "abort_all", "pause", "streaming_sessions"])
def test_kit(target, kit):
    print({**kits.KITS, **kits.MORE}[kit](target))


def test_requests_that_run_into_their_time_limit(servers):
    # On a slow machine SGLang's own warm-up would run into the limit and end the server.
    server = servers(*OURS, "--skip-server-warmup", env={"SGLANG_REQ_RUNNING_TIMEOUT": "3"})
    print(kits.running_timeout(kits.Target(server.url, kits.CPU)))
    client = Client(server)
    client.flush()  # requests that ran into their limit hold nothing
    time.sleep(1)
    assert requests.get(f"{client.url}/health", timeout=300).status_code == 200


def _log_of_the_end(server, *work) -> str:
    """Returns the log of a server that must end itself; ``work``: requests that it may leave unanswered."""
    for ids, tokens in work:
        try:
            Client(server).generate(ids, tokens)
        except (requests.RequestException, AssertionError):
            break
    deadline = time.time() + 300
    while server.running:
        assert time.time() < deadline, f"the server still runs\n{server.log_tail()}"
        time.sleep(0.2)
    return server.log()


def test_a_lost_page_is_found_while_requests_run(servers, faulty):
    """The check when idle is off, so the one after every step must find the lost page."""
    env = {**faulty("lost_page"), "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}
    server = servers(*OURS, env=env, fresh=True)
    log = _log_of_the_end(server, (list(range(100, 230)), 4), (list(range(300, 330)), 30))
    assert "Full Pool Mem Leak Detected!" in log and "self_check_during_busy" in log


def test_a_lost_bf16_page_is_found_when_idle(servers, faulty):
    server = servers(*OURS, env=faulty("lost_bf16_page"), fresh=True)
    log = _log_of_the_end(server, (list(range(100, 230)), 4))
    assert "kv-quant memory leak detected! KV cache integrity: a free page still has a BF16 slot" in log
