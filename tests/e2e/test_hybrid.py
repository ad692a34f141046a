"""A tiny Qwen3-Next with ``--kv-quant`` against one without: windows, history, prefix hits, aborts.

On a CPU, linear attention is in torch (``linear_attention_on_cpu.py``); ``python -m tests.gpu`` covers more on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from benchmarks.answers import another_page, greedy, input_logprobs, steps, token_difference
from benchmarks.tiny_hybrids import SERVER_FLAGS
from benchmarks.tiny_models import MODELS, VOCABULARY
from benchmarks.tiny_server import TinyServer, body
from tests.e2e.conftest import ON_GPU, READY, variables
from tests.gpu.families import ROUNDING, prompt

FLAGS = (
    *("--chunked-prefill-size", "128", "--context-length", "1024", "--max-total-tokens", "2048"),
    *("--max-running-requests", "3", *SERVER_FLAGS),
)
#: Sinks, 256 recent tokens and the page being filled: prompts of 190 tokens are all in BF16, those of 520 are not.
OURS = ("--kv-quant", "int4", "--kv-quant-recent", "256", "--kv-quant-prefill-window", "0")


@pytest.fixture(scope="module", params=["radix cache", "no radix cache"])
def said(request, servers, plugin, tmp_path_factory) -> Iterator[dict[str, dict]]:
    """Yields the answers by server name; the servers run one after the other, because both are large."""
    folder, more = tmp_path_factory.mktemp("hybrid"), ()
    if request.param == "no radix cache":
        more = ("--disable-radix-cache",)
    model = MODELS["qwen3_next"].write(folder)
    found: dict[str, dict] = {"expected": {"cached": 0 if more else 512}}
    for name, flags in (("plain", FLAGS), ("ours", (*FLAGS, *OURS))):
        log, env = folder / f"{name}.log", variables(plugin)
        server = servers.forked(TinyServer(model, [*flags, *more], cpu=not ON_GPU, log=log, env=env))
        server.start(READY)
        try:
            found[name] = ask(server)
        finally:
            server.stop(grace=0)
    return found


def read(server: TinyServer, ids: list[int], start: int = 0) -> list[float]:
    return input_logprobs(server.json("/generate", body(ids, 1, return_logprob=True, logprob_start_len=start)))


def ask(server: TinyServer) -> dict:
    short, long = prompt("short", 190), prompt("long", 520)
    found: dict = {"short": read(server, short), "long": read(server, long)}
    turn = [*long, *prompt("turn", 60)]
    reply = server.json("/generate", body(turn, 1, return_logprob=True, logprob_start_len=520))
    found["turn"], found["cached"] = input_logprobs(reply), reply["meta_info"]["cached_tokens"]
    found["wrong page"] = read(server, another_page(long, 1, 0, VOCABULARY))
    answers = greedy(server, [short, [*turn, 9], prompt("third", 400)], 70)
    found["answers"] = [[step.token for step in steps(reply)] for reply in answers]
    abort = threading.Timer(1.0, server.request, ("/abort_request", {"rid": "", "abort_all": True}))
    abort.start()
    server.json("/generate", body([prompt(f"abort {n}", 600) for n in range(3)], 200))
    abort.join()
    found["held"] = server.held_when_empty()
    found["state"] = server.states()[0].get("kv_quant")
    found["log"] = server.log()
    return found


def test_what_lies_in_windows_is_bf16s(said):
    assert token_difference(said["ours"]["short"], said["plain"]["short"]).mean < ROUNDING


def test_history_in_four_bits_is_close(said):
    """The difference is less than half of what a wrong page causes, counted after sinks, window and two chunks."""
    plain, ours = said["plain"], said["ours"]
    wrong = token_difference(plain["wrong page"][448:], plain["long"][448:]).mean
    assert 0 < token_difference(ours["long"][448:], plain["long"][448:]).mean < wrong / 2
    assert token_difference(ours["turn"], plain["turn"]).mean < wrong / 2


def test_a_turn_finds_its_prefix_up_to_the_last_state(said):
    """With 520 tokens in chunks of 128, the last 8 have no state. Plain SGLang has pages of one token here."""
    assert said["ours"]["cached"] == said["expected"]["cached"]
    assert said["plain"]["cached"] in (said["expected"]["cached"], 520)


def test_nothing_is_held_after_answers_and_aborts(said):
    assert said["ours"]["held"] == said["plain"]["held"] == []
    assert all(len(answer) == 70 for answer in said["ours"]["answers"])


def test_only_full_attention_is_in_the_cache(said):
    state = said["ours"]["state"]
    assert len(state["layer_bits"]) == MODELS["qwen3_next"].layers // 3
    assert "recurrent states take" in said["ours"]["log"] and "using attn output gate" in said["ours"]["log"]
