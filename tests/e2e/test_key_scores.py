"""A server scores keys as ``benchmarks/research/episodes`` does in transformers, on the same model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.research.episodes.prefill import prefill
from benchmarks.research.episodes.runner import Runner
from benchmarks.research.episodes.scores import by_prompts
from sglang_kvq.attention.scores.token_choice import choose_tokens
from tests.e2e.client import Client, held_out_text

#: Tokens scored, and tokens of the prompt after them: with chunks of 128, both lie in several chunks.
PAST, PROMPT = 330, 90
#: Every page is in BF16 and nothing is rotated.
FLAGS = ("--kv-quant", "int2", "--kv-quant-recent", "1024", "--chunked-prefill-size", "128")


@pytest.fixture(scope="module")
def ids(model) -> list[int]:
    return AutoTokenizer.from_pretrained(model)(held_out_text()).input_ids[: PAST + PROMPT]


def served(servers, faulty, folder: Path, ids: list[int]) -> torch.Tensor:
    client = Client(servers(*FLAGS, env={**faulty("scored_requests"), "KVQ_TEST_SCORES": str(folder)}))
    name = f"scored-{PAST}-{len(ids)}"
    client.generate(ids, rid=name)
    client.generate(ids[:5])  # another prefill; the scores are written before it
    file, deadline = folder / f"{name}.pt", time.time() + 300
    while not file.exists():
        assert time.time() < deadline, "no scores were written"
        time.sleep(0.2)
    return torch.load(file)


def test_scores_are_those_of_the_oracle(servers, faulty, model, ids, tmp_path):
    """Scores agree but for BF16's rounding through 30 layers: in each head's correlation, and in the tokens kept."""
    got = served(servers, faulty, tmp_path, ids)
    runner = Runner(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    past, _ = prefill(runner, ids[:PAST], chunk=PAST)
    want = torch.stack([scores[0] for scores in by_prompts(runner, past, [ids[PAST:]], PAST)])
    assert got.shape == want.shape == (runner.layers, runner.kv_heads, PAST)
    alike = torch.stack([torch.corrcoef(pair)[0, 1] for pair in torch.stack([got, want], 2).flatten(0, 1)])
    kept, right = (choose_tokens(scores, 128, 4) for scores in (got, want))
    same = torch.isin(*(x + PAST * torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:2], 1) for x in (kept, right)))
    error = ((got - want).norm() / want.norm()).item()
    print(f"correlation at least {alike.min():.4f}, relative error {error:.4f}")
    print(f"{same.float().mean():.1%} of the kept tokens are the same")
    assert alike.min() > 0.99 and error < 0.03 and same.float().mean() > 0.97
