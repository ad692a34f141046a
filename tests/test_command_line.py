"""A wrong value for any option of any ``kvq`` command gives one error line that names it, and no traceback.

The commands run in this process, through the entry point of the console script.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer.main

from sglang_kvq import arguments, cli
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import save_rotations
from tests.evaluation.fake_server import FakeServer
from tests.rotations.helpers import random_rotations, tiny_model_folder

#: Values that are no number, or out of any range.
WORD, NEGATIVE, HUGE = "twelve", "-3", "1" + "0" * 30
NOT_POSITIVE = (WORD, NEGATIVE, "0")
#: Paths: a missing one, an empty folder, bytes that are no text, one below a file, and one that nobody can write.
NOWHERE, EMPTY, BINARY, TEXT = "{tmp}/missing", "{tmp}/empty", "{tmp}/binary", "{text}"
BELOW_FILE, NO_PLACE = "{text}/below", "/proc/missing/below"


class Wrong(NamedTuple):
    """Values that are wrong for an option, and further options that make them matter."""

    values: tuple[str, ...]
    more: str = ""


class Command(NamedTuple):
    """A command's required words, and wrong values of each option or argument; ``{it}`` marks an argument's place."""

    needs: str
    wrong: dict[str, tuple[Wrong, ...]]


def wrong(*values: str, more: str = "") -> Wrong:
    return Wrong(values, more)


MEASURED = "--model {model} --text {text} --length 448 --device cpu"
OWN = "--model {model} --tasks humaneval --humaneval {problems}"
GSM8K = "--tasks gsm8k --gsm8k {problems} --gsm8k-shots 0"
HUMANEVAL = "--tasks humaneval --humaneval {problems}"

COMMANDS = {
    "calibrate": Command(
        "{it} --text {text} --output {tmp}/out --tokens 512 --context 512 --no-sensitivity --device cpu",
        {
            "model": (wrong(NOWHERE, TEXT, EMPTY, "no-such-org/no-model"),),
            "--text": (wrong(NOWHERE, EMPTY, BINARY),),
            "--output": (wrong(BELOW_FILE, NO_PLACE, TEXT, "{rotations}"),),
            "--tokens": (wrong(*NOT_POSITIVE, "1.5", HUGE),),
            "--context": (wrong(*NOT_POSITIVE, HUGE),),
            "--positions": (wrong(WORD, NEGATIVE, "100"),),
            "--seed": (wrong(WORD, NEGATIVE, HUGE),),
            "--granularity": (wrong("per-heads"),),
            "--composition": (wrong("balance", "oskar"),),
            "--clips": (wrong("best", "per-layers"),),
            "--held-out-contexts": (wrong(*NOT_POSITIVE),),
            "--held-out-length": (wrong(*NOT_POSITIVE, "1000"),),
            "--text-share": (wrong(*NOT_POSITIVE, "2", "nan"),),
            "--device": (wrong("tpu", "cuda", "cuda:99", "gpu", "cpu:x"),),
            "--dtype": (wrong("bf16", "fp16", "int8", "float8"),),
            "--engine": (wrong("vllm", "sglan"),),
            "--tp": (wrong(*NOT_POSITIVE, "2"), wrong("0", more="--engine sglang")),
            "--engine-arg": (wrong("x", "=1", more="--engine sglang"),),
            "--push": (wrong("nowhere"),),
        },
    ),
    "push": Command(
        "{it}",
        {"folder": (wrong(NOWHERE, TEXT, EMPTY, more="org/name"),), "target": (wrong("nowhere"),)},
    ),
    "zoo": Command("", {}),
    "inspect": Command(
        "{it}",
        {
            "folder": (wrong(NOWHERE, EMPTY, "no-such-org/no-rotations"),),
            "--model": (wrong(NOWHERE, EMPTY, more="--text {text}"), wrong("{model}")),
            "--text": (wrong(NOWHERE, EMPTY, BINARY, more="--model {model}"),),
            "--plot": (wrong("{text}/a.png", "/proc/missing/a.png", "{tmp}", "{tmp}/a", "{tmp}/a.doc"),),
            "--methods": (wrong("oscr", "hadamrd", "none"), wrong("int2:9", more=MEASURED)),
            "--contexts": (wrong(*NOT_POSITIVE, HUGE, more=MEASURED),),
            "--length": (wrong(*NOT_POSITIVE, HUGE, more=f"--contexts 1 {MEASURED}".replace("--length 448", "")),),
            "--device": (wrong("tpu", "cuda", "cuda:99"),),
            "--dtype": (wrong("bf16", "int8"),),
        },
    ),
    "convert": Command(
        "{it}",
        {
            "source": (wrong(NOWHERE, EMPTY, more="{tmp}/out"),),
            "output": (wrong(BELOW_FILE, NO_PLACE, TEXT),),
            "--to": (wrong("safetensor", "numpy", more="{tmp}/out"),),
            "--kv-heads": (wrong(*NOT_POSITIVE, "7", HUGE, more="{tmp}/out"),),
        },
    ),
    "doctor": Command(
        "--model {model} --memory 1",
        {
            "--model": (wrong(NOWHERE, TEXT, EMPTY, "no-such-org/no-model"),),
            "--method": (wrong("oskar", "none", "INT2"),),
            "--bits": (wrong(*NOT_POSITIVE, HUGE, "nan", "auto:x"),),
            "--rotations": (wrong(NOWHERE, EMPTY),),
            "--memory": (wrong(*NOT_POSITIVE, "nan", "inf", HUGE),),
            "--tp": (wrong(*NOT_POSITIVE),),
        },
    ),
    "plan": Command(
        "{it} --gpu h100",
        {
            "model": (wrong(NOWHERE, TEXT, EMPTY, "no-such-org/no-model"),),
            "--gpu": (wrong(WORD, "80:", "0:1", "nan:1", "1:-2"),),
            "--count": (wrong(*NOT_POSITIVE), wrong("3", more="--tp 2")),
            "--tp": (wrong(*NOT_POSITIVE),),
            "--context": (wrong(*NOT_POSITIVE, "32Q", HUGE, more="--concurrency 1"), wrong("1K")),
            "--concurrency": (wrong(*NOT_POSITIVE, more="--context 64"), wrong("4")),
            "--mem-fraction-static": (wrong(*NOT_POSITIVE, "1.5", "nan"),),
            "--weights": (wrong(*NOT_POSITIVE, "nan", HUGE),),
        },
    ),
    "eval": Command(
        "--server {server} --out {tmp}/out --text {text} --kl-lengths 700x1",
        {
            "--server": (wrong("nonsense", "ftp://127.0.0.1", "http://127.0.0.1:9", "http://127.0.0.1:port"),),
            "--reference-server": (wrong("nonsense"),),
            "--model": (wrong("{model}"), wrong(NOWHERE, TEXT, "no-such-org/no-model", more="{alone}")),
            "--methods": (wrong("oskar", "none:3", "hadamard@/missing", more="{alone} --model {model}"),),
            "--map": (
                wrong(NOWHERE, BINARY, more="{alone} --out {tmp}/precise_m.json"),
                wrong(EMPTY, more="{alone} --out {tmp}/precise_m.json"),
            ),
            "--report": (wrong(NOWHERE, BINARY, EMPTY, more="{alone} --out {tmp}/a.md"),),
            "--tasks": (wrong("kll", "kll,gsm8k"),),
            "--out": (wrong(BELOW_FILE, NO_PLACE, TEXT),),
            "--gpus": (wrong("0,0", "0,,1", more="{alone} --model {model}"), wrong("0")),
            "--parallel": (wrong(*NOT_POSITIVE),),
            "--chunked-prefill-size": (wrong(WORD, "0", more="{alone} --model {model}"), wrong("256")),
            "--concurrency": (wrong(*NOT_POSITIVE),),
            "--server-command": (wrong("python'", more="{alone} " + OWN),),
            "--plain-flags": (wrong("x'", more="{alone} " + OWN),),
            "--start-timeout": (wrong(*NOT_POSITIVE, "nan"),),
            "--request-timeout": (wrong(*NOT_POSITIVE, "nan"),),
            "--tokenizer": (wrong(NOWHERE),),
            "--text": (wrong(NOWHERE, EMPTY, BINARY),),
            "--text-skip": (wrong(WORD, NEGATIVE, "1", "nan"),),
            "--kl-lengths": (wrong(*NOT_POSITIVE, "2048x", "2048xa", "700x0", HUGE),),
            "--kl-contexts": (wrong(*NOT_POSITIVE, HUGE, more="--kl-lengths 700"),),
            "--kl-first": (wrong(*NOT_POSITIVE, HUGE),),
            "--kl-top": (wrong(*NOT_POSITIVE),),
            "--needle-text": (wrong(NOWHERE, BINARY, more="--tasks needle"),),
            "--needle-lengths": (wrong(*NOT_POSITIVE, HUGE, more="--tasks needle"),),
            "--needle-depths": (wrong(WORD, NEGATIVE, "101", more="--tasks needle"),),
            "--needle-trials": (wrong(*NOT_POSITIVE, more="--tasks needle"),),
            "--needle-seed": (wrong(WORD),),
            "--retrieval-lengths": (wrong(*NOT_POSITIVE, HUGE, more="--tasks multi_key"),),
            "--retrieval-cases": (wrong(*NOT_POSITIVE, more="--tasks multi_key"),),
            "--retrieval-seed": (wrong(WORD),),
            "--style": (wrong("chats"),),
            "--humaneval": (wrong(NOWHERE, EMPTY, BINARY, TEXT, more="--tasks humaneval"),),
            "--humaneval-problems": (wrong(WORD, NEGATIVE, more=HUMANEVAL),),
            "--humaneval-max-tokens": (wrong(*NOT_POSITIVE, more=HUMANEVAL),),
            "--gsm8k": (wrong(NOWHERE, EMPTY, BINARY, TEXT, more="--tasks gsm8k --gsm8k-shots 0"),),
            "--gsm8k-train": (wrong(NOWHERE, BINARY, more="--tasks gsm8k --gsm8k {problems}"),),
            "--gsm8k-shots": (
                wrong(WORD, NEGATIVE, HUGE, more="--tasks gsm8k --gsm8k {problems} --gsm8k-train {problems}"),
            ),
            "--gsm8k-problems": (wrong(WORD, NEGATIVE, more=GSM8K),),
            "--gsm8k-max-tokens": (wrong(*NOT_POSITIVE, more=GSM8K),),
            "--math": (wrong(NOWHERE, EMPTY, BINARY, TEXT, more="--tasks math"),),
            "--math-problems": (wrong(WORD, NEGATIVE, HUGE, more="--tasks math"),),
            "--math-seed": (wrong(WORD),),
            "--math-max-tokens": (wrong(*NOT_POSITIVE, more="--tasks math"),),
        },
    ),
}

#: The argument's right value, where an option is wrong.
RIGHT = {
    "calibrate": "{model}",
    "inspect": "{rotations}",
    "convert": "{rotations}",
    "push": "{rotations}",
    "plan": "{model}",
}

#: Options that accept any text, or whose values only a hub can refuse.
FREE = {"--base-model", "--revision", "--name", "--label"}

#: Texts of which the message must show one, for values that it may not show as given.
SHOWN = {HUGE: (HUGE, "e+30"), "kll,gsm8k": ("kll: unknown. Did you mean kl?",)}

CASES = [
    (command, option, value, each.more)
    for command, (_, options) in COMMANDS.items()
    for option, all_ in options.items()
    for each in all_
    for value in each.values
]


def parameters(command: str) -> set[str]:
    """Returns the options and arguments of a command that take a value."""
    known = typer.main.get_command(cli.app).commands[command].params
    return {p.opts[-1] if p.param_type_name == "option" else p.name for p in known if not getattr(p, "is_flag", False)}


def test_every_option_of_every_command_is_tried():
    assert set(COMMANDS) == set(typer.main.get_command(cli.app).commands)
    for command, (_, options) in COMMANDS.items():
        assert parameters(command) - FREE == set(options), command


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Yields the files, folders and servers that the values name."""
    tmp = tmp_path_factory.mktemp("wrong")
    (tmp / "empty").mkdir()
    (tmp / "binary").write_bytes(b"\xff\xfe\x00\x9f" * 9)
    fields = ("question", "answer", "task_id", "prompt", "entry_point", "test")
    (tmp / "problems.jsonl").write_text("{" + ", ".join(f'"{name}": "#### 1"' for name in fields) + "}\n")
    model, text = tiny_model_folder(tmp, tokens=1200)
    save_rotations(random_rotations(), tmp / "rotations", kv_heads=2)
    with FakeServer() as server:
        yield {
            "tmp": tmp, "model": model, "text": text, "rotations": tmp / "rotations",
            "problems": tmp / "problems.jsonl", "server": server.url, "alone": "", "it": "",
        }  # fmt: skip


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def kvq(words: list[str], monkeypatch, capsys) -> tuple[int, list[str]]:
    """Runs the command; returns its exit status and the lines on stderr."""
    monkeypatch.setattr(sys, "argv", ["kvq", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code, capsys.readouterr().err.splitlines()


def line(command: str, option: str, value: str, more: str, places: dict) -> list[str]:
    """Returns the command line; if an option is given twice, the last one counts."""
    needs = COMMANDS[command].needs
    if "{alone}" in more:
        needs = "--out {tmp}/out --text {text}"
    argument = RIGHT.get(command, "")
    given = [option, value]
    if not option.startswith("--"):
        first = option in ("model", "folder", "source")
        argument, given = (value, []) if first else (argument, [value])
    words = [*needs.replace("{it}", argument).split(), *more.split(), *given]
    return [command, *(filled for word in words if (filled := word.format_map(places)))]


@pytest.mark.parametrize(
    "command, option, value, more", CASES, ids=[f"{c} {o} {v!r}{' ' * bool(m)}{m}" for c, o, v, m in CASES]
)
def test_wrong_value_is_one_line(command, option, value, more, places, monkeypatch, capsys):
    if value == "cuda" and torch.cuda.is_available():
        pytest.skip("here it is right")
    before = set(places["tmp"].rglob("*"))
    words = line(command, option, value, more, places)
    status, said = kvq(words, monkeypatch, capsys)
    errors = [one for one in said if one.startswith(("error: ", "FAILED: "))]
    assert status in (1, 2) and len(errors) == 1, (words, said)
    assert not any("Traceback" in one for one in said), said
    assert any(shown in errors[0] for shown in SHOWN.get(value, (Path(value.format_map(places)).name,))), errors
    left = {path for path in set(places["tmp"].rglob("*")) - before if places["tmp"] / "out" not in path.parents}
    assert left <= ({places["tmp"] / "out"} if command == "eval" else set())


@pytest.mark.parametrize(
    "words, meant",
    [
        (["calibrat"], "Did you mean 'calibrate'? See `kvq --help`."),
        (["calibrate", "--tokenz", "3"], "--tokens"),
        (["doctor", "--model", "m", "--method", "oskar"], "Did you mean oscar?"),
        (["doctor", "--tp"], "--tp"),
        (["calibrate"], "model"),
        (["eval"], "--out"),
    ],
    ids=" ".join,
)
def test_words_that_are_no_command_line(words, meant, monkeypatch, capsys):
    status, said = kvq(words, monkeypatch, capsys)
    assert status in (1, 2) and len(said) == 1 and said[0].startswith("error: ") and meant in said[0], said


def process(command: str, **environment: str) -> tuple[int, str]:
    """Runs a shell's command line in a process of its own; returns its exit status and stderr."""
    root = str(Path(cli.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root, "kvq": f"{sys.executable} -m sglang_kvq.cli"} | environment
    done = subprocess.run(["bash", "-c", command], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--version", "zoo", "zoo --json"])
def test_a_full_disk_is_one_line(words, unbuffered):
    status, said = process(f"$kvq {words} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert status == 1 and said.splitlines() == [
        "error: cannot write: No space left on device. Free some space, or write to another place."
    ]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_enough_is_no_error(unbuffered):
    assert process("$kvq zoo --json | true", PYTHONUNBUFFERED=unbuffered) == (0, "")


def test_a_deleted_working_folder_is_named(tmp_path):
    status, said = process(f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && $kvq zoo")
    assert status == 1 and said == "error: the working folder was deleted. Change to a folder that exists.\n"


def test_version_and_completion(monkeypatch, capsys):
    assert kvq(["--version"], monkeypatch, capsys)[0] == 0
    for name, value in {
        "_KVQ_COMPLETE": "complete_bash",
        "COMP_WORDS": "kvq eval --needle-s",
        "COMP_CWORD": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["kvq"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.split() == ["--needle-seed"]


def test_help_is_no_error(monkeypatch, capsys):
    for words, status in ((["--help"], 0), (["doctor", "--help"], 0), (["eval", "--help"], 0), ([], 2)):
        assert kvq(words, monkeypatch, capsys)[0] == status, words


def test_device_among_the_gpus_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("", "cpu", "cuda", "cuda:0", "cuda:1"):
        arguments.check_device(device)
    with pytest.raises(KVQuantError, match="--device cuda:2: this machine's GPUs are cuda:0 to cuda:1"):
        arguments.check_device("cuda:2")


@pytest.mark.parametrize(("name", "meant"), arguments.SHORT_DTYPES.items())
def test_short_name_of_a_dtype(name, meant):
    with pytest.raises(KVQuantError, match=f"--dtype {name}: unknown name. Pass --dtype {meant}"):
        arguments.check_dtype(name)
