"""What the server computes: equal to plain BF16 where it must be, and close to it where it may differ."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from launch.run_tests import NEWEST
from tests.e2e.client import Client, coarse_kl, held_out_text

#: Chunks this short make most of a prompt attend to a stored, quantised prefix.
CHUNKED = ("--chunked-prefill-size", "128")


BASIC = ("oscar", "hadamard", "int2")
#: Each takes a server. Older releases differ in what calls the cache, not in what it computes: a few must do there.
METHODS = BASIC if version("sglang") != NEWEST else (*BASIC, "int4", "turboquant", "oscar-lloyd-max", "kivi")


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    ids = AutoTokenizer.from_pretrained(model)(held_out_text()).input_ids
    return [ids[at : at + 1200] for at in (0, 6000)]


def test_without_rotation_and_with_every_page_in_bf16_nothing_changes(servers, prompts):
    """Log-probabilities are plain BF16's; on a GPU, as near as those of two of SGLang's own backends are."""
    ids = prompts[0][:600]

    def logprobs(*flags: str) -> torch.Tensor:
        return torch.tensor(Client(servers(*flags)).token_logprobs(ids, 20))[: len(ids) - 1]

    plain = logprobs()
    ours = (logprobs("--kv-quant", "int2", "--kv-quant-recent", "1024") - plain).abs()
    print(f"{len(plain)} log-probabilities differ by {ours.mean():.2e} on average, {ours.max():.2e} at most")
    assert len(plain) >= 500
    if torch.cuda.is_available():
        other = (logprobs("--attention-backend", "flashinfer") - plain).abs()
        print(f"those of FlashInfer and Triton by {other.mean():.2e} and {other.max():.2e}")
        assert ours.mean() < 1.5 * other.mean() and ours.max() < 2 * other.max()
    else:
        assert ours.max() < 2e-2


def test_divergence_from_bf16_falls_with_better_methods(servers, prompts):
    """Per-token KL on held-out text through the real cache."""
    reference = [Client(servers(*CHUNKED)).distributions(ids, 32) for ids in prompts]
    kl = {}
    for method in METHODS:
        client = Client(servers("--kv-quant", method, *CHUNKED))
        places = []
        for ids, want in zip(prompts, reference):
            got = client.distributions(ids, 128)
            places += [coarse_kl(p, q) for p, q in list(zip(want, got))[512:]]
        kl[method] = sum(places) / len(places)
        print(f"KL({method}) = {kl[method]:.4f} nats per token over {len(places)} tokens")
    assert kl["oscar"] < kl["hadamard"] < kl["int2"] and kl["oscar"] < 0.5 * kl["int2"]
    if METHODS == BASIC:
        return
    assert kl["oscar"] < kl["kivi"] < kl["int2"]
    assert kl["oscar-lloyd-max"] < 1.1 * kl["oscar"]  # of an eighth of a bit less
    assert kl["int4"] < kl["turboquant"] < kl["oscar"] and kl["int4"] < 0.01  # 4 and 3 bits


def test_oscar_answers_sensibly(servers):
    client = Client(servers("--kv-quant", "oscar", *CHUNKED))
    answer = client.ask("What is the capital of France?")
    assert "paris" in answer.lower(), answer


def test_server_info_tells_the_rotations_and_the_hooks(servers):
    state = Client(servers("--kv-quant", "oscar", *CHUNKED)).state()
    folder = Path(state["rotations"])
    assert folder.name == "smollm2-135m-instruct"
    assert state["rotations_sha256"] == hashlib.sha256((folder / "rotations.safetensors").read_bytes()).hexdigest()
    assert state["hooks"]["applied"] == state["hooks"]["expected"] > 15
