"""Results of the server that may differ from plain BF16's: they are close, and closer with better methods."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.e2e.client import Client, coarse_kl, held_out_text

#: Chunks this short make most of a prompt attend to a stored prefix.
CHUNKED = ("--chunked-prefill-size", "128")
#: Flags that also quantize that prefix.
QUANTIZED = (*CHUNKED, "--kv-quant-prefill-window", "0")
#: Methods that each take a server; the last one also serves the tests below and ``test_parallel``.
METHODS = ("int4", "transform", "oscar")
#: Methods that are measured only with ``--all``.
MORE = ("turboquant", "kivi", "hadamard", "int2")


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    ids = AutoTokenizer.from_pretrained(model)(held_out_text()).input_ids
    return [ids[at : at + 1000] for at in (0, 6000)]


@pytest.mark.timeout(1500)  # as many servers as methods
def test_divergence_from_bf16_falls_with_better_methods(servers, prompts, request):
    """Measures KL per token on held-out text, through the real cache."""
    more = MORE if request.config.getoption("--all") else ()
    reference = [Client(servers(*CHUNKED)).distributions(ids, 32) for ids in prompts]

    def divergence(method: str, *flags: str) -> float:
        client, divergences = Client(servers("--kv-quant", method, *flags)), []
        for ids, want in zip(prompts, reference):
            got = client.distributions(ids, 128)
            divergences += [coarse_kl(p, q) for p, q in list(zip(want, got))[448:]]
        mean = sum(divergences) / len(divergences)
        print(f"KL({method}) = {mean:.4f} nats per token over {len(divergences)} tokens")
        return mean

    near = divergence("oscar", *CHUNKED)
    kl = {method: divergence(method, *QUANTIZED) for method in (*more, *METHODS)}
    # Pages that left a prompt's window recently are read in BF16, unless a flag forbids it.
    assert near < 0.003 and near < 0.2 * kl["oscar"]
    assert kl["int4"] < kl["transform"] < 0.5 * kl["oscar"]  # the latter two in 2.5 bits
    assert kl["int4"] < 0.01 and kl["oscar"] < 0.1
    if more:
        assert kl["oscar"] < kl["hadamard"] < kl["int2"] and kl["oscar"] < 0.5 * kl["int2"]
        assert kl["oscar"] < kl["kivi"] < kl["int2"]
        assert kl["int4"] < kl["turboquant"] < kl["oscar"]  # 4 and 3 bits


def test_oscar_answers_sensibly(servers):
    client = Client(servers("--kv-quant", "oscar", *QUANTIZED))
    answer = client.ask("How many days are in a week?")  # BF16 prefers each token to the second likeliest, 1.7 to 1
    assert "7" in answer or "seven" in answer.lower(), answer


def test_server_info_tells_the_rotations_and_the_hooks(servers):
    state = Client(servers("--kv-quant", "oscar", *QUANTIZED)).state()
    folder = Path(state["rotations"])
    assert folder.name == "smollm2-135m-instruct"
    assert state["rotations_sha256"] == hashlib.sha256((folder / "rotations.safetensors").read_bytes()).hexdigest()
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    assert state["rotations_files"] == files and set(files) == {"rotations.safetensors", "config.json"}
    assert state["hooks"]["applied"] == state["hooks"]["expected"] > 15
