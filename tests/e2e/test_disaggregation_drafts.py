"""A prefill server and a decode server with drafts answer as one server that drafts, in as many rounds."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch.server import Server
from sglang_kvq.server_process import free_port
from tests import ngrams
from tests.e2e.client import Client, together
from tests.e2e.test_disaggregation import QUANT, RETRACTED, RETRACTS, ROOM, Pair, any_engine, pytestmark  # noqa: F401 (a mark)
from tests.e2e.test_serving import STRICT
from tests.e2e.test_speculation import NGRAM, assert_same_but_for_ties, repetitive
from tests.gpu.speculation import CHAIN

#: Lengths of prompts and of their answers: one page, a page that ends, and histories in records.
LENGTHS = {40: 12, 128: 16, 310: 24, 700: 40}


@dataclass
class Drafting:
    """A pair of servers that drafts, and a single server's tokens and ``meta_info``, by length of the prompt."""

    way: str
    pair: Pair
    expected: dict[int, tuple[list[int], dict]]

    def answer(self, length: int, tokens: int) -> tuple[list[int], dict]:
        room, ids = random.getrandbits(30), prompt(self.way, length)
        both = (self.pair.prefill, self.pair.decode)
        _, reply = together([lambda s=s: self.pair.post(s, ids, tokens, room, top_logprobs_num=2) for s in both])
        assert reply.status_code == 200, reply.text
        return reply.json()["output_ids"], reply.json()["meta_info"]


def write_eagle(model: Path, folder: Path) -> Path:
    """Writes an EAGLE head that returns the model's hidden states, and so guesses the model's last token again.

    Its guesses are right while the model repeats itself, provided that the hidden states arrive.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        **{f"self_attn.{name}_proj": (size, hidden) for name, size in (("q", hidden), ("k", kv), ("v", kv))},
        **{"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)},
        **{"mlp.down_proj": (hidden, inner), "post_attention_layernorm": (hidden,)},
    }
    tensors = {f"layers.0.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    tensors["fc.bias"] = torch.zeros(hidden)
    save_file({name: x.bfloat16() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt(way: str, length: int) -> list[int]:
    """Returns a prompt that makes the model repeat itself, so that drafts are accepted."""
    return [28] * length if way == "EAGLE" else repetitive(length, length)


def flags_of(way: str, model: Path, folder: Path) -> tuple[str, ...]:
    if way == "NGRAM":
        return NGRAM
    draft = model if way == "STANDALONE" else write_eagle(model, folder)
    return ("--speculative-algorithm", way, "--speculative-draft-model-path", str(draft), *CHAIN)


@pytest.fixture(scope="module", params=["STANDALONE", "NGRAM", "EAGLE"])
def drafting(request, servers, plugins, tmp_path_factory) -> Drafting:
    """Starts one server for the expected answers, then the pair, for which the first one stops."""
    engine = any_engine()
    way, port, model = request.param, free_port(), servers.shallow
    drafts = flags_of(way, model, tmp_path_factory.mktemp("draft"))
    env = {**STRICT, **plugins("transfers_on_cpu", "drafting_on_cpu")}
    # N-grams need a compiler other than the one that torch finds; a draft's small functions need none.
    env |= ngrams.on_cpu(env["PYTHONPATH"]) if way == "NGRAM" else {"TORCHDYNAMO_DISABLE": "1"}
    env["PYTHONPATH"] = ngrams.on_cpu(env["PYTHONPATH"])["PYTHONPATH"]

    client = Client(servers(*QUANT, "--max-total-tokens", "4096", *drafts, env=env, model=model))
    expected = {}
    for length, tokens in LENGTHS.items():
        client.flush()  # also forgets the n-grams of earlier answers
        reply = client.generate(prompt(way, length), tokens, return_logprob=True, top_logprobs_num=2)
        expected[length] = reply["output_ids"], reply["meta_info"]

    role = (*QUANT, *ROOM, "--disaggregation-transfer-backend", engine, "--disaggregation-mode")
    first = (*role, "prefill", "--disaggregation-bootstrap-port", str(port), *(drafts if way != "NGRAM" else ()))
    prefill = servers(*first, env=env, model=model)
    decode = servers(*role, "decode", *drafts, env={**env, "KVQ_TEST_RETRACT": RETRACTS}, model=model)
    return Drafting(way, Pair(prefill, decode, port), expected)


def test_answers_and_rounds_are_those_of_one_server(drafting):
    """The pair needs as many rounds, so the first guess and the draft model's pages have arrived."""
    for length, tokens in LENGTHS.items():
        for server in (drafting.pair.prefill, drafting.pair.decode):
            server.drain()
        found, meta = drafting.answer(length, tokens)
        want, known = drafting.expected[length]
        print(drafting.way, length, found == want, meta["spec_verify_ct"], known["spec_verify_ct"])
        assert assert_same_but_for_ties(found, want, known) == tokens
        assert meta["spec_correct_drafts_histogram"] == known["spec_correct_drafts_histogram"]
    rounds = sum(known["spec_verify_ct"] for _, known in drafting.expected.values())
    assert rounds < 0.8 * sum(LENGTHS.values()), "almost no draft was accepted"
    assert_sound(drafting.pair.prefill, drafting.pair.decode)


def test_retracted_requests_go_on_with_their_drafts(drafting):
    before = drafting.pair.decode.log().count(RETRACTED)
    lengths = (310, 700)
    answers = together([lambda n=n: drafting.answer(n, 60) for n in lengths])
    retracted = drafting.pair.decode.log().count(RETRACTED) - before
    assert retracted > 0
    for length, (found, meta) in zip(lengths, answers):
        want, known = drafting.expected[length]
        print(drafting.way, length, retracted, meta["spec_verify_ct"], known["spec_verify_ct"])
        # A draft model that lost its pages would be right less often.
        assert drafting.way == "NGRAM" or meta["spec_verify_ct"] <= 60 / 4 + 2 * retracted
        assert assert_same_but_for_ties(found[: len(want)], want, known) > 8
    assert_sound(drafting.pair.prefill, drafting.pair.decode)


def test_both_caches_are_empty_in_the_end(drafting):
    both = (drafting.pair.prefill, drafting.pair.decode)
    for server in both:
        server.drain(120)
    assert len(drafting.answer(3, 2)[0]) == 2  # the next plan applies the recorded events
    for server in both:
        server.drain(120)
        assert server.kv_quant()["tiers"] == {"bf16_tokens": 0, "quantized_tokens": 0}
    assert_sound(*both)


def assert_sound(*both: Server) -> None:
    for server in both:
        assert server.running and server.kv_quant()["errors"] == 0
