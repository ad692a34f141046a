"""Many more requests run than have whole windows, and nothing is lost: of BF16 pages that are few, and in a memory that
they share with records."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from sglang_kvq.releases import NEW_TREE_RELEASES
from tests.e2e.client import Client, together
from tests.e2e.test_serving import STRICT, assert_empties

#: Sixteen requests, whose windows have six BF16 pages each.
FLAGS = (
    *("--kv-quant", "hadamard", "--max-total-tokens", "16384", "--max-running-requests", "16"),
    *("--chunked-prefill-size", "512", "--kv-quant-bf16-budget", "0.1"),
)
STREAMS = 16
#: A memory with whole windows for eight requests beside all its pages.
SHARED = ("--kv-quant", "hadamard", "--max-total-tokens", "16384", "--chunked-prefill-size", "512")
MANY = 24


def prompt(index: int) -> list[int]:
    return [200 + (7 * i + 31 * index) % 5000 for i in range(420)]


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
    alone = soft.generate(prompt(3), 40)["output_ids"]
    soft.flush()
    answers = together([lambda i=i: soft.generate(prompt(i), 70)["output_ids"] for i in range(STREAMS)])
    assert [len(answer) for answer in answers] == [70] * STREAMS
    assert answers[3][:2] == alone[:2]  # later ones read recent pages from records
    assert soft.state()["errors"] == 0
    assert_empties(soft)


@pytest.mark.skipif(version("sglang") not in NEW_TREE_RELEASES, reason="older releases divide the memory once")
def test_requests_share_a_memory_with_their_windows(servers):
    """The boundary moves as they come, their windows shrink evenly, and the whole cache still serves one request."""
    client = Client(servers(*SHARED, env=STRICT, model=servers.shallow))
    state = client.state()
    assert state["shared_memory"] and state["bf16_pages"] is None
    assert 8 <= state["requests_with_whole_windows"] < MANY < state["max_running_requests"]
    long = [300 + i % 7000 for i in range(7000)]
    alone = [client.generate(tokens, 12)["output_ids"] for tokens in (prompt(3), long)]
    few = client.state()["room"]
    client.flush()
    answers = together([lambda i=i: client.generate(prompt(i), 70)["output_ids"] for i in range(MANY)])
    many = client.state()["room"]
    assert many["bf16_pages"] > few["bf16_pages"] and many["pages"] < few["pages"]
    assert [len(answer) for answer in answers] == [70] * MANY
    assert answers[3][:2] == alone[0][:2]  # later ones read recent pages from records
    assert f"#running-req: {MANY}" in servers(*SHARED, env=STRICT, model=servers.shallow).log()
    assert client.generate(long, 12)["output_ids"][:8] == alone[1][:8]
    assert client.state()["errors"] == 0
    assert_empties(client)
