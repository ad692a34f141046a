"""``kvq``: arguments that are refused before anything is loaded, and what goes to stdout with ``--json``."""

import json
import sys

import pytest
from typer.testing import CliRunner

from sglang_kvq import cli
from sglang_kvq.cli import _engine, app
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.command import parser as evaluation_parser
from sglang_kvq.rotations import load_rotations, save_rotations
from tests.rotations.helpers import random_rotations, tiny_model_folder


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--engine", "vllm"], "--engine vllm: unknown"),
        (["--tp", "2"], "--tp and --engine-arg belong to --engine sglang"),
        (["--engine", "sglang", "--engine-arg", "x"], "--engine-arg x: must be KEY=VALUE"),
        (["--clips", "best"], "--clips best: unknown"),
        (["--text-share", "2"], "--text-share 2"),
        (["--context", "100"], "--context 100: must be at least 448"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refused(tmp_path, arguments, message):
    (tmp_path / "t.txt").write_text("text")
    fixed = ["calibrate", "no/model", "--text", str(tmp_path / "t.txt"), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*fixed, *arguments])
    with pytest.raises(KVQuantError, match=message):
        raise result.exception
    assert [p.name for p in tmp_path.iterdir()] == ["t.txt"]


def test_an_unknown_model_with_no_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "t.txt").write_text("text")
    fixed = ["calibrate", "no-such-org/no-model", "--text", str(tmp_path / "t.txt"), "--output", str(tmp_path / "out")]
    for engine in (["--device", "cpu"], ["--engine", "sglang"]):
        result = CliRunner().invoke(app, [*fixed, *engine])
        with pytest.raises(KVQuantError, match="no-such-org/no-model: transformers cannot .*folder"):
            raise result.exception


def test_engine_keywords():
    assert _engine("transformers", 1, []) is None
    assert _engine("sglang", 4, ["mem_fraction_static=0.8", "dtype=bfloat16", "trust_remote_code=true"]) == {
        "tp_size": 4, "mem_fraction_static": 0.8, "dtype": "bfloat16", "trust_remote_code": True,
    }  # fmt: skip


def stdout_json(*arguments):
    """What a command that succeeds writes to stdout, which must be one JSON value."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_every_command_has_json():
    own_parser = {"eval"}
    assert "--json" in evaluation_parser().format_help()
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        if name not in own_parser:
            assert "as_json" in command.callback.__annotations__, name


def test_calibrate_and_convert_as_json(tmp_path):
    model, text = tiny_model_folder(tmp_path, tokens=1200)
    output = tmp_path / "out"
    found = stdout_json(
        "calibrate", model, "--text", text, "--output", output, "--tokens", 512, "--context", 512, "--composition",
        "oscar", "--no-sensitivity", "--device", "cpu",
    )  # fmt: skip
    assert found["output"] == str(output) and found["tokens"] == 512 and found["uploaded"] is None
    assert tuple(found["clip_k"]) == load_rotations(output, layers=2, kv_heads=2, head_dim=64).meta.clip_k
    converted = stdout_json("convert", output, tmp_path / "pair", "--to", "pt")
    assert converted == {"output": str(tmp_path / "pair"), "layout": "pt"} and (tmp_path / "pair").is_dir()


def test_calibrate_for_transform_coding_says_how_to_serve_it(tmp_path):
    model, text = tiny_model_folder(tmp_path, tokens=1200)
    arguments = [
        "calibrate", model, "--text", text, "--tokens", 512, "--context", 512, "--composition", "transform",
        "--no-sensitivity", "--device", "cpu",
    ]  # fmt: skip
    found = stdout_json(*arguments, "--output", tmp_path / "json")
    assert found["method"] == "transform" and found["clip_k"] is None
    shown = CliRunner().invoke(app, [*map(str, arguments), "--output", str(tmp_path / "out")], catch_exceptions=False)
    assert f"serve with: --kv-quant transform --kv-quant-rotations {tmp_path / 'out'}" in shown.stderr
    assert "coding gain K " in shown.stderr and "clip" not in shown.stderr.rpartition("rotations, ")[2]
    assert load_rotations(tmp_path / "out", layers=2, kv_heads=2, head_dim=64).is_transform


def test_an_error_leaves_stdout_empty(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvq", "inspect", str(tmp_path / "[bold]none"), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and out == "" and f"error: {tmp_path}/[bold]none: no such folder" in err


def test_a_line_about_a_path_is_neither_wrapped_nor_taken_for_markup(tmp_path):
    save_rotations(random_rotations(), tmp_path / "mine", kv_heads=2)
    output = tmp_path / ("[red]" + "long-" * 30)
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "mine"), str(output)], catch_exceptions=False)
    assert f"{output}: written" in result.stderr and result.stdout == ""
