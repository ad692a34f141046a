"""Two pipeline stages answer as one does, over quantized pages, cached prefixes, and micro-batches that take turns."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import requests
import torch
from packaging.version import Version

from benchmarks.tiny_models import MODELS, VOCABULARY
from sglang_kvq.sglang import compat
from tests.e2e.client import Client, together
from tests.e2e.test_serving import PRESSED, assert_empties

#: Two stages have 2 and 3 layers, so their pages differ in bytes.
LAYERS = 5
#: Flags that divide the memory once, as for stages. Prefills read history from records, like decode steps.
FLAGS = (
    *("--skip-tokenizer-init", "--kv-quant", "turboquant", "--kv-quant-bf16-budget", "0.3"),
    *("--kv-quant-recent", "128", "--kv-quant-prefill-window", "0", "--chunked-prefill-size", "256"),
)
#: Every request is its own batch, so the answers do not depend on other requests and are equal bit by bit.
ALONE = ("--pp-size", "2", "--pp-max-micro-batch-size", "1")
TOKENS = 8
#: Before 0.5.22, SGLang counts only tensor-parallel ranks when it binds workers to cores, so stages share a core.
ENV = {} if compat.sglang_version() >= Version("0.5.22") else {"SGLANG_CPU_OMP_THREADS_BIND": "0"}
#: Largest difference of log-probabilities; those of two plain servers differ by up to 0.07 if requests share batches.
NOISE = 0.2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Writes a model with its own output head, because not every release's stages share tied embeddings."""
    return replace(MODELS["llama"], name="llama_stages", layers=LAYERS).write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ids() -> list[int]:
    draw = torch.Generator().manual_seed(5)
    return torch.randint(2, VOCABULARY, (4000,), generator=draw).tolist()


def long_history(client: Client, ids: list[int]) -> list:
    """Sends a prompt of three chunks, then another behind the same prefix; returns both answers."""
    first = client.token_logprobs(ids[:700], 40)
    again = client.generate(ids[:640] + ids[900:990], 40, return_logprob=True)
    assert again["meta_info"]["cached_tokens"] == 640
    return [first, again["output_ids"], again["meta_info"]["output_token_logprobs"]]


def pairs(ids: list[int]) -> list[tuple[list[int], list[int]]]:
    """Returns prompts for two requests at once; the second is 0 to 3 tokens longer."""
    return [(ids[1000 + 100 * n :][:40], ids[2000 + 100 * n :][: 40 + n]) for n in range(4)]


def answer(client: Client, prompt: list[int], tokens: int = TOKENS) -> list:
    return _parts(client.generate(prompt, tokens, return_logprob=True))


def _parts(reply: dict) -> list:
    """Returns tokens and their log-probabilities."""
    return [reply["output_ids"], [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]]]


@pytest.fixture(scope="module")
def one(servers, tiny, ids) -> dict:
    """Returns the answers of a server with one stage, to one prompt after another."""
    client = Client(servers(*FLAGS, model=tiny))
    said = {"long": long_history(client, ids), "prompts": {}}
    client.flush()
    for prompt in [prompt for pair in pairs(ids) for prompt in pair] + crowd(ids):
        said["prompts"][tuple(prompt)] = answer(client, prompt)
    return said


def crowd(ids: list[int]) -> list[list[int]]:
    """Returns more prompts than fit in the cache, each in one chunk, because SGLang batches parts of several."""
    return [ids[140 * n :][:250] for n in range(18)]


@pytest.fixture(scope="module")
def two(servers, tiny, one) -> Client:
    return Client(servers(*FLAGS, *ALONE, model=tiny, env=ENV, alone=True))


def test_a_long_history_reads_the_same_pages(two, one, ids):
    assert long_history(two, ids) == one["long"]
    state = two.state()
    assert state["tiers"]["quantized_tokens"] >= 512 and state["errors"] == 0
    two.flush()


def test_micro_batches_take_turns(two, one, ids):
    """Each answers as alone; ``tests/sglang/attention/test_turns.py`` covers lengths that follow each other."""
    for pair in pairs(ids):
        said = [_parts(reply) for reply in two.generate(list(pair), TOKENS, return_logprob=True)]  # arrive together
        assert said == [one["prompts"][tuple(prompt)] for prompt in pair]


def test_stages_evict_in_step(two, one, ids):
    """More tokens arrive than fit; then SGLang's strict checks and ours run in both stages."""
    prompts = crowd(ids)
    said = together([lambda prompt=prompt: answer(two, prompt) for prompt in prompts])
    assert said == [one["prompts"][tuple(prompt)] for prompt in prompts]
    assert_empties(two)


def test_stages_retract_in_step(servers, tiny, two, one, ids):
    """With batches of several requests, chunks and an abort, both stages retract equally many requests."""
    server = servers(*FLAGS, "--pp-size", "2", model=tiny, env={**PRESSED, **ENV}, alone=True)
    client = Client(server)

    def leave() -> list:
        requests.post(f"{client.url}/generate", json={"input_ids": ids[:300], "stream": True}, stream=True).close()
        return []

    prompts = crowd(ids)[:6]
    asked = [*prompts, *(ids[300 * n :][:600] for n in range(2))]
    # One HTTP request for all: on a slow host, the first of several could end before the last arrives.
    replies, _ = together([lambda: client.generate(asked, 40, return_logprob=True), leave])
    said = [_parts(reply) for reply in replies]
    assert [len(tokens) for tokens, _ in said] == [40] * 8
    for prompt, (_, logprobs) in zip(prompts, said):
        assert abs(logprobs[0] - one["prompts"][tuple(prompt)][1][0]) < NOISE
    assert_empties(client)
    retracted = [re.findall(rf" {stage}\] .*#retracted_reqs: (\d+)", server.log()) for stage in ("PP0", "PP1")]
    assert retracted[0] == retracted[1] and len(retracted[0]) > 0
