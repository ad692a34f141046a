"""A model with sliding windows answers from pages and windows of the host as from pages that stayed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from benchmarks.tiny_models import MODELS, VOCABULARY
from benchmarks.tiny_server import TinyServer, body
from tests.e2e.conftest import ON_GPU, variables

LENGTH, CACHED = 340, 320
FLAGS = (
    *("--kv-quant", "int4", "--kv-quant-recent", "64", "--chunked-prefill-size", "128", "--context-length", "1024"),
    *("--max-total-tokens", "2048", "--max-running-requests", "1", "--enable-cache-report"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "3"),
)


@pytest.fixture
def server(plugins, tmp_path) -> Iterator[TinyServer]:
    env = variables(plugins("small_host"))
    env.pop("SGLANG_DISABLED_MODEL_ARCHS")
    made = TinyServer(MODELS["mellum"].write(tmp_path), FLAGS, cpu=not ON_GPU, log=tmp_path / "log", env=env)
    made.start()
    yield made
    made.stop(grace=0)


def ask(server: TinyServer, index: int) -> tuple[tuple[int, int], list[float]]:
    """Returns tokens found on device and host, and log-probabilities of the prompt's last tokens and the answer's."""
    rng = random.Random(index)
    prompt = [rng.randrange(2, VOCABULARY) for _ in range(LENGTH)]
    asked = body(prompt, 4, return_logprob=True, logprob_start_len=CACHED + 1)
    meta = server.json("/generate", asked)["meta_info"]
    found = meta.get("cached_tokens_details") or {}
    logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
    return (found.get("device") or 0, found.get("host") or 0), logprobs


def test_windows_come_back_from_the_host(server):
    for index in (0, 1, 2):
        assert ask(server, index)[0] == (0, 0)
    places, want = ask(server, 0)
    assert places == (CACHED, 0), "others have taken its BF16 pages since"
    for index in range(10, 18):
        ask(server, index)
    places, logprobs = ask(server, 0)
    assert places == (0, CACHED) and logprobs == want
    assert ask(server, 0) == ((CACHED, 0), want)
    assert not server.held_when_empty()
