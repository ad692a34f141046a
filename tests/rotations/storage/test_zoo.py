import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import find_rotations, load_rotations, save_rotations
from sglang_kvq.rotations.calibration import to_folder
from sglang_kvq.rotations.identity import identity
from sglang_kvq.rotations.storage import zoo
from sglang_kvq.rotations.storage.registry import cached_id
from sglang_kvq.rotations.storage.zoo import zoo_folder
from tests.rotations.helpers import random_rotations, random_transform, tiny_model_folder

SMOLLM2 = dict(
    architectures=["LlamaForCausalLM"], hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, vocab_size=49152, rope_theta=100000,
)  # fmt: skip


def test_shipped_rotations_are_found_for_a_nameless_folder(tmp_path):
    location = find_rotations(str(tmp_path), SMOLLM2)
    rotations = load_rotations(location, layers=30, kv_heads=3, head_dim=64)
    assert rotations.meta.model["hidden_size"] == 576 and rotations.meta.corpus and rotations.meta.tokens
    assert find_rotations("HuggingFaceTB/SmolLM2-135M-Instruct", SMOLLM2) == location


def test_config_object_and_both_ways_to_write_rope_theta(tmp_path):
    from transformers import LlamaConfig

    fields = {k: v for k, v in SMOLLM2.items() if k != "rope_theta"}
    config = LlamaConfig(**fields, rope_parameters={"rope_type": "default", "rope_theta": 100000.0})
    assert identity(config) == identity(SMOLLM2)
    assert find_rotations(str(tmp_path), config) == find_rotations(str(tmp_path), SMOLLM2)


@pytest.mark.parametrize("field, value", [("vocab_size", 49153), ("rope_theta", 1e4), ("num_key_value_heads", 9)])
def test_another_model_of_similar_shape_is_not_served(tmp_path, field, value):
    with pytest.raises(KVQuantError, match="kvq calibrate.*--kv-quant int4"):
        find_rotations(str(tmp_path), {**SMOLLM2, field: value})


def test_a_fine_tune_is_told_of_its_base():
    with pytest.raises(KVQuantError, match="someone/tuned.*SmolLM2-135M-Instruct.*--kv-quant-rotations"):
        find_rotations("someone/tuned", SMOLLM2)


def test_a_model_with_windows_is_told_what_calibrates_it():
    config = SimpleNamespace(layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(KVQuantError, match="`kvq calibrate org/windows --engine sglang --text"):
        find_rotations("org/windows", config)
    with pytest.raises(KVQuantError, match="SGLang gives no gradients .* Use --kv-quant oscar") as error:
        find_rotations("org/windows", config, transform=True)
    assert "kvq calibrate" not in str(error.value)


def test_transform_codings_rotations_lie_beside_others(tmp_path, monkeypatch):
    """Each method finds its own rotations under any folder name; none are published for transform coding."""
    for name, rotations in (("tiny-transform", random_transform()), ("tiny", random_rotations())):
        meta = replace(rotations.meta, model=identity(SMOLLM2), base_model="org/tiny")
        save_rotations(replace(rotations, meta=meta), tmp_path / "zoo" / name, kv_heads=2)
    monkeypatch.setattr(zoo, "zoo_folder", lambda: tmp_path / "zoo")
    assert find_rotations("org/tiny", SMOLLM2) == str(tmp_path / "zoo" / "tiny")
    assert find_rotations("org/tiny", SMOLLM2, transform=True) == str(tmp_path / "zoo" / "tiny-transform")
    with pytest.raises(KVQuantError, match="tiny-transform. Better: `kvq calibrate org/tuned --composition transform`"):
        find_rotations("org/tuned", SMOLLM2, transform=True)
    wanted = "no rotations for transform coding known .*`kvq calibrate Qwen/Qwen3-8B --composition transform --text"
    with pytest.raises(KVQuantError, match=wanted):
        find_rotations("Qwen/Qwen3-8B", {}, transform=True)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "/models/Qwen3-8B", "Qwen/Qwen3-4B-Thinking-2507"])
def test_published_entries_go_by_name(model):
    folder = f"{model.rsplit('/', 1)[-1]}/seq20000_prompt83_group128"
    assert find_rotations(model, {}) == f"Zhongzhu/OSCAR-RotationZoo/{folder}"


def test_a_snapshot_of_the_hubs_cache_has_the_models_name(tmp_path, monkeypatch):
    location = "Zhongzhu/OSCAR-RotationZoo/Qwen3-8B/seq20000_prompt83_group128"
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    assert find_rotations(str(snapshot), {}) == find_rotations(f"{snapshot}/", {}) == location
    assert zoo.with_folder("Zhongzhu/OSCAR-RotationZoo", str(snapshot)) == location
    monkeypatch.chdir(snapshot)
    assert find_rotations(".", {}) == location
    assert (
        to_folder._recorded_name(".") == "Qwen/Qwen3-8B" and cached_id("org/name") is cached_id("/snapshots/x") is None
    )


def test_only_the_published_repository_has_its_folders():
    repo, own = "Zhongzhu/OSCAR-RotationZoo", "org/name/Qwen3.5-4B"
    assert zoo.with_folder(f"{repo}@v1", "Qwen/Qwen3.5-4B") == f"{repo}/Qwen3.5-4B@v1"
    for other in (f"{repo}/Qwen3-32B", "org/name", own):
        assert zoo.with_folder(other, "Qwen/Qwen3.5-4B") == other
    assert zoo.is_inferred(f"{repo}/Qwen3.5-4B@v1") and not zoo.is_inferred(own)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B-Base", "Qwen/Qwen3-80B", "org/My-Qwen3-8B"])
def test_similar_names_are_not_published_ones(model):
    with pytest.raises(KVQuantError):
        find_rotations(model, {})


def test_every_shipped_folder_loads():
    folders = [path for path in zoo_folder().iterdir() if (path / "config.json").is_file()]
    assert folders
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        load_rotations(folder, **config["geometry"])
        assert config["model"] and config["base_model"]
        assert config["importance"] if zoo.is_transform(config) else config["clip_k"] and config["clip_v"]


def test_calibrate_command_then_lookup(tmp_path, monkeypatch):
    """`kvq calibrate` on a tiny model writes a folder that the zoo recognizes."""
    from typer.testing import CliRunner

    from sglang_kvq.cli import app

    folder, text = tiny_model_folder(tmp_path, tokens=2000)
    model_config = json.loads((folder / "config.json").read_text())
    arguments = [
        "calibrate", str(folder), "--text", str(text), "--output", str(tmp_path / "zoo" / "tiny"),
        "--tokens", "1024", "--context", "512", "--text-share", "0.8", "--device", "cpu",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    config = json.loads((tmp_path / "zoo" / "tiny" / "config.json").read_text())
    assert config["corpus"].endswith("corpus.txt, first 80% of its characters") and config["base_model"] == "model"
    monkeypatch.setattr(zoo, "zoo_folder", lambda: tmp_path / "zoo")
    assert find_rotations(str(folder), model_config) == str(tmp_path / "zoo" / "tiny")

    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, KVQuantError) and "--overwrite" in str(result.exception)
    shutil.rmtree(folder)
    result = CliRunner().invoke(app, [*arguments, "--overwrite"])
    assert isinstance(result.exception, KVQuantError) and "no such folder" in str(result.exception)
