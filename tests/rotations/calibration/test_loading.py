"""A model that cannot be fully loaded is refused in one line that names the problem and the fix."""

import json
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_kvq import arguments
from sglang_kvq.arguments import cached_folder, find_model
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_config, load_model, tokenize
from tests.rotations.helpers import tiny_model_folder

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234567\n"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("whole"), tokens=10)[0]


@pytest.fixture
def folder(whole, tmp_path):
    """Returns a copy of the model's folder that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def refused(folder, match):
    with pytest.raises(KVQuantError, match=match) as caught:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_whole_model_is_loaded(folder):
    model, tokenizer = load_model(str(folder), device="cpu")
    assert model.dtype == torch.float32 and not model.training
    assert tokenize(tokenizer, "w1 w96", embedding_rows(model)).tolist() == [1, 96]


# -- weights that were not loaded ---------------------------------------------------------------------------------


def test_a_weight_that_is_missing(folder):
    change_weights(folder, lambda weights: {name: w for name, w in weights.items() if name != K_PROJ})
    refused(folder, f"1 weight not in its files, so they would be random .{K_PROJ}.. Fetch the whole model")


def test_names_with_a_prefix(folder):
    """The text part of a larger model has such names, and no weight would be loaded."""
    change_weights(folder, lambda weights: {f"language_model.{name}": w for name, w in weights.items()})
    refused(folder, "weights not in its files.*; .* weights in its files without a place in the model .language_model")


def test_weights_of_another_size(folder):
    change_config(folder, vocab_size=105)
    refused(folder, r"weights? of another shape than config.json says .*embed_tokens.weight.*Fetch both")


def test_a_weight_that_the_model_does_not_use(folder):
    change_weights(folder, lambda weights: {**weights, "model.layers.1.self_attn.gate.weight": torch.ones(4, 4)})
    refused(folder, "1 weight in its files without a place in the model .model.layers.1.self_attn.gate.weight")


def fp8(weights, scales):
    stored = {}
    for name, weight in weights.items():
        stored[name] = weight.to(torch.float8_e4m3fn) if name.endswith("_proj.weight") else weight
        if scales and name.endswith("_proj.weight"):
            stored[f"{name}_scale"] = torch.ones(())
    return stored


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("named", ["config.json", "hf_quant_config.json", "nowhere"])
def test_codes_that_transformers_would_take_for_weights(folder, named, scales):
    change_weights(folder, lambda weights: fp8(weights, scales))
    if named == "config.json":
        change_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    if named == "hf_quant_config.json":
        (folder / named).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    refused(folder, "Calibrate the unquantized model")


def test_what_the_model_itself_ignores_is_harmless(folder):
    """RoPE buffers of old checkpoints, and the weight of a tied output projection, are ignored."""
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(32) for i in range(2)}
    change_weights(folder, lambda weights: {**weights, **buffers})
    load_model(str(folder), device="cpu")
    change_config(folder, tie_word_embeddings=True)
    change_weights(folder, lambda weights: {name: w for name, w in weights.items() if name != "lm_head.weight"})
    load_model(str(folder), device="cpu")
    change_config(folder, tie_word_embeddings=False)
    refused(folder, "not in its files.*lm_head.weight")


def test_draft_heads_are_harmless_where_the_model_declares_them(tmp_path, whole):
    """Qwen3-Next's class declares that it ignores ``mtp``; Llama's does not."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_next", vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=2,
    )  # fmt: skip
    shutil.copytree(whole, tmp_path / "next")
    (tmp_path / "next" / "config.json").unlink()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "next")
    change_weights(tmp_path / "next", lambda weights: {**weights, "mtp.fc.weight": torch.ones(4, 4)})
    load_model(str(tmp_path / "next"), device="cpu")
    llama = Path(shutil.copytree(whole, tmp_path / "llama"))
    change_weights(llama, lambda weights: {**weights, "mtp.fc.weight": torch.ones(4, 4)})
    refused(llama, "without a place in the model .mtp.fc.weight")


# -- damaged files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_git_lfs_pointers(folder, name):
    (folder / name).write_text(POINTER)
    refused(folder, f"{name}: a Git LFS pointer.*git lfs pull")


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_truncated_weights(folder, left):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    refused(folder, "model.safetensors: .*Fetch it again")


def test_a_config_that_is_no_json(folder):
    (folder / "config.json").write_text('{"model_type": "llama"')
    refused(folder, "config.json: not JSON .*Fetch it again")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"llama"'])
def test_a_config_that_is_no_object(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, "config.json: .*, not a JSON object of a model's settings. Fetch it again")


def test_a_file_that_loading_does_not_read_may_hold_anything(folder):
    (folder / "prompts.json").write_text('{"prompt": 1}\n{"prompt": 2}\n')
    load_model(str(folder), device="cpu")


def test_a_shard_that_is_missing(folder):
    index = {"metadata": {}, "weight_map": dict.fromkeys(("a", "b"), "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "model-00001-of-00002.safetensors: .*index.json names this file, and it is missing")


@pytest.mark.parametrize("names", [None, [], {"a": 1}, {"a": ["model.safetensors"]}], ids=str)
def test_an_index_that_names_no_files(folder, names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(folder, "index.json: its weight_map does not name a file")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_a_file_that_this_user_may_not_read(folder, monkeypatch, name):
    real = Path.open

    def denied(self, *args, **kwargs):
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)  # as root, a test could read the file despite its mode
    refused(folder, f"{name}: cannot be read .Permission denied.")


@pytest.mark.parametrize(
    "name, why", [("config.json", "no config.json in this"), ("model.safetensors", "no weights in")]
)
def test_a_folder_without(folder, name, why):
    (folder / name).unlink()
    refused(folder, why)


def test_a_model_without_a_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    refused(folder, "cannot load its tokenizer .*tokenizer.json")


# -- token ids without a row --------------------------------------------------------------------------------------


def test_token_ids_beyond_the_embedding(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"].update({f"w{i}": i for i in range(97, 120)})
    path.write_text(json.dumps(tokenizer))
    model, tokenizer = load_model(str(folder), device="cpu")
    with pytest.raises(
        KVQuantError, match=rf"{folder}: .*token id 110 .'w110'., and the model's embedding has 97 rows"
    ):
        tokenize(tokenizer, "w5 w110 w100", embedding_rows(model))
    config, tokenizer = load_config(str(folder))
    with pytest.raises(KVQuantError, match="97 rows"):
        tokenize(tokenizer, "w97", embedding_rows(config))


# -- names --------------------------------------------------------------------------------------------------------


def asks_the_hub(monkeypatch, endpoint):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(arguments, "TIMEOUT", 0.5)


@pytest.mark.parametrize("answers", ["nothing", "refuses"])
def test_a_name_that_the_hub_does_not_know_takes_seconds(monkeypatch, answers):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers == "nothing":
            server.listen(50)
        asks_the_hub(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(KVQuantError, match="no such folder"):
            load_model("./imports", device="cpu")  # so that only the hub's time counts below
        begin = time.monotonic()
        with pytest.raises(KVQuantError, match="no-org/mistyped: no such folder, .*the hub does not answer"):
            load_model("no-org/mistyped", device="cpu")
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    "path, why",
    [
        ("no/such/folder/here", "no such folder, and not a hub id"),
        ("./model", "no such folder, and not a hub id"),
        ("", "no such"),
    ],
)
def test_paths_that_are_none(path, why):
    with pytest.raises(KVQuantError, match=why):
        find_model(path)


def test_a_file_is_no_model(folder):
    with pytest.raises(KVQuantError, match="model.safetensors: a file, not the folder"):
        find_model(str(folder / "model.safetensors"))


def test_a_cached_model_is_taken_while_the_hub_does_not_answer(monkeypatch, tmp_path, folder):
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    (tmp_path / "hub" / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    asks_the_hub(monkeypatch, "http://127.0.0.1:9")
    assert find_model("org/tiny")["local_files_only"]
    assert cached_folder("org/tiny") == snapshot
