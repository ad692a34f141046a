"""Drafts of models that keep more than a KV cache: sliding windows or recurrent states.

A server checks itself: it gets prompt and answer as one prompt, and says at each position how likely the answered token
and the likeliest token are. That check uses no drafts. Drafts come from n-grams, or from a model that repeats the last
token (STANDALONE); the releases use them in turn.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest

from benchmarks.answers import greedy, steps
from benchmarks.tiny_hybrids import SERVER_FLAGS
from benchmarks.tiny_models import MODELS
from benchmarks.tiny_server import TinyServer, body
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat
from tests.e2e.conftest import ON_GPU, READY, STEADY
from tests.e2e.test_serving import PRESSED
from tests.e2e.test_speculation import NGRAM, TIE, kernels
from tests.gpu.families import ROUNDING
from tests.gpu.speculation import CPU, flags, prompts, write_echo

WAYS = ("ngram", "standalone") if compat.applies(OLD_TREE, compat.sglang_version()) else ("standalone", "ngram")

#: The first prompt and its answer are all in BF16; the others have a history and reach beyond a window. The second
#: answer passes token 256, where SGLang keeps a recurrent state.
LENGTHS, ANSWER = (68, 222, 560), 60
CACHED = {1: 256, 2: 512}
#: Bound for 4-bit histories: a prefill may read other pages than decoding did. A wrong page moves answers by 0.8.
HISTORY = 2 * ROUNDING
FLAGS = (
    *("--chunked-prefill-size", "128", "--context-length", "1024", "--max-total-tokens", "2048"),
    *("--max-running-requests", "3", "--kv-quant", "int4", "--kv-quant-recent", "64"),
)
#: Makes SGLang free tokens that left a window after every step, so that drafts in flight would miss them.
ENV = {**PRESSED, "SGLANG_SWA_EVICTION_INTERVAL": "1"}
#: Like ``STEADY``, for recurrent states, which are computed in FP32.
STEADY_STATES = {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.fixture(scope="module", params=list(zip(("mellum", "qwen3_next"), WAYS)), ids=" ".join)
def said(request, plugins, tmp_path_factory) -> Iterator[dict]:
    (name, way), folder = request.param, tmp_path_factory.mktemp("families")
    model = MODELS[name]
    env, found = {**ENV, **STEADY, **STEADY_STATES}, kernels()
    if not ON_GPU:
        installed = plugins("linear_attention_on_cpu", "drafting_on_cpu")
        env["PYTHONPATH"] = os.pathsep.join([found.pop("PYTHONPATH"), installed["PYTHONPATH"]])
        # N-grams need a compiler other than the one that torch finds; a draft's small functions need none.
        env |= found if way == "ngram" else {"TORCHDYNAMO_DISABLE": "1"}
    drafting = NGRAM if way == "ngram" else flags(way, write_echo(folder))
    more = [*FLAGS, *drafting, *(SERVER_FLAGS if model.is_hybrid else ())]
    server = TinyServer(model.write(folder), more, cpu=not ON_GPU, log=folder / "log", env=env)
    server.start(READY)
    try:
        yield ask(server)
    finally:
        server.stop(grace=0)


def ask(server: TinyServer) -> dict:
    drawn = prompts(CPU, [length + 64 for length in LENGTHS], len(LENGTHS), "families")
    asked = [ids[:length] for ids, length in zip(drawn, LENGTHS)]
    replies = [greedy(server, ids, ANSWER) for ids in asked]
    found: dict = {
        "answers": [steps(reply) for reply in replies],
        "rounds": [reply["meta_info"]["spec_verify_ct"] for reply in replies],
        "quantized": server.states()[0]["kv_quant"]["tiers"]["quantized_tokens"],
    }
    turns = [[*asked[n], *(step.token for step in found["answers"][n]), 7, 8, 9] for n in CACHED]
    replies = [greedy(server, ids, 24) for ids in turns]
    found["cached"] = [reply["meta_info"]["cached_tokens"] for reply in replies]
    found["turns"] = [steps(reply) for reply in replies]
    found["forced turns"] = [forced(server, ids, answer) for ids, answer in zip(turns, found["turns"])]
    found["forced"] = [forced(server, ids, answer) for ids, answer in zip(asked, found["answers"])]
    plant(server, asked[0], [step.token for step in found["answers"][0]])
    found["branching"] = steps(greedy(server, asked[0], ANSWER))
    server.drain()
    # More requests than run at once, so some are retracted; all end, or are aborted, in the middle of a round.
    with ThreadPoolExecutor(4) as pool:
        crowd = [pool.submit(greedy, server, ids, ANSWER) for ids in (*asked, asked[1])]
        found["crowd"] = [steps(reply.result()) for reply in crowd]
    found["forced crowd"] = [forced(server, ids, answer) for ids, answer in zip((*asked, asked[1]), found["crowd"])]
    abort = threading.Timer(1.0, server.request, ("/abort_request", {"rid": "", "abort_all": True}))
    abort.start()
    server.json("/generate", body([ids[:400] for ids in asked], 300))
    abort.join()
    found["held"], found["log"] = server.held_when_empty(), server.log()
    return found


def plant(server: TinyServer, prompt: list[int], answer: list[int]) -> None:
    """Teaches n-grams a wrong continuation of every three tokens of the answer, and the right one of the last of them.

    The wrong one is the model's own after those three tokens alone. When ``answer`` is given again, drafts have a wrong
    branch and a right one.
    """
    whole, first = [*prompt, *answer], len(prompt)
    server.drain()
    wrong = [whole[n - 3 : n] for n in range(first, len(whole))]
    right = [[1, *whole[n - 1 : n + 3]] for n in range(first, len(whole) - 2)]
    for planted in (wrong, [list(chain(*right[n : n + 3])) for n in range(0, len(right), 3)]):
        server.json("/generate", body(planted, 2))  # decoded tokens are remembered, with the prompt's end


def forced(server: TinyServer, prompt: list[int], answer: list) -> list[tuple[float, float]]:
    """Returns each answered token's log-probability and that of the likeliest, by a prefill of prompt and answer."""
    server.drain()
    server.json("/generate", body(prompt, 1))
    asked = body(
        [*prompt, *(step.token for step in answer)],
        1,
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
        top_logprobs_num=1,
    )
    meta = server.json("/generate", asked)["meta_info"]
    return [(own[0], best[0][0]) for own, best in zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:])]


def assert_greedy(answer: list, forced: list[tuple[float, float]], mean: float) -> None:
    """Asserts that every token is the likeliest, except near ties, and as likely as the server said."""
    assert len(answer) == len(forced) > 0
    behind = [best - own for own, best in forced]
    assert max(behind) < 2 * TIE, f"token {behind.index(max(behind))} is not the likeliest: {behind}"
    apart = [abs(step.logprob - own) for step, (own, _) in zip(answer, forced)]
    assert sum(apart) / len(apart) < mean and max(apart) < 20 * mean, apart


def test_answers_are_the_greedy_ones(said):
    for length, answer, forced in zip(LENGTHS, said["answers"], said["forced"]):
        assert len(answer) == ANSWER
        assert_greedy(answer, forced, ROUNDING if length + ANSWER <= 64 + 64 else HISTORY)
    assert said["quantized"] >= 256, "no history was read"
    assert sum(said["rounds"]) < 0.8 * len(LENGTHS) * ANSWER, "almost no draft was accepted"
    assert sum(said["rounds"]) > 1.1 * len(LENGTHS) * ANSWER / 4, "almost no draft was rejected"


def test_drafts_that_branch_change_no_answer(said):
    """A draft's recurrent state is that of its own branch (``drafts.after_states``)."""
    assert_greedy(said["branching"], said["forced"][0], ROUNDING)


def test_a_turn_goes_on_from_what_was_accepted(said):
    """The turn finds pages and, for a model with recurrent states, a state that a round of drafts passed."""
    assert all(found >= least for found, least in zip(said["cached"], CACHED.values())), said["cached"]
    for answer, forced in zip(said["turns"], said["forced turns"]):
        assert_greedy(answer, forced, HISTORY)


def test_a_crowd_gets_the_same_answers(said):
    for answer, forced in zip(said["crowd"], said["forced crowd"]):
        assert_greedy(answer, forced, HISTORY)


def test_nothing_is_held_after_retraction_and_aborts(said):
    assert "#retracted_reqs" in said["log"], "no request was retracted"
    assert said["held"] == []
