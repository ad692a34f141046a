"""``sglang.Engine`` with sessions in a program of its own, as a user would write it; some sessions expire."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from sglang_kvq.constants import PAGE_SIZE
from tests.e2e import word_embeddings
from tests.e2e.client import held_out_text
from tests.e2e.test_sessions import BUDGET, FACT, QUESTION

#: Seconds that the program only pretends to wait, so that no session expires on a slow host.
IDLE = 600.0
PROGRAM = """
import json, sys, time
import sglang
from sglang_kvq.sglang.router.router import router_of


def main():
    model, embedder, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    engine = sglang.Engine(
        model_path=model, kv_quant="int4", kv_quant_recent=128, episodic_policy="retrieve", episodic_budget=BUDGET,
        episodic_block=192, episodic_idle=IDLE, episodic_embedder=embedder, device="cpu", dtype="bfloat16",
        sampling_backend="pytorch", grammar_backend="none", disable_cuda_graph=True, disable_overlap_schedule=True,
        max_running_requests=4, context_length=2048, max_total_tokens=8192, log_level="error",
    )

    def ask(name, session=None):
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        reply = engine.generate(input_ids=prompts[name], sampling_params=sampling, session_id=session)
        return reply["text"], reply["meta_info"]["prompt_tokens"]

    found = {"plain": ask("short"), "within": ask("short", "a"), "text": ask("text", "a"), "long": ask("long", "a")}
    sessions = router_of(engine.tokenizer_manager).store
    (session,) = sessions.of("")
    found["read"] = {"hot": session.hot, "pages": list(session.pages)}
    sessions.clock = lambda: time.monotonic() + 2 * IDLE
    found["other"] = ask("short", "b")
    found["after"] = sorted(session.id for session in sessions.of(""))
    found["text_again"], found["again"] = ask("text", "a"), ask("long", "a")
    for _ in range(2):  # what a request gives back is applied by the next batch
        until = time.monotonic() + 300
        while not engine.flush_cache().success:
            assert time.monotonic() < until, "requests are still running"
            time.sleep(0.1)
        found["plain_again"] = ask("short")
    time.sleep(1)
    found["tiers"] = engine.get_server_info()["internal_states"][0]["kv_quant"]["tiers"]
    print("FOUND " + json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def found(model, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("engine")
    path, embedder = word_embeddings.install(folder)
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("BUDGET", str(BUDGET)).replace("IDLE", str(IDLE)))
    tokenizer = AutoTokenizer.from_pretrained(model)
    prose = tokenizer(held_out_text()).input_ids
    fact = tokenizer(f"\n{FACT}\n").input_ids
    said = [*prose[:300], *fact, *prose[300:1300]]
    prompts = {"short": prose[:300], "text": said, "long": [*said, *tokenizer(QUESTION).input_ids]}
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, str(program), str(model), embedder, json.dumps(prompts)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(line.removeprefix("FOUND ")) | {"lengths": {name: len(ids) for name, ids in prompts.items()}}


def test_a_session_within_the_budget_changes_nothing(found):
    assert found["within"] == found["plain"] == found["other"]


def test_a_longer_one_finds_what_was_said(found):
    _, tokens = found["long"]
    assert tokens == found["lengths"]["long"] > 2 * BUDGET >= 2 * found["read"]["hot"]
    assert 300 // PAGE_SIZE in found["read"]["pages"]


def test_an_expired_session_is_forgotten_and_answered(found):
    assert found["after"] == ["b"]
    assert found["text_again"] == found["text"] and found["again"][1] == found["long"][1]


def test_nothing_is_left(found):
    assert found["plain_again"] == found["plain"]
    held = found["tiers"]
    assert held["bf16_tokens"] + held["quantized_tokens"] <= found["lengths"]["short"] + 64 + 6, held
