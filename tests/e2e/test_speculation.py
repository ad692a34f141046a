"""Speculation by n-grams: drafts come from the prompt and earlier answers, so any model can draft.

SGLang's CPU engine runs it with kernels that exist only on machines with AMX; ``speculation/`` replaces these.
"""

from __future__ import annotations

import random
from importlib.metadata import version

import pytest

from sglang_kvq.releases import NEW_TREE_RELEASES
from tests import ngrams
from tests.e2e.client import Client, together
from tests.e2e.conftest import ON_GPU
from tests.e2e.test_serving import PRESSED, assert_empties

DRAFTS = 4
NGRAM = (
    *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
    *("--speculative-num-draft-tokens", str(DRAFTS)),
)
#: Sinks and window hold every requested token, so all reads are BF16, with and without drafts.
COVERED = ("--kv-quant", "hadamard", "--kv-quant-recent", "1024", "--max-running-requests", "4")
QUANTIZED = ("--kv-quant", "hadamard", "--kv-quant-recent", "64", "--chunked-prefill-size", "192")
SMALL = ("--max-total-tokens", "2048", "--schedule-conservativeness", "0.01")
#: Log-probabilities closer than this are a tie in BF16: two steps of logits between 16 and 32.
TIE = 0.26


def kernels() -> dict[str, str]:
    return {} if ON_GPU else ngrams.on_cpu()


@pytest.fixture
def drafting(servers):
    return lambda *flags, env=None: Client(servers(*flags, *NGRAM, env={**(env or {}), **kernels()}))


def repetitive(seed: int, length: int) -> list[int]:
    """Returns a repeated phrase, which the model continues, so that drafts are accepted."""
    rng = random.Random(seed)
    phrase = [rng.randrange(500, 9000) for _ in range(12)]
    return (phrase * (length // 12 + 1))[:length]


def answer(client: Client, ids: list[int], tokens: int) -> tuple[list[int], dict]:
    """Returns greedy tokens and ``meta_info``."""
    reply = client.generate(ids, tokens, return_logprob=True, top_logprobs_num=2)
    return reply["output_ids"], reply["meta_info"]


def assert_same_but_for_ties(got: list[int], want: list[int], meta: dict) -> int:
    """Asserts equality up to the first near tie of the two likeliest tokens; returns how many tokens that is."""
    for n, (a, b) in enumerate(zip(got, want)):
        if a != b:
            best = meta["output_top_logprobs"][n]
            assert best[0][0] - best[1][0] < TIE, f"token {n}: {a} instead of {b}, of {best}"
            return n
    assert len(got) == len(want)
    return len(got)


def test_answers_are_those_without_drafts(servers, drafting):
    """Answers equal those without drafts, alone, together and after a prefix hit; each token is stored once."""
    prompts = [repetitive(seed, length) for seed, length in ((1, 61), (2, 190))]
    plain = Client(servers(*COVERED))
    want = [answer(plain, ids, 30) for ids in prompts]
    client = drafting(*COVERED)
    alone = [answer(client, ids, 30) for ids in prompts]
    crowd = together([lambda ids=ids: answer(client, ids, 30) for ids in prompts])
    same = [
        assert_same_but_for_ties(got, tokens, meta)
        for found in (alone, crowd)
        for (got, _), (tokens, meta) in zip(found, want)
    ]
    steps = sum(meta["spec_verify_ct"] for _, meta in alone)
    print("tokens equal:", same, "of 30; verified in", steps, "steps")
    assert steps < 56, "no draft was accepted, so nothing was shown"
    assert sum(same) > 60
    longer = prompts[1] + alone[1][0] + [7, 8, 9]
    tokens, meta = answer(client, longer, 12)
    assert meta["cached_tokens"] >= 192
    assert_same_but_for_ties(tokens, *answer(plain, longer, 12))
    assert_empties(client)


def test_histories_aborts_and_retraction(drafting):
    """Drafts follow a quantized history; requests end in the middle of an accepted chain; both pools end empty."""
    client = drafting(*QUANTIZED, *SMALL, env=PRESSED)
    prompt = repetitive(5, 400)
    first, _ = answer(client, prompt, 40)
    state = client.state()
    assert state["tiers"]["quantized_tokens"] >= 192
    assert state["shared_memory"] == (version("sglang") in NEW_TREE_RELEASES)
    _, meta = answer(client, prompt, 4)
    assert meta["cached_tokens"] == 384
    stop = client.post(
        "/generate",
        input_ids=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": 60, "stop_token_ids": first[2:]},
    ).json()
    assert stop["meta_info"]["finish_reason"]["type"] == "stop"

    def one(n: int) -> str:
        ids = repetitive(n % 3, 150 + 60 * n)
        if n % 3 == 2:
            chunks = client.stream(ids, 400)
            next(chunks)
            chunks.close()  # closing the connection aborts the request
            return "aborted"
        return f"{len(client.generate(ids, 40)['output_ids'])} tokens"

    results = together([lambda n=n: one(n) for n in range(6)])
    assert sorted(set(results)) == ["40 tokens", "aborted"], results
    assert_empties(client)
