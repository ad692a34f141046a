"""``kvq inspect`` prints tables that fit a terminal, the same values as JSON, and a picture."""

import builtins
import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sglang_kvq.cli import app
from sglang_kvq.errors import KVQuantError
from sglang_kvq.methods import METHOD_NAMES
from sglang_kvq.rotations import save_rotations
from sglang_kvq.rotations.inspection.candidates import candidates_of
from sglang_kvq.rotations.inspection.layer_errors import Measured
from sglang_kvq.rotations.inspection.tables import report, to_json, top_share
from sglang_kvq.rotations.maths.transform import coding_gain
from sglang_kvq.rotations.storage import zoo
from sglang_kvq.rotations.storage.schema import CONFIG_FILE
from sglang_kvq.rotations.storage.zoo import zoo_folder
from tests.rotations.helpers import random_rotations, random_transform, tiny_llama, tiny_model_folder


@pytest.fixture
def folder(tmp_path):
    rotations = random_rotations()
    table = {part: {"2": [0.5, 0.25], "4": [0.01, 0.02]} for part in "kv"}
    meta = replace(rotations.meta, clip_k=(0.86, 0.9), sensitivity=table, sensitivity_unit="nats per token")
    save_rotations(replace(rotations, meta=meta), tmp_path / "mine", kv_heads=2)
    return tmp_path / "mine"


def inspect(*arguments, stream="output"):
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "80"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return getattr(result, stream)


def whole(lines, *headers):
    """Checks that no line is wider than 80 columns and that no word of a header is cut."""
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines), lines
    words = " ".join(lines).split()
    assert all(word in words for header in headers for word in header.split()), lines


def test_without_a_model_it_shows_what_the_folder_says(folder):
    output = inspect(folder)
    for words in ("org/tiny", "2 layers, 2 KV heads, head_dim 64", "0.86 to 0.9 by layer", "0.25"):
        assert words in output, output
    whole(output.splitlines(), "layer", "clip K", "clip V", "nats K2 K4 V2 V4", "top 8 K V")


def test_long_texts_are_told_when_asked(folder):
    assert "nats per token" not in inspect(folder) and "sensitivity at" not in inspect(folder)
    assert "nats per token" in inspect(folder, "--verbose") and "sensitivity at" in inspect(folder, "--verbose")


def test_shipped_rotations_fit_80_columns():
    for path in sorted(
        folder for folder in zoo_folder().iterdir() if folder.is_dir() and (folder / CONFIG_FILE).is_file()
    ):
        transform = zoo.is_transform(json.loads((path / CONFIG_FILE).read_text()))
        for verbose in ((), ("--verbose",)):
            headers = ("layer", "clip K V", "error", "nats K2 K4 V2 V4", "top 8")
            headers = ("layer", "gain dB", "weight", "bits") if transform else headers
            whole([line for line in inspect(path, *verbose).splitlines() if str(path) not in line], *headers)


def test_transform_coding_shows_gains_and_widths(tmp_path):
    rotations = random_transform(layers=3)
    save_rotations(rotations, tmp_path / "mine", kv_heads=2)
    output = inspect(tmp_path / "mine", "--plot", tmp_path / "plot.png")
    lines = [line for line in output.splitlines() if str(tmp_path) not in line]  # lines with its path may be long
    whole(lines, "layer", "gain K dB V", "weight", "bits")
    assert "clip" not in output and "coding gain   K " in output and (tmp_path / "plot.png").stat().st_size
    found = json.loads(inspect(tmp_path / "mine", "--json", stream="stdout"))
    assert found["importance"] == rotations.meta.importance
    for part, energies in (("k", rotations.k_energies), ("v", rotations.v_energies)):
        gains = coding_gain(energies).mean(1)
        assert found["coding_gain_db"][part] == pytest.approx(gains.tolist()) and gains.min() > 0
        for layer, widths in enumerate(found["widths"][part]):
            assert "+".join(map(str, widths)) in output and f"{gains[layer]:.1f}" in output
    bits = [sum(w) / 4 + 8 / 64 for part in "kv" for w in found["widths"][part]]
    assert 2.2 < sum(bits) / len(bits) <= 2.5
    explained = " ".join(inspect(tmp_path / "mine", "--verbose").split())
    assert "of each plane at 2.5 bits" in explained and "of each plane" not in output
    others = json.loads(json.dumps(to_json(random_rotations(), 2, None)))
    assert others["widths"] is None and others["coding_gain_db"] is None


@pytest.mark.parametrize("kind", ["transform", "others"])
def test_methods_are_those_that_the_rotations_are_for(kind):
    learned = random_transform() if kind == "transform" else random_rotations()
    model = tiny_llama().config
    names = [c.name for c in candidates_of([], learned, model)]
    assert set(names) == set(METHOD_NAMES) - ({"oscar", "oscar-lloyd-max"} if kind == "transform" else {"transform"})
    with pytest.raises(KVQuantError, match="transform coding"):
        candidates_of(["oscar" if kind == "transform" else "transform"], learned, model)


def test_errors_of_every_method_fit_80_columns():
    errors = {name: torch.rand(2, 40, 8, dtype=torch.float64) for name in (*METHOD_NAMES, "oscar:auto:2.5")}
    measured = Measured(errors, contexts=2, length=2048)
    console = Console(width=80, file=io.StringIO())
    for part in report(random_rotations(layers=40), 8, measured, width=80, verbose=True):
        console.print(part)
    text = console.file.getvalue()
    whole(text.splitlines(), *errors, "worst head")
    assert f"{errors[METHOD_NAMES[0]][0, 7].mean():.4f}" in text and text.count("(1 of") == 2


def test_json_has_all_of_it_and_nothing_else_is_on_stdout(folder, tmp_path):
    model, text = tiny_model_folder(tmp_path, tokens=1200)
    found = json.loads(inspect(folder, "--json", stream="stdout"))
    assert found["geometry"] == {"layers": 2, "kv_heads": 2, "head_dim": 64} and found["measured"] is None
    assert found["clip_k"] == [0.86, 0.9] and found["sensitivity"]["v"]["4"] == [0.01, 0.02]
    measure = ("--model", model, "--text", text, "--methods", "int2,oscar", "--length", 512, "--device", "cpu")
    measured = json.loads(inspect(folder, "--json", *measure, "--plot", tmp_path / "p.png", stream="stdout"))[
        "measured"
    ]
    assert set(measured["errors"]) == {"int2", "oscar"} and measured["length"] == 512
    assert [len(layer) for layer in measured["errors"]["oscar"]["k"]] == [2, 2]


def test_json_has_null_where_an_error_is_no_number():
    errors = torch.tensor([[[float("nan")]], [[0.5]]], dtype=torch.float64)
    found = to_json(random_rotations(layers=1, heads=1), 1, Measured({"int2": errors}, 1, 512))
    assert found["measured"]["errors"]["int2"] == {"k": [[None]], "v": [[0.5]]}
    json.dumps(found, allow_nan=False)


def test_with_a_model_it_measures_methods_by_layer_and_draws(folder, tmp_path):
    model, text = tiny_model_folder(tmp_path, tokens=1200)
    picture = tmp_path / "plot.png"
    methods = "oscar,int2,kivi,turboquant:2.5,oscar:4"
    where = ("--model", model, "--text", text, "--length", 512, "--device", "cpu")
    output = inspect(folder, *where, "--methods", methods, "--plot", picture)
    assert output.count("mean") == 2 and "quantized keys" in output and "quantized values" in output
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_top_share_is_of_the_largest():
    assert top_share(torch.tensor([[[1.0, 2.0, 7.0]]]), 1).item() == pytest.approx(0.7)


def test_plot_needs_matplotlib(folder, tmp_path, monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(KVQuantError, match=r"sglang-kvq\[plot\]"):
        inspect(folder, "--plot", tmp_path / "x.png")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "x"], "Pass --text FILE"),
        (["--model", "x", "--text", "y", "--length", "100"], "at least 1 context of 448 tokens"),
        (["--plot", "no/such/folder/x.png"], "cannot write this picture"),
    ],
    ids=["no text", "short", "plot"],
)
def test_bad_arguments(folder, arguments, message):
    with pytest.raises(KVQuantError, match=message):
        inspect(folder, *arguments)


def test_rotations_of_another_model(folder, tmp_path):
    model, text = tiny_model_folder(tmp_path, tokens=1200)
    save_rotations(random_rotations(layers=3), tmp_path / "other", kv_heads=2)
    with pytest.raises(KVQuantError, match="3 layers"):
        inspect(tmp_path / "other", "--model", model, "--text", text, "--length", 512, "--device", "cpu")
    with pytest.raises(KVQuantError, match="the text has 1200 tokens, 4 contexts of 512 need 2048"):
        inspect(folder, "--model", model, "--text", text, "--length", 512, "--contexts", 4, "--device", "cpu")


def test_measurements_of_keys_alone_or_that_are_no_numbers(tmp_path):
    rotations = random_rotations()
    meta = replace(rotations.meta, sensitivity={"k": {"2": [1.0, 2.0]}}, errors={"k": [float("nan"), 1.0]})
    save_rotations(replace(rotations, meta=meta), tmp_path / "mine", kv_heads=2)
    words = ["inspect", str(tmp_path / "mine"), "--json", "--plot", str(tmp_path / "p.png")]
    shown = CliRunner().invoke(app, words, catch_exceptions=False)
    found = json.loads(shown.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["errors"] == {"k": [None, 1.0]} and (tmp_path / "p.png").stat().st_size > 0
