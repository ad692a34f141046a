"""``kvq inspect``: errors by layer and head against their definition, tables, and the picture."""

import builtins
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from sglang_kvq.cli import app
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import save_rotations
from sglang_kvq.rotations.inspection.candidates import candidate_of
from sglang_kvq.rotations.inspection.layer_errors import layer_errors, top_share
from tests.rotations.helpers import random_rotations, tiny_llama, tiny_model_folder


@pytest.fixture
def folder(tmp_path):
    rotations = random_rotations()
    table = {part: {"2": [0.5, 0.25], "4": [0.01, 0.02]} for part in "kv"}
    meta = replace(rotations.meta, clip_k=(0.86, 0.9), sensitivity=table, sensitivity_unit="nats per token")
    save_rotations(replace(rotations, meta=meta), tmp_path / "mine", kv_heads=2)
    return tmp_path / "mine"


def inspect(*arguments):
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_without_a_model_it_shows_what_the_folder_says(folder):
    output = inspect(folder)
    for words in (
        "org/tiny",
        "2 layers, 2 KV heads, head_dim 64",
        "0.86 to 0.9 by layer",
        "nats K2",
        "0.25",
        "top 8 V",
    ):
        assert words in output, output


def test_with_a_model_it_measures_methods_by_layer_and_draws(folder, tmp_path):
    model, text = tiny_model_folder(tmp_path, tokens=1200)
    picture = tmp_path / "plot.png"
    output = inspect(
        folder, "--model", model, "--text", text, "--methods", "oscar,int2,kivi,turboquant:2.5,oscar:4", "--length", 512, "--device", "cpu", "--plot",
        picture,
    )  # fmt: skip
    assert output.count("mean") == 2 and "quantized keys" in output and "quantized values" in output
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_errors_follow_their_definition():
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 512, 64), torch.randn(2, 512, 64), torch.randn(2, 512, 64)
    k[1] *= 2  # a head with sharper attention errs more
    candidate = candidate_of("int2", None, tiny_llama().config)
    error, size = layer_errors(candidate, 0, q, k, v, 0.125, [448])
    k, v = k.bfloat16().float(), v.bfloat16().float()
    old_k, old_v = candidate.formats[0].dequantize_pages(
        candidate.formats[0].quantize_pages(k.view(2, 8, 64, 64), v.view(2, 8, 64, 64))
    )
    mask = torch.ones(64, 512, dtype=torch.bool).tril(448)
    for head in range(2):
        rows = q[2 * head : 2 * head + 2, 448:]

        def attend(keys, values):
            scores = (rows @ keys.T * 0.125).masked_fill(~mask, -torch.inf)
            return scores.softmax(-1) @ values

        def mixed(exact, old):
            return torch.cat([exact[head, :64], old[head].flatten(0, 1)[64:192].bfloat16().float(), exact[head, 192:]])

        exact = attend(k[head], v[head])
        assert float(size[head]) == pytest.approx(float(exact.square().sum()), rel=1e-4)
        changed = (attend(mixed(k, old_k), v[head]), attend(k[head], mixed(v, old_v)))
        for part, out in enumerate(changed):
            assert float(error[part, head]) == pytest.approx(float((out - exact).square().sum()), rel=1e-3)
    assert error[0, 1] / size[1] > error[0, 0] / size[0]


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
        (["--model", "x"], "pass --text FILE"),
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
