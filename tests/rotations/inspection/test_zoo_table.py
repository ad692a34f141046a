"""``kvq zoo`` prints a table that fits a terminal, details, and JSON."""

import json

from typer.testing import CliRunner

from sglang_kvq.cli import app
from sglang_kvq.rotations import save_rotations
from sglang_kvq.rotations.storage.registry import PUBLISHED
from sglang_kvq.rotations.storage.zoo import shipped, zoo_folder
from tests.rotations.helpers import random_rotations, random_transform


def zoo(monkeypatch, *arguments, in_cache=None, columns=80):
    monkeypatch.setattr("sglang_kvq.rotations.inspection.zoo_table.cached", lambda repo: in_cache)
    result = CliRunner().invoke(app, ["zoo", *arguments], catch_exceptions=False, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.stdout


def test_the_table_names_every_model_whole_in_80_columns(monkeypatch):
    output = zoo(monkeypatch)
    models = [config["base_model"] for _, config in shipped()] + [entry.model for entry in PUBLISHED]
    rows = [line.split() for line in output.splitlines()]
    assert all(any(row[:1] == [model] for row in rows) for model in models), output
    assert max(map(len, output.splitlines())) <= 80 and "…" not in output
    assert any(row == ["model", "for", "from", "here", "clip", "K", "clip", "V"] for row in rows)
    assert ["Qwen3-8B", "oscar", "hub", "no"] in rows and ["Qwen3.5-4B", "oscar", "hub?", "no"] in rows
    assert ["GLM-5.2-FP8", "none", "hub", "no"] in rows


def test_the_legend_fills_its_lines(monkeypatch):
    for columns in (60, 80):  # the table, which the legend is as wide as, needs 80
        lines = zoo(monkeypatch, columns=columns).rstrip().splitlines()
        legend = lines[next(place for place, line in enumerate(lines) if line.startswith("for: ")) :]
        following = [line.split()[0] for line in legend[1:]]
        assert all(len(line.rstrip()) + 1 + len(word) > columns - 2 for line, word in zip(legend, following)), legend


def test_details_have_locations_and_texts(monkeypatch):
    output = zoo(monkeypatch, "--verbose")
    for folder, config in shipped():
        assert f"shipped: {folder}" in output and config["corpus"] in output
    assert "hub: Zhongzhu/OSCAR-RotationZoo/Qwen3-8B/seq20000_prompt83_group128\n  not in the cache" in output
    inferred = "  the folder's name is inferred from its authors' scripts, not confirmed\n"
    assert f"hub: Zhongzhu/OSCAR-RotationZoo/Qwen3.5-4B\n{inferred}  not in the cache" in output
    assert "GLM-5.2-FP8/c_kv_rcov_phblock_g128\n  not served: MLA\n" in output


def test_each_methods_rotations_of_a_model_have_a_row(monkeypatch, tmp_path):
    for name, rotations in (("tiny", random_rotations()), ("tiny-transform", random_transform())):
        save_rotations(rotations, tmp_path / "zoo" / name, kv_heads=2)
    monkeypatch.setattr("sglang_kvq.rotations.storage.zoo.zoo_folder", lambda: tmp_path / "zoo")
    rows = [line.split() for line in zoo(monkeypatch).splitlines()]
    assert ["org/tiny", "oscar", "shipped", "yes", "0.9", "0.92"] in rows
    assert ["org/tiny", "transform", "shipped", "yes"] in rows
    assert "per-head, for transform\n" in zoo(monkeypatch, "--verbose")
    found = json.loads(zoo(monkeypatch, "--json"))
    assert [entry["method"] for entry in found if entry["origin"] == "shipped"] == ["oscar", "transform"]


def test_json(monkeypatch, tmp_path):
    folder = tmp_path / "Qwen3-8B" / "seq20000_prompt83_group128"
    folder.mkdir(parents=True)
    for name in ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"):
        (folder / name).touch()
    entries = json.loads(zoo(monkeypatch, "--json", in_cache=tmp_path))
    found = {entry["model"]: entry for entry in entries if entry["method"] != "transform"}
    ours = found["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert ours["origin"] == "shipped" and ours["folder"].startswith(str(zoo_folder())) and len(ours["clip_k"]) == 30
    coded = {entry["model"]: entry for entry in entries if entry["method"] == "transform"}
    assert coded[ours["model"]]["origin"] == "shipped" and coded[ours["model"]]["clip_k"] is None
    assert found["Qwen3-8B"]["folder"] == str(folder) and found["Qwen3-32B"]["folder"] is None
    assert found["Qwen3-8B"]["origin"] == "hub" and found["Qwen3-8B"]["clip_k"] is None
    assert found["Qwen3.5-4B"]["location_inferred"] and not found["Qwen3-8B"]["location_inferred"]
    assert found["GLM-5.2-FP8"]["method"] == "none" and found["GLM-5.2-FP8"]["refused"] == "MLA"
