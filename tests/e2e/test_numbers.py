"""What the server computes: equal to plain BF16 where it must be, and close to it where it may differ."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from tests.e2e.client import Client, coarse_kl, held_out_text

#: Chunks this short make most of a prompt attend to a stored, quantised prefix.
CHUNKED = ("--chunked-prefill-size", "128")
#: BF16 must read its prefix from the cache in the same chunks.
PLAIN = ("--page-size", "64", *CHUNKED)


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    ids = AutoTokenizer.from_pretrained(model)(held_out_text()).input_ids
    return [ids[at : at + 1200] for at in (0, 6000)]


def test_without_rotation_and_with_every_page_in_bf16_nothing_changes(servers, prompts):
    ids = prompts[0][:600]
    plain = Client(servers("--page-size", "64")).token_logprobs(ids, 20)
    ours = Client(servers("--kv-quant", "int2", "--kv-quant-recent", "1024")).token_logprobs(ids, 20)
    assert len(plain) == len(ours) >= 600
    worst = max(abs(a - b) for a, b in zip(plain, ours))
    print(f"largest difference of {len(plain)} log-probabilities: {worst:.2e}")
    assert worst < 2e-2


def test_divergence_from_bf16_falls_with_better_methods(servers, prompts):
    """Per-token KL on held-out text through the real cache: oscar < hadamard < int2."""
    reference = [Client(servers(*PLAIN)).distributions(ids, 32) for ids in prompts]
    kl = {}
    for method in ("oscar", "hadamard", "int2"):
        client = Client(servers("--kv-quant", method, *CHUNKED))
        places = []
        for ids, want in zip(prompts, reference):
            got = client.distributions(ids, 128)
            places += [coarse_kl(p, q) for p, q in list(zip(want, got))[512:]]
        kl[method] = sum(places) / len(places)
        print(f"KL({method}) = {kl[method]:.4f} nats per token over {len(places)} tokens")
    assert kl["oscar"] < kl["hadamard"] < kl["int2"]
    assert kl["oscar"] < 0.5 * kl["int2"]


def test_oscar_answers_sensibly(servers):
    client = Client(servers("--kv-quant", "oscar", *CHUNKED))
    body = {"model": "m", "temperature": 0, "max_tokens": 30}
    ask = [{"role": "user", "content": "Complete with one word. The opposite of hot is"}]
    answer = client.post("/v1/chat/completions", messages=ask, **body).json()["choices"][0]["message"]["content"]
    assert "cold" in answer.lower(), answer
