"""Urgent requests preempt running ones, which later continue where they stopped."""

from __future__ import annotations

import re
import time

import pytest

from benchmarks.answers import another_page, check, greedy
from benchmarks.tiny_models import VOCABULARY
from launch.server import Server
from tests.e2e.client import Client, together
from tests.e2e.modes.tiny import FLAGS, OURS, write
from tests.e2e.test_serving import assert_empties
from tests.gpu.families import ROUNDING, prompt

#: Two requests run at a time, so an urgent request needs the row of another.
PRIORITIES = ("--max-running-requests", "2", "--enable-priority-scheduling", "--decode-log-interval", "4")
#: SGLang's check between steps counts the tokens of two batches, and a preempted request is in neither.
ENV = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}
ANSWER = 120


@pytest.fixture(scope="module")
def server(servers, tmp_path_factory) -> Server:
    """Returns a server whose windows may shrink, so that waiting requests also lose BF16 pages."""
    flags = (*FLAGS, *OURS, "--kv-quant-recent-min", "64", *PRIORITIES)
    return servers(*flags, model=write(tmp_path_factory.mktemp("priorities")), env=ENV)


def test_preempted_requests_come_back_with_their_answers(server):
    low = [prompt(f"low {n}", 400 + 90 * n) for n in range(2)]
    high = [prompt(f"high {n}", 300 + 64 * n) for n in range(3)]

    def later(n: int) -> dict:
        deadline = time.monotonic() + 300
        while not re.search("Decode batch, #running-req: 2", server.log()):
            assert time.monotonic() < deadline, "two requests never ran at once"
            time.sleep(0.05)
        return greedy(server, high[n], ANSWER // 4, priority=100)  # above the threshold of 10

    replies = together(
        [lambda ids=ids: greedy(server, ids, ANSWER, priority=0) for ids in low]
        + [lambda n=n: later(n) for n in range(len(high))]
    )
    moved = [reply["meta_info"]["num_retractions"] for reply in replies]
    found = [check(server, ids, reply) for ids, reply in zip(low + high, replies)]
    wrong = check(server, another_page(low[0], 1, 0, VOCABULARY), replies[0], cached=0)
    print(f"pushed out {moved} times; differences {[str(each) for each in found]}; a wrong page: {wrong}")
    assert sum(moved[:2]) > 0 and not any(moved[2:]), "no request was preempted, or an urgent one"
    assert [each.tokens for each in found] == [ANSWER] * 2 + [ANSWER // 4] * 3
    # A preempted request's answer becomes prompt, so its pages are quantized with other tokens than while decoding.
    assert max(each.mean for each in found) < 3 * ROUNDING < wrong.mean / 2
    assert Client(server).state()["errors"] == 0
    assert_empties(Client(server))
