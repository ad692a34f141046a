"""EpiCache served end to end: each turn reads the oracle's episode, and nothing is left behind."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.research.episodes.blocks import Budget, build
from benchmarks.research.episodes.runner import Runner
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sessions.config import PROMPT_TOKENS
from sglang_kvq.sessions.embedding import unit
from sglang_kvq.sessions.episodes import MEDOIDS, cluster, medoids, patched_prompt
from tests.e2e import word_embeddings
from tests.e2e.client import held_out_text, together
from tests.e2e.test_serving import assert_empties
from tests.e2e.test_sessions import Sessions, logprobs

BUDGET, BLOCK, SEGMENT = 320, 128, 128
FLAGS = (
    *("--kv-quant", "hadamard", "--kv-quant-bits", "4", "--kv-quant-recent", "64", "--episodic-policy", "epicache"),
    *("--episodic-budget", str(BUDGET), "--episodic-block", str(BLOCK), "--episodic-episodes", "1"),
)
#: Largest mean difference of log-probabilities, for 4-bit histories on this model.
CLOSE = 0.15


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> tuple[str, str]:
    return word_embeddings.install(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def client(servers, words) -> Sessions:
    path, folder = words
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    return Sessions(servers(*FLAGS, "--episodic-embedder", folder, env={"PYTHONPATH": paths}))


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def text(tokenizer) -> list[int]:
    return tokenizer(held_out_text()).input_ids[:1000]


def prompt_of(tokenizer, words, ids: list[int]) -> list[int]:
    """Returns the patched prompt of a history's only episode."""
    texts = [tokenizer.decode(ids[at : at + SEGMENT]) for at in range(0, len(ids) // SEGMENT * SEGMENT, SEGMENT)]
    rows = unit(word_embeddings.SentenceTransformer(words[1], "cpu").encode(texts))
    chosen = medoids(rows, cluster(rows, 1), 0, MEDOIDS)
    return tokenizer.encode(patched_prompt([texts[i] for i in chosen]), add_special_tokens=False)[:PROMPT_TOKENS]


def expected(model, ids: list[int], folded: int, prompt: list[int], answer: list[int], recent: bool = False):
    """Returns the log-probabilities of an answer that reads the oracle's episode, or the most recent tokens instead."""
    runner = Runner(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    past, _ = build(runner, ids[:folded], [prompt], Budget((BUDGET,) * runner.layers, pinned=P), block=BLOCK)
    assert [k.shape[2] for k in past.k] == [BUDGET] * runner.layers
    if recent:
        past, _ = build(runner, ids[:folded], [prompt], Budget((folded,) * runner.layers, pinned=P), block=BLOCK)
        some = torch.cat([torch.arange(P), torch.arange(folded - BUDGET + P, folded)])
        past.k, past.v = [k[:, :, some] for k in past.k], [v[:, :, some] for v in past.v]
    new = torch.tensor([ids[folded:] + answer])
    hidden = runner.hidden(new, folded, past.attend)[0]
    return runner.logprobs(hidden[-len(answer) - 1 : -1], new[0, -len(answer) :]).tolist()


def test_an_answer_reads_the_oracles_episode(client, model, tokenizer, words, text):
    client.flush()
    answer = client.turn(text, "asked", 24)
    session = client.session("asked")
    folded = session["read"]["of_tokens"]
    assert folded == (len(text) - 1) // BLOCK * BLOCK or folded == (len(text) - BLOCK) // BLOCK * BLOCK
    assert session["hot_tokens"] == BUDGET + len(text) - folded and session["episodes"] == {"count": 1, "read": 0}
    prompt = prompt_of(tokenizer, words, text[:folded])
    got = logprobs(answer)
    want = expected(model, text, folded, prompt, answer["output_ids"])
    other = expected(model, text, folded, prompt, answer["output_ids"], recent=True)
    error, control = (np.abs(np.subtract(got, those)).mean() for those in (want, other))
    print(f"{error:.3f} from the oracle's, {control:.3f} from recent tokens'")
    assert error < CLOSE and error < control / 1.5
    assert answer["meta_info"]["prompt_tokens"] == len(text)


def test_within_the_budget_nothing_changes(client, text):
    client.flush()
    plain = client.turn(text[:BUDGET], None, 8)
    client.flush()
    ours = client.turn(text[:BUDGET], "short", 8)
    assert ours["output_ids"] == plain["output_ids"]
    assert ours["meta_info"]["output_token_logprobs"] == plain["meta_info"]["output_token_logprobs"]


def test_turns_fold_one_block_after_another(client, text):
    """Later blocks join the existing episode; when the same turn is sent again, everything is found."""
    client.flush()
    client.turn(text[:520], "growing", 4)
    before = client.session("growing")["read"]["of_tokens"]
    answer = client.turn(text[:700], "growing", 4)
    after = client.session("growing")["read"]["of_tokens"]
    assert before < after <= 700 and after % BLOCK == 0
    again = client.turn(text[:700], "growing", 4)
    assert again["output_ids"] == answer["output_ids"] and client.session("growing")["rebuilt"] == 0
    assert again["meta_info"]["cached_tokens"] >= after


def test_what_was_evicted_is_built_again(client, text):
    client.flush()
    first = client.turn(text[:600], "evicted", 6)
    client.flush()
    second = client.turn(text[:600], "evicted", 6)
    assert client.session("evicted")["rebuilt"] >= 1
    assert logprobs(second) == pytest.approx(logprobs(first), abs=1e-3)


def test_sessions_beside_each_other_and_plain_traffic(client, text):
    client.flush()
    prompts = [text[:560], text[100:700], text[:520][::-1]]
    alone = [logprobs(client.turn(ids, f"alone-{i}", 4)) for i, ids in enumerate(prompts)]
    plain = logprobs(client.turn(text[:500], None, 4))
    client.flush()
    jobs = [lambda ids=ids, i=i: logprobs(client.turn(ids, f"together-{i}", 4)) for i, ids in enumerate(prompts)]
    *many, other = together([*jobs, lambda: logprobs(client.turn(text[:500], None, 4))])
    for one, two in zip([*alone, plain], [*many, other]):
        assert two == pytest.approx(one, abs=CLOSE)


def test_nothing_is_left_behind(client, text):
    client.turn(text[:520], "gone", 4)
    assert client.delete("gone").status_code == 200
    assert_empties(client)
