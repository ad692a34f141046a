"""Several workers behind one server: tensor parallelism shards KV heads, data parallelism copies the model."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from transformers import AutoTokenizer

from sglang_kvq.sglang import compat
from tests.e2e.client import Client, held_out_text, together
from tests.e2e.conftest import STEADY
from tests.e2e.test_numbers import QUANTIZED
from tests.e2e.test_serving import STRICT, assert_empties

OSCAR = ("--kv-quant", "oscar", *QUANTIZED)
#: SmolLM2 has 3 KV heads and 9 query heads.
TP = 3
DP = 2


@pytest.fixture(scope="module", autouse=True)
def nothing_left(servers):
    """Stops all servers at the end, because a server of several workers takes the memory of two others."""
    yield
    servers.stop()


def needs_gpus(count: int) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs or none")


@pytest.fixture(scope="module")
def ids(model) -> list[int]:
    return AutoTokenizer.from_pretrained(model)(held_out_text()).input_ids[:700]


@pytest.fixture(scope="module")
def one_worker(servers, ids) -> torch.Tensor:
    """Returns the log-probabilities of a server of one worker, which stops when the larger one starts."""
    return torch.tensor(Client(servers(*OSCAR)).token_logprobs(ids))


@pytest.fixture
def three(servers, one_worker) -> Client:
    needs_gpus(TP)
    return Client(servers(*OSCAR, "--tp-size", str(TP), env={**STRICT, **STEADY}, alone=True))


def test_tensor_parallel_workers_compute_what_one_does(three, one_worker, ids):
    """Each worker has one KV head and its rotations; half of the prompt attends to quantized pages."""
    noise = (torch.tensor(three.token_logprobs(ids)) - one_worker).abs()
    print(f"TP {TP} differs from TP 1 by {noise.mean():.4f} on average, {noise.max():.4f} at most")
    # Another order of sums rounds BF16 logits differently: by 0.05 on average, even without quantization.
    assert noise.mean() < 0.1 and noise.max() < 1.5


def test_tensor_parallel_server_with_eight_requests_ends_empty(three, ids):
    """Prefill and decode mix, with shared sinks and private tails; then SGLang's strict idle check runs, and ours."""
    answer = three.ask("Complete with one word. The opposite of hot is")
    assert "cold" in answer.lower(), answer
    jobs = [lambda n=n: three.generate(ids[:130] + ids[200 + 20 * n : 300 + 40 * n], 12) for n in range(8)]
    replies = together(jobs)
    assert [len(reply["output_ids"]) for reply in replies] == [12] * 8
    assert_empties(three)


def test_flags_reach_every_data_parallel_worker(servers, ids):
    """Each worker has the whole configuration and its own cache; requests go to both."""
    needs_gpus(DP)
    # SGLang binds workers to NUMA nodes unless told otherwise; before 0.5.22 it counts only tensor-parallel ranks.
    bound = not torch.cuda.is_available() and compat.sglang_version() >= Version("0.5.22")
    env = {**STRICT, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"} if bound else STRICT
    client = Client(
        servers("--kv-quant", "hadamard", "--kv-quant-recent", "128", "--dp-size", str(DP), env=env, alone=True)
    )
    together([lambda n=n: client.generate(ids[n : n + 300], 4) for n in range(4)])
    states = client.states()
    assert len(states) == DP
    for state in states:
        assert (state["method"], state["recent_tokens"]) == ("hadamard", 128)
        assert state["tiers"]["bf16_tokens"] > 0, "a worker served nothing"
