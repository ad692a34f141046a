"""Each task runs on a fake server whose true values are known."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation import comparison, sandbox
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.tasks.base import short
from sglang_kvq.evaluation.tasks.gsm8k import GSM8KTask, conversation, document, final_number
from sglang_kvq.evaluation.tasks.humaneval import HumanEvalTask, extract
from sglang_kvq.evaluation.tasks.kl import KLTask
from sglang_kvq.evaluation.tasks.mathematics import MathTask
from sglang_kvq.evaluation.tasks.needle import Needle, NeedleTask
from sglang_kvq.evaluation.tasks.problems import answer_lengths, read_json_lines
from sglang_kvq.evaluation.tasks.statistics import clustered
from tests.conftest import ROOT
from tests.evaluation.conftest import PROBLEMS, main
from tests.evaluation.fake_server import FakeServer, log_probs


def kl_task(text: Path, **settings) -> KLTask:
    return KLTask((text,), **{"contexts": ((200, 3), (300, 2)), "first": 50, "top": 16, **settings})


def measure_kl(task, bench, method):
    with FakeServer() as reference, FakeServer(method) as server:
        task.record_reference(Client(reference.url), bench)
        bench.material.settle_reference()
        return task.run(Client(server.url), bench), server


def test_kl_is_a_close_lower_bound_of_the_exact_one(text, bench):
    outcome, server = measure_kl(kl_task(text, top=96), bench, "hadamard")
    exact, nll = [], []
    for body in server.asked("/generate"):
        ids = body["input_ids"]
        p, q = (log_probs(ids, method)[49:-1] for method in ("none", "hadamard"))
        exact.append((np.exp(p) * (p - q)).sum(1))
        nll.append(-q[np.arange(len(q)), ids[50:]])
    exact = np.concatenate(exact).mean()
    assert 0.9 * exact < outcome.value <= exact + 1e-6
    assert outcome.row["perplexity"] == pytest.approx(np.exp(np.concatenate(nll).mean()), rel=1e-4)
    error = clustered([one.sum() for one in nll], [len(one) for one in nll])[1]
    assert outcome.row["perplexity_se"] == pytest.approx(outcome.row["perplexity"] * error, rel=1e-3)
    assert outcome.n == 5 and outcome.se > 0
    contexts = outcome.details["per_context"]
    assert outcome.value == pytest.approx(sum(one["kl"] * one["tokens"] for one in contexts) / len(np.concatenate(nll)))
    assert outcome.row["kl_by_length"][200]["kl"] != outcome.row["kl_by_length"][300]["kl"]


def test_kl_orders_methods_and_of_the_same_model_is_zero(text, bench):
    found = {method: measure_kl(kl_task(text), bench, method)[0] for method in ("none", "oscar", "hadamard", "int2")}
    assert abs(found["none"].value) < 1e-5 and found["none"].row["top1_agreement"] == 1
    assert found["none"].value < found["oscar"].value < found["hadamard"].value < found["int2"].value
    assert found["int2"].row["top1_agreement"] < 1


def test_kl_contexts_are_full_length_held_out_and_do_not_overlap(text, bench):
    _, server = measure_kl(kl_task(text, skip=0.5), bench, "oscar")
    words = ["".join(map(chr, body["input_ids"])) for body in server.asked("/generate")]
    assert sorted(map(len, words)) == [199] * 3 + [299] * 2
    whole = text.read_text()
    for length in (199, 299):
        starts = sorted(whole.index(part) for part in words if len(part) == length)
        assert starts[0] >= len(whole) // 2
        assert all(b - a >= length for a, b in itertools.pairwise(starts))


def test_kl_reference_is_that_of_the_server_measured_last(text, bench):
    """A server under the same name may have other flags or weights."""
    task = kl_task(text)
    for method in ("int2", "none"):
        with FakeServer(method=method) as server:
            task.record_reference(Client(server.url), bench)
            assert len(server.asked("/generate")) == 5
    with FakeServer() as server:
        bench.material.settle_reference()
        assert task.run(Client(server.url), bench).value < 1e-5


@pytest.mark.parametrize(
    "settings, server, message",
    [
        ({}, {"chunk": 8192}, "--chunked-prefill-size"),
        ({}, {"chunk": -1}, "at most 256. to measure its cache"),
        ({}, {"window": 8192}, "--kv-quant-prefill-window 0"),
        ({}, {"nan": True}, "NaN"),
        ({}, {"context": 150}, "--kl-lengths 200,300: no length fits"),
        ({"contexts": ((4000, 9),)}, {"context": 5000}, "fewer or shorter contexts"),
    ],
)
def test_kl_refuses(text, bench, settings, server, message):
    bench.material.settle_reference()
    task = kl_task(text, **settings)
    with FakeServer() as reference:
        if "contexts" not in settings:
            task.record_reference(Client(reference.url), bench)
    with FakeServer("oscar", **server) as running, pytest.raises(KVQuantError, match=message):
        task.run(Client(running.url), bench)


def test_kl_without_reference(text, bench):
    bench.material.settle_reference("the server of none ran out of memory")
    with FakeServer("oscar") as server, pytest.raises(KVQuantError, match="out of memory"):
        kl_task(text).run(Client(server.url), bench)


def test_kl_without_a_reference_of_its_contexts(text, bench):
    bench.material.settle_reference()  # it was measured, but with other settings
    with FakeServer("oscar") as server, pytest.raises(KVQuantError, match=r"no BF16 distributions of context \d of"):
        kl_task(text).run(Client(server.url), bench)


def test_kl_leaves_out_what_does_not_fit_and_says_so(text, bench):
    task = kl_task(text)
    bench.material.settle_reference()
    with FakeServer(context=250) as server:
        task.record_reference(Client(server.url), bench)
        outcome = task.run(Client(server.url), bench)
    assert outcome.n == 3 and "300 tokens" in outcome.warnings[0]


def test_changed_settings_are_another_identity(text):
    base = kl_task(text)
    for change in ({"skip": 0.1}, {"first": 60}, {"top": 8}, {"contexts": ((200, 4),)}):
        assert dataclasses.replace(base, **change).identity() != base.identity()
    before = base.identity()
    text.write_text(text.read_text() + "more")
    assert base.identity() != before
    assert str(text.parent) not in str(before)


# -- needle -----------------------------------------------------------------------------------------------


def needle_task(text, **settings):
    return NeedleTask(text, **{"lengths": (400, 1024, 9000), "depths": (0, 50, 100), **settings})


@pytest.mark.parametrize("template", [True, False])
def test_needle_is_found_at_every_depth(text, bench, template):
    with FakeServer("oscar", template=template, context=4096) as server:
        outcome = needle_task(text, trials=2).run(Client(server.url), bench)
        path = "/v1/chat/completions" if template else "/v1/completions"
        prompts = [str(body) for body in server.asked(path) if "magic number" in str(body)]
    assert outcome.value == 1 and outcome.n == 12 and outcome.details["style"] == ("chat" if template else "completion")
    assert outcome.row["needle_1k"] == 1 and outcome.row["needle_9000"] is None
    assert outcome.row["needle_1k_tokens"] == len("It is 1234567.") and outcome.row["needle_cut"] == 0
    grid = {"lengths": [400, 1024], "depths": [0, 50, 100], "passed": [[1, 1]] * 3, "se": [[0, 0]] * 3}
    assert outcome.row["needle_grid"] == grid
    assert "9000" in outcome.warnings[0]
    numbers = [one["answer"] for one in outcome.details["asked"]]
    assert len(set(numbers)) == 12
    where = sorted(prompt.index("The magic number") / len(prompt) for prompt in prompts)
    assert where[3] < 0.2 < where[4] and where[7] < 0.5 < 0.6 < where[8], "a third of them at each depth"
    assert sum(bool(re.search(r"The magic number of \w+ is \d+\.\\n", prompt)) for prompt in prompts) == 4, "at the end"


def test_needle_cells_have_standard_errors_of_their_trials(text, bench, monkeypatch):
    found = itertools.count()
    monkeypatch.setattr("sglang_kvq.evaluation.tasks.needle.Needle.found_in", lambda *_: next(found) % 2 == 0)
    alone = dataclasses.replace(bench, concurrency=1)
    with FakeServer() as server:
        outcome = needle_task(text, lengths=(400,), depths=(0, 100), trials=4).run(Client(server.url), alone)
    # Two of four are right: s / sqrt(n) = sqrt(1 / 3) / 2; over all eight, sqrt(2 / 7) / sqrt(8).
    cell, whole = (1 / 3) ** 0.5 / 2, (2 / 7) ** 0.5 / 8**0.5
    assert outcome.row["needle_grid"]["se"] == [[pytest.approx(cell)]] * 2
    assert (outcome.value, outcome.row["needle_400_se"]) == (0.5, pytest.approx(whole))


def test_needle_trials_are_of_the_seed(text, bench):
    def prompts(seed):
        with FakeServer() as server:
            needle_task(text, lengths=(400,), depths=(50,), trials=3, seed=seed).run(Client(server.url), bench)
            return sorted(str(body) for body in server.asked("/v1/chat/completions") if "magic number" in str(body))

    first = prompts(1)
    assert len(set(first)) == 3 and prompts(1) == first and not set(prompts(2)) & set(first)
    assert needle_task(text, seed=1).identity() != needle_task(text, seed=2).identity()


def test_needle_that_is_not_found(text, bench, monkeypatch):
    monkeypatch.setattr("tests.evaluation.fake_server.answer_to", lambda prompt: "It is 1234567.")
    with FakeServer() as server:
        outcome = needle_task(text).run(Client(server.url), bench)
    assert outcome.value == 0


@pytest.mark.parametrize(
    "answer, found", [("7654321", 1), ("It is 7,654,321.", 1), ("76543210", 0), ("1 or 7654321", 0), ("", 0)]
)
def test_needle_wants_exactly_the_number(answer, found):
    assert Needle("Oslo", 7654321, None).found_in(answer) == bool(found)


def test_short_names():
    assert [short(n) for n in (1500, 2048, 32768)] == ["1500", "2k", "32k"]


# -- humaneval --------------------------------------------------------------------------------------------


def test_programs_run_on_the_cpus_of_a_container():
    script = "import sys; from sglang_kvq import cpus; cpus.usable_cpus = lambda: 3\n"
    script += "from sglang_kvq.evaluation.tasks import humaneval\n"
    script += "print(humaneval._CORES._value, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "3 False\n", done.stderr


@pytest.mark.parametrize("style", ["chat", "completion"])
def test_humaneval_runs_the_programs(humaneval, bench, style):
    task = HumanEvalTask(humaneval, style=style, limits=sandbox.Limits(cpu_seconds=1))
    with FakeServer() as server:
        outcome = task.run(Client(server.url), bench)
    solved = {one["task_id"]: one for one in outcome.details["problems"]}
    assert solved["T/0"]["passed"] and not solved["T/1"]["passed"]
    assert len(server.asked("/v1/completions")) == (2 if style == "completion" else 0)
    assert outcome.value == 0.5 and outcome.n == 2 and outcome.details["items"] == [1, 0] and outcome.warnings == []
    if style == "chat":
        assert "timeout" in solved["T/1"]["reason"]


@pytest.mark.parametrize(
    "answer, code",
    [
        ("```python\ndef add(a, b):\n    return 1\n```", "import math\n\n\n\ndef add(a, b):\n    return 1"),
        ("A\n```sh\nls\n```\nB\n```python\ndef add(a, b): 1\n```", "import math\n\n\n\ndef add(a, b): 1"),
        ("```python\ndef add(a, b):\n    return 1", "import math\n\n\n\ndef add(a, b):\n    return 1"),
        ("def add(a, b):\n    return 1", "import math\n\n\n\ndef add(a, b):\n    return 1"),
        ("    return a + b", PROBLEMS[0]["prompt"] + "    return a + b"),
        ("```\n    return a + b\n```", PROBLEMS[0]["prompt"] + "    return a + b"),
    ],
)
def test_extraction(answer, code):
    assert extract(answer, PROBLEMS[0]) == code


@pytest.mark.parametrize("content", [b"", b"{}\n", b"not json\n"])
@pytest.mark.parametrize("task", [HumanEvalTask, MathTask, lambda path: GSM8KTask(path, shots=0)])
def test_unusable_problem_files_are_refused_before_a_server_runs(tmp_path, content, task):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(content)
    with pytest.raises(KVQuantError, match="problems.jsonl"):
        task(path)


@pytest.mark.parametrize("answer", [None, ["#### 5"], "#### none"])
def test_unusable_answers_are_refused_before_a_server_runs(tmp_path, answer):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": answer}))
    with pytest.raises(KVQuantError, match="problems.jsonl: (object 1 lacks text|an answer without a number: .*none)"):
        GSM8KTask(path, shots=0)


def test_a_host_without_a_sandbox_is_refused_before_a_server_runs(humaneval, monkeypatch):
    monkeypatch.setattr(sandbox, "walls", lambda: sandbox.Walls(None, ("user namespaces are forbidden",)))
    with pytest.raises(KVQuantError, match="cannot be sandboxed here .user namespaces are forbidden"):
        HumanEvalTask(humaneval)
    HumanEvalTask(humaneval, allow_unsandboxed=True)


def test_programs_that_were_not_sandboxed_are_named_in_the_report(humaneval, bench, monkeypatch):
    monkeypatch.setattr(sandbox, "walls", lambda: sandbox.Walls(None, ("user namespaces are forbidden",)))
    task = HumanEvalTask(humaneval, problems=1, style="chat", allow_unsandboxed=True)
    with FakeServer() as server:
        (warning,) = task.run(Client(server.url), bench).warnings
    assert "were not cut off (--allow-unsandboxed)" in warning


def test_a_programs_identity_is_that_of_its_file_and_settings(humaneval):
    found = HumanEvalTask(humaneval, allow_unsandboxed=True).identity()
    assert found == HumanEvalTask(humaneval).identity() != HumanEvalTask(humaneval, problems=1).identity()
    assert found["file"] == "problems.jsonl.gz" and len(found["sha256"]) == 64
    assert str(humaneval.parent) not in json.dumps(found)


def test_a_number_counts_as_text(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"problem": "How many?", "answer": 204}')
    assert read_json_lines(path, ("problem", "answer")) == [{"problem": "How many?", "answer": "204"}]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"], ids=ascii)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=ascii)
def test_json_lines_end_at_line_feeds_only(tmp_path, mark, end):
    """JSON allows these characters unescaped in a string, but ``str.splitlines`` ends a line at most of them."""
    objects = [{"question": f"How many?{mark}6 times {n}."} for n in range(3)]
    path = tmp_path / "problems.jsonl"
    path.write_bytes((end.join(json.dumps(one, ensure_ascii=False) for one in objects) + end).encode())
    assert read_json_lines(path, ("question",)) == objects


def test_blank_lines_are_left_out(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "one"}\n \t\n\n{"question": "two"}\n')
    assert [one["question"] for one in read_json_lines(path, ("question",))] == ["one", "two"]


@pytest.mark.parametrize("mark", "\x0b\x0c\x1c\x1d\x1e", ids=ascii)
def test_control_character_is_wrong_json_and_no_end_of_a_line(tmp_path, mark):
    path = tmp_path / "problems.jsonl"
    path.write_text(f'{{"question": "one"}}\n{{"question": "a{mark}b"}}\n')
    with pytest.raises(KVQuantError, match="problems.jsonl: .*line 2: Invalid control character"):
        read_json_lines(path, ("question",))


def test_a_damaged_archive_is_named(tmp_path):
    data = bytearray(gzip.compress(b'{"question": "one"}\n' * 1000))
    data[12:20] = b"\xff" * 8
    path = tmp_path / "problems.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(KVQuantError, match="problems.jsonl.gz: not readable as JSON lines .*decompressing"):
        read_json_lines(path, ("question",))


# -- gsm8k ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["chat", "completion"])
def test_gsm8k(gsm8k, bench, style):
    with FakeServer() as server:
        outcome = GSM8KTask(gsm8k, gsm8k, shots=2, style=style).run(Client(server.url), bench)
        asked = str(server.requests[-1][1])
    assert outcome.details["items"] == [1, 0, 1] and outcome.value == pytest.approx(2 / 3)
    assert "Q0?" in asked and "Q1?" in asked and "<<" not in asked
    shown, none = (GSM8KTask(gsm8k, gsm8k, shots=shots).identity()["train"] for shots in (1, 0))
    assert shown["file"] == "gsm8k.jsonl" and none is None


def test_answers_have_lengths_and_the_limit_cuts_some_off(gsm8k, bench):
    """Tokens of the fake server are characters, so each answer has 32 tokens."""
    with FakeServer() as server:
        whole = GSM8KTask(gsm8k, shots=0).run(Client(server.url), bench)
        cut = GSM8KTask(gsm8k, shots=0, max_tokens=20).run(Client(server.url), bench)
    assert (whole.row["gsm8k_tokens"], whole.row["gsm8k_cut"]) == (32, 0) and whole.details["tokens"] == [32] * 3
    assert (cut.row["gsm8k_tokens"], cut.row["gsm8k_cut"]) == (20, 1)
    assert not any(one["complete"] for one in cut.details["problems"]) and cut.value == 0


def test_lengths_have_standard_errors():
    asked = [{"tokens": tokens, "complete": tokens < 30} for tokens in (10, 20, 30, 30)]
    found = answer_lengths("x", asked)
    assert found["x_tokens"] == 22.5 and found["x_tokens_se"] == pytest.approx((275 / 3) ** 0.5 / 2)
    assert found["x_cut"] == 0.5 and found["x_cut_se"] == pytest.approx((1 / 3) ** 0.5 / 2)


@pytest.mark.parametrize(
    "text, number",
    [
        ("... #### 1,042", 1042),
        ("#### $18.", 18),
        ("#### 5\n\nQuestion: x\n#### 7", 5),
        ("It is 3, then 4.50 dollars.", 4.5),
        ("#### -3", -3),
        ("#### 1. Eggs sold\n9 a day\n#### 2. Money\n#### **18**\n#### 18\nQuestion: x\n#### 7", 18),
        ("#### 18 dollars\nQuestion: 7", 18),
        ("#### 42.00", 42),
        ("nothing", None),
        ("so 3.\n####", 3),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(str(number)).normalize())


def test_prompts():
    examples = [{"question": "A?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}]
    assert document(examples, "B?") == "Question: A?\nAnswer: 1 + 1 = 2\n#### 2\n\nQuestion: B?\nAnswer:"
    assert [turn["role"] for turn in conversation(examples, "B?")] == ["user", "assistant", "user"]


class NotMeasured(Exception):
    pass


def asked_for(words: str, monkeypatch) -> list:
    """Returns the tasks that these words select."""
    asked = []

    def measure(options, tasks, *more):
        asked.extend(tasks)
        raise NotMeasured

    monkeypatch.setattr(comparison, "measure", measure)
    with pytest.raises(NotMeasured):
        main(["--server", "http://x", "--out", "x", "--tasks", *words.split()])
    return asked


def test_options_become_settings(text, humaneval, gsm8k, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        f"needle,kl --text {text} {humaneval} --kl-lengths 700,800x1 --needle-seed 7 --needle-depths 0,9 --style chat"
    )
    kl, needle = asked_for(words, monkeypatch)
    assert (kl.texts, kl.contexts) == ((text, humaneval), ((700, 8), (800, 1)))
    assert (needle.seed, needle.trials, needle.depths, needle.style) == (7, 5, (0, 9), "chat")
    (math,) = asked_for("math --math-problems 7 --math-seed 3 --math-max-tokens 99", monkeypatch)
    assert (math.path, math.problems, math.seed, math.max_tokens) == (None, 7, 3, 99)
    problems = asked_for(f"gsm8k,humaneval --humaneval {humaneval} --gsm8k {gsm8k} --gsm8k-shots 0", monkeypatch)
    assert [(task.name, task.path, task.problems) for task in problems] == [
        ("humaneval", humaneval, 0),
        ("gsm8k", gsm8k, 200),
    ]


@pytest.mark.parametrize(
    "words, flag",
    [
        ("kl", "--text"),
        ("needle", "--needle-text"),
        ("humaneval", "--humaneval"),
        ("gsm8k", "--gsm8k"),
        ("gsm8k --gsm8k x", "--gsm8k-train"),
    ],
)
def test_missing_files_name_the_flag(words, flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KVQuantError, match=flag):
        asked_for(words, monkeypatch)
