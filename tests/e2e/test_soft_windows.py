"""``--kv-quant-recent-min`` on a server: many more requests run than there are whole windows, and nothing is lost."""

from __future__ import annotations

import pytest

from benchmarks.session_reference import ROUNDING
from tests.e2e.client import Client
from tests.e2e.test_serving import STRICT, assert_empties

#: Sixteen requests, each with a window of six BF16 pages.
FLAGS = (
    *("--kv-quant", "hadamard", "--max-total-tokens", "16384", "--max-running-requests", "16"),
    *("--chunked-prefill-size", "512", "--kv-quant-bf16-budget", "0.1"),
)
STREAMS = 16


def prompt(index: int, tokens: int = 420) -> list[int]:
    return [200 + (7 * i + 31 * index) % 5000 for i in range(tokens)]


@pytest.fixture
def soft(servers) -> Client:
    return Client(servers(*FLAGS, "--kv-quant-recent-min", "0", env=STRICT))


def test_requests_run_at_once_whose_windows_do_not_fit(soft, servers):
    whole = Client(servers(*FLAGS, env=STRICT)).state()
    state = soft.state()
    assert state["max_running_requests"] == STREAMS
    assert state["bf16_pages"] < 3 * STREAMS < 6 * STREAMS <= whole["bf16_pages"]
    whole_windows = state["requests_with_whole_windows"]
    assert 0 < whole_windows < STREAMS == whole["requests_with_whole_windows"]
    log = servers(*FLAGS, "--kv-quant-recent-min", "0", env=STRICT).log()
    assert f"at most {STREAMS} running requests, {whole_windows} of them with whole windows" in log
    alone = soft.generate(prompt(3), 40, return_logprob=True)["meta_info"]["output_token_logprobs"]
    soft.flush()
    # One HTTP request for all: on a slow host, the first of several could end before the last arrives.
    asked = soft.generate([prompt(i) for i in range(STREAMS)], 70, return_logprob=True)
    answers = [answer["meta_info"]["output_token_logprobs"] for answer in asked]
    assert [len(answer) for answer in answers] == [70] * STREAMS
    assert answers[3][0][1] == alone[0][1]
    # Two tokens may be almost as likely. Later tokens read recent pages from records.
    assert all(abs(one[0] - other[0]) < ROUNDING for one, other in zip(answers[3][:2], alone[:2]))
    assert soft.state()["errors"] == 0
    assert_empties(soft)
