"""``--kv-canary`` with ``--kv-quant`` is silent while all is well, and reports a fault's token and position.

On a CPU the canary runs SGLang's own torch references of its kernels (``server_faults.py``); its buffers, plans,
sweeps, perturbations and reports are those of a GPU.
"""

from __future__ import annotations

import contextlib
import re
import time

import pytest
import requests
from sglang.test.kv_canary.violation_log_utils import assert_no_violation_in_log, find_violation_in_log

from tests.e2e.client import Client
from tests.e2e.conftest import ON_GPU

FLAGS = ("--kv-quant", "hadamard", "--kv-quant-recent", "64", "--kv-canary", "raise", "--kv-canary-sweep-interval", "8")


@pytest.fixture
def canary(servers, faulty):
    """``canary(*faults, **variables)`` returns a server that only the canary checks."""

    def start(*faults: str, **variables: str):
        env = {
            **faulty(*faults, *(() if ON_GPU else ("canary_on_cpu",))),
            # The canary's host part also has Triton kernels, which note a pass's phase and copy expected tokens.
            **({} if ON_GPU else {"TRITON_INTERPRET": "1"}),
            "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1",
            "SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS": "10",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "0",
        }
        return servers(*FLAGS, env={**env, **variables}, fresh=True)

    return start


def _stops(server, work) -> str:
    """Returns the log of a server that must end itself during ``work``, a callable that may fail."""
    with contextlib.suppress(requests.RequestException, AssertionError):
        work()
    deadline = time.time() + 300
    while server.running:
        assert time.time() < deadline, f"the server still runs\n{server.log_tail()}"
        time.sleep(0.2)
    return server.log()


def test_turns_prefixes_and_aborts_raise_nothing(canary):
    server = canary()
    client = Client(server)
    base = list(range(200, 400))
    first = client.generate(base, 10)
    again = client.generate(base + first["output_ids"] + [5, 6, 7], 6)
    assert again["meta_info"]["cached_tokens"] >= 128
    # In a batch of two cold requests with a common prefix, one row is pointed to the other's pages.
    client.generate([list(range(1000, 1000 + n)) for n in (150, 300)], 6)
    chunks = client.stream(base, 400)
    next(chunks)
    chunks.close()  # closing the connection aborts the request
    client.generate(base[:150] + base[:100], 6)
    client.flush()
    client.generate(base, 8)
    log = server.log()
    assert server.running and "attacher=attach_kv_quant" in log
    assert_no_violation_in_log(log)
    protected, sweeps = map(int, re.findall(r"protected_tokens=(\d+) sweep_passes=(\d+)", log)[-1])
    print(f"{protected} tokens verified, {sweeps} sweeps of the prefix cache")
    assert protected > 1000 and sweeps > 1


def test_a_row_that_points_elsewhere_is_found(canary):
    """SGLang's own perturbation overwrites one entry of ``req_to_token`` with another."""
    server = canary(SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB="1.0", SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS="12")
    client = Client(server)
    log = _stops(server, lambda: client.generate(list(range(200, 400)), 40))
    assert "kv_canary perturb req_to_token: req_pool_idx=" in log
    # In a decode graph SGLang gives its kernel no expected tokens; there history and position reveal the fault.
    for reason in ("verify_chain_hash", "verify_position", *(() if ON_GPU else ("verify_token",))):
        assert find_violation_in_log(log, launch_tag_patterns=("HEAD_K_FULL", "TAIL_K_FULL"), fail_reason=reason), (
            reason
        )


def test_a_page_handed_out_twice_is_found(canary):
    server = canary("page_given_twice")
    client = Client(server)
    first, second = list(range(200, 500)), list(range(900, 1200))

    def work():
        client.generate(first, 2)
        client.generate(second, 2)
        client.generate(first, 8)

    log = _stops(server, work)
    assert find_violation_in_log(log, launch_tag_patterns=("*_K_FULL",), fail_reason="verify_token")
