"""Records and BF16 pages of a server share one memory; the boundary moves as requests come, and back again."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from sglang_kvq.releases import NEW_TREE_RELEASES
from tests.e2e.client import Client
from tests.e2e.test_serving import STRICT, assert_empties
from tests.e2e.test_soft_windows import prompt

pytestmark = pytest.mark.skipif(version("sglang") not in NEW_TREE_RELEASES, reason="older releases divide it once")
#: More tokens than fit, so only memory sets the limit: whole windows of about fifteen requests, or 550 pages.
FLAGS = (
    *("--kv-quant", "hadamard", "--max-total-tokens", "1000000", "--chunked-prefill-size", "512"),
    *("--max-running-requests", "32"),
)
MANY = 12


def test_the_boundary_follows_the_requests(servers, plugins):
    client = Client(servers(*FLAGS, env={**STRICT, **plugins("small_memory")}, model=servers.shallow))
    state = client.state()
    assert state["shared_memory"] and state["bf16_pages"] is None
    assert MANY <= state["requests_with_whole_windows"] < state["max_running_requests"] == 32
    alone = client.generate(prompt(3, 420), 12)["output_ids"]
    few = client.state()["room"]
    client.flush()  # a cached prefix would be read from records
    # One HTTP request for all: on a slow host, the first of several could end before the last arrives.
    answers = [answer["output_ids"] for answer in client.generate([prompt(i, 420) for i in range(MANY)], 20)]
    many = client.state()["room"]
    assert many["bf16_pages"] >= 6 * MANY > few["bf16_pages"], "whole windows of all of them"
    assert many["pages"] < few["pages"]
    assert [len(answer) for answer in answers] == [20] * MANY
    assert answers[3][:2] == alone[:2]
    for index in range(100, 107):  # cached prefixes take the memory back while no request needs it
        client.generate(prompt(index, 1900), 1)
    cached = client.state()["room"]
    assert cached["pages"] > many["pages"] and cached["bf16_pages"] < many["bf16_pages"]
    client.flush()
    assert client.generate(prompt(3, 420), 12)["output_ids"] == alone
    assert client.state()["errors"] == 0
    assert_empties(client)
