"""``kvq`` refuses wrong arguments before it loads anything, and writes only JSON to stdout with ``--json``."""

import json
import sys

import pytest
import typer.main
from typer.testing import CliRunner

from sglang_kvq import cli
from sglang_kvq.cli import _engine, app
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import load_rotations, save_rotations
from sglang_kvq.rotations.inspection import budgets, recommend
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
        (["--composition", "transform", "--held-out-length", "100"], "--held-out-length 100: must be a multiple of 64"),
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
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for processes that are started
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # was read when this process began
    (tmp_path / "t.txt").write_text("text")
    fixed = ["calibrate", "no-such-org/no-model", "--text", str(tmp_path / "t.txt"), "--output", str(tmp_path / "out")]
    for engine in (["--device", "cpu"], ["--engine", "sglang"]):
        result = CliRunner().invoke(app, [*fixed, *engine])
        with pytest.raises(
            KVQuantError,
            match="no-such-org/no-model: no such folder, not in the hub.s cache, and HF_HUB_OFFLINE is set",
        ):
            raise result.exception


def test_engine_keywords():
    assert _engine("transformers", 1, []) is None
    given = ["mem_fraction_static=0.8", "dtype=bfloat16", "trust_remote_code=true"]
    assert _engine("sglang", 4, given, revision="main").keywords == {
        "tp_size": 4, "mem_fraction_static": 0.8, "dtype": "bfloat16", "trust_remote_code": True, "revision": "main",
    }  # fmt: skip


def stdout_json(*arguments):
    """Returns the JSON value that a successful command writes to stdout, which must hold nothing else."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_every_command_has_json():
    for name, command in typer.main.get_command(app).commands.items():
        assert "--json" in {flag for option in command.params for flag in option.opts}, name


def test_calibrate_and_convert_as_json(tmp_path):
    model, text = tiny_model_folder(tmp_path, tokens=1200)
    output = tmp_path / "out"
    found = stdout_json(
        "calibrate", model, "--text", text, "--output", output, "--tokens", 512, "--context", 512, "--composition",
        "oscar", "--no-sensitivity", "--device", "cpu",
    )  # fmt: skip
    assert found["output"] == str(output) and found["tokens"] == 512 and found["uploaded"] is None
    assert found["divergence"] is None
    assert not {"divergence", "importance"} & {
        k for k, v in json.loads((output / "config.json").read_text()).items() if v
    }
    assert tuple(found["clip_k"]) == load_rotations(output, layers=2, kv_heads=2, head_dim=64).meta.clip_k
    converted = stdout_json("convert", output, tmp_path / "pair", "--to", "pt")
    assert converted == {"output": str(tmp_path / "pair"), "layout": "pt"} and (tmp_path / "pair").is_dir()


def transform_arguments(folder, tokens=1200):
    model, text = tiny_model_folder(folder, tokens=tokens)
    return [
        "calibrate", model, "--text", text, "--tokens", 512, "--context", 512, "--composition", "transform",
        "--no-sensitivity", "--device", "cpu", "--held-out-contexts", 1, "--held-out-length", 512,
    ]  # fmt: skip


def test_calibrate_for_transform_coding_says_how_to_serve_it(tmp_path):
    arguments = transform_arguments(tmp_path)
    found = stdout_json(*arguments, "--no-recommend", "--output", tmp_path / "json")
    assert found["method"] == "transform" and found["clip_k"] is None and found["divergence"] is None
    assert "divergence" not in json.loads((tmp_path / "json" / "config.json").read_text())
    shown = CliRunner().invoke(
        app, [*map(str, arguments), "--no-recommend", "--output", str(tmp_path / "out")], catch_exceptions=False
    )
    assert f"serve with: --kv-quant transform --kv-quant-rotations {tmp_path / 'out'}\n" in shown.stderr
    assert "coding gain K " in shown.stderr and "clip" not in shown.stderr.rpartition("rotations, ")[2]
    assert load_rotations(tmp_path / "out", layers=2, kv_heads=2, head_dim=64).is_transform
    assert shown.stdout == ""


def test_calibrate_ends_with_the_budget_it_recommends(tmp_path):
    arguments = transform_arguments(tmp_path)
    out = tmp_path / "out"
    shown = CliRunner().invoke(
        app, [*map(str, arguments), "--output", str(out)], catch_exceptions=False, env={"COLUMNS": "80"}
    )
    config = json.loads((out / "config.json").read_text())
    found = config["divergence"]
    bits = found["recommended_bits"]  # a random model depends so little on its cache that the least budget suffices
    assert bits == 1.25 and found["tokens"] == 128
    assert f"recommended: --kv-quant-bits {bits:g}, the least budget" in shown.stderr
    assert shown.stderr.rstrip().endswith(f"--kv-quant-rotations {out} --kv-quant-bits {bits:g}")
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and [line for line in lines if line.rstrip().endswith("recommended")]
    for row in (*found["budgets"], found["reference"]):
        assert f"{row['kl']:.4f} ± {row['kl_error']:.4f}" in shown.stdout and f"{row['capacity']:.1f}x" in shown.stdout
    as_json = stdout_json(*arguments, "--output", tmp_path / "json")["divergence"]
    assert as_json == found

    inspected = stdout_json("inspect", out)
    assert inspected["divergence"] == found
    assert [row["budget"] for row in inspected["foreseen"]] == [row["budget"] for row in found["budgets"]]
    assert all(row["bound"] < row["nats"] and row["gap_db"] > 0 for row in inspected["foreseen"])
    text = CliRunner().invoke(app, ["inspect", str(out)], env={"COLUMNS": "80"}, catch_exceptions=False).stdout
    assert max(map(len, [line for line in text.splitlines() if str(out) not in line])) <= 80 and "…" not in text
    assert "recommended: --kv-quant-bits 1.25" in " ".join(text.split()) and "foreseen" in text
    for row in inspected["foreseen"]:
        assert f"{row['bound']:.4g}" in text and f"{row['gap_bits']:.2f}" in text


def test_no_text_to_recommend_a_budget_by(tmp_path):
    """The command says so before it calibrates anything."""
    arguments = [*map(str, transform_arguments(tmp_path, tokens=1000)), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, KVQuantError) and "room for 0 contexts of 512" in str(result.exception)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    assert CliRunner().invoke(app, [*arguments, "--no-recommend"]).exit_code == 0


def test_rotations_are_written_before_budgets_are_measured(tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(budgets, "measure_budgets", interrupt)
    result = CliRunner().invoke(app, [*map(str, transform_arguments(tmp_path)), "--output", str(tmp_path / "out")])
    assert result.exit_code == 130 and "is written, with no recommended budget" in " ".join(result.stderr.split())
    assert load_rotations(tmp_path / "out", layers=2, kv_heads=2, head_dim=64).is_transform


def test_budgets_of_a_folder_that_is_there(tmp_path, monkeypatch, capsys):
    arguments = transform_arguments(tmp_path)
    expected = stdout_json(*arguments, "--output", tmp_path / "one")["divergence"]
    stdout_json(*arguments, "--no-recommend", "--output", tmp_path / "two")
    given = ["recommend", arguments[1], tmp_path / "two", "--text", arguments[3], "--context", 512, "--contexts", 1]
    monkeypatch.setattr(sys, "argv", [*map(str, given), "--length", "512", "--device", "cpu"])
    recommend.main()
    assert "recommended: --kv-quant-bits 1.25" in capsys.readouterr().out
    assert json.loads((tmp_path / "two" / "config.json").read_text())["divergence"] == expected


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


@pytest.mark.parametrize("words", [["--text", "t.txt"], ["--methods", "int2"]], ids=" ".join)
def test_inspect_measures_nothing_without_a_model(tmp_path, words):
    save_rotations(random_rotations(), tmp_path / "mine", kv_heads=2)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "mine"), *words])
    assert isinstance(result.exception, KVQuantError) and f"{' '.join(words)}: needs --model" in str(result.exception)


def test_recommend_ends_with_one_line(tmp_path, monkeypatch):
    save_rotations(random_rotations(), tmp_path / "mine", kv_heads=2)
    for folder, why in (
        ("none", "no such folder"),
        ("mine", "not what `kvq calibrate --composition transform` writes"),
    ):
        words = ["recommend", "no/model", str(tmp_path / folder), "--text", "none", "--trust-remote-code"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit, match=f"^error: .*{folder}: {why}"):
            recommend.main()
