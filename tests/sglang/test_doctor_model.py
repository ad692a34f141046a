"""``kvq doctor --model`` answers from a model's config alone, as the server would."""

import json
import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks.capacity import random_rotations
from sglang_kvq.cli import app
from sglang_kvq.config import PAGE_SIZE, KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import capacity, doctor_model, runtime
from tests.conftest import ROOT

QWEN3 = str(ROOT / "benchmarks" / "models" / "qwen3-8b")
SMOLLM2 = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    rope_theta=100000.0,
)


def ask(*argv: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["doctor", "--model", *argv])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout.splitlines()


def answer(*argv: str) -> dict:
    _, shown = ask(*argv, "--json")
    return json.loads("\n".join(shown))


def test_model_that_is_served():
    status, shown = ask(QWEN3, "--memory", "103")
    assert status == 0
    text = "\n".join(shown)
    assert shown[0] == f"served: {QWEN3}"
    assert "Qwen 3 (Qwen3ForCausalLM): compared with plain SGLang on an H200" in text
    assert "32 query heads over 8 KV heads of 128 elements" in text and "36 of 36 are quantized" in text
    assert "147,456 bytes in BF16, 20,736 with --kv-quant oscar (7.11x less)" in text
    assert shown[-1].endswith(f"sglang.launch_server --model-path {QWEN3} --kv-quant oscar")


def test_tokens_are_those_that_a_server_had():
    """Of the H200 in serving_h200.json, whose KV memory was what BF16's tokens take."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "serving_h200.json").read_text())["rows"]
    row = next(row for row in rows if row["scenario"] == "capacity")
    found = answer(QWEN3, "--memory", str(row["none"] * 147456 / 2**30))
    assert found["tokens_bf16"] == pytest.approx(row["none"], rel=1e-3)
    assert found["tokens"] == pytest.approx(row["oscar"], rel=2e-3)


def test_tokens_are_those_of_the_servers_hooks(monkeypatch):
    from sglang_kvq.cache.layout import KVGeometry, fit
    from sglang_kvq.formats.page import PageFormat

    config, budget = KVQuantConfig("int2"), 1 << 30
    geometry = KVGeometry(2, (PageFormat(64, 64),) * 3)
    monkeypatch.setattr(runtime, "_current", state := runtime.Runtime(config, geometry, (0, 1, 2)))

    def original(self, available_bytes, page_size):
        return available_bytes // (geometry.page_bytes // PAGE_SIZE) // PAGE_SIZE * PAGE_SIZE

    tokens = capacity.calculate_pool_sizes(original, None, budget, PAGE_SIZE)
    layout = fit(config, geometry, budget)
    assert (layout.tokens, layout.slots <= state.budget_slots) == (tokens, True)
    assert layout.total_bytes + geometry.slot_bytes + geometry.page_bytes <= budget


def test_workers_share_the_heads():
    alone, shared = answer(QWEN3, "--memory", "10"), answer(QWEN3, "--memory", "10", "--tp", "4")
    assert (shared["query_heads"], shared["kv_heads"]) == (8, 2)
    assert shared["bytes_quantized"] == alone["bytes_quantized"] / 4
    assert shared["tokens"] == pytest.approx(4 * alone["tokens"], rel=1e-2)
    assert "--tp 4" in shared["command"]


def test_rotations_of_the_zoo_are_named(model_folder):
    found = answer(model_folder(**SMOLLM2))
    assert found["rotations"].endswith("smollm2-135m-instruct") and found["calibrate"] is None
    planes = answer(model_folder(**SMOLLM2), "--method", "transform", "--bits", "1.6")
    assert planes["rotations"].endswith("smollm2-135m-instruct-transform")
    assert planes["bytes_quantized"] * 8 / (2 * 30 * 3 * 64) <= 1.6 + 1 / 32, "first tokens come on top"
    assert "--kv-quant-bits 1.6" in planes["command"]


def test_missing_rotations_name_the_command(model_folder):
    model = model_folder()
    found = answer(model)
    assert (found["answer"], found["rotations"]) == ("served", None)
    assert found["calibrate"] == f"kvq calibrate {model} --text FILE --output rotations"
    assert found["command"].endswith("--kv-quant oscar --kv-quant-rotations rotations")
    _, shown = ask(model)
    assert any("none known; first: kvq calibrate" in line for line in shown)
    planes = answer(model, "--method", "transform")
    assert "--composition transform" in planes["calibrate"] and planes["bytes_quantized"] is None


def test_method_without_rotation_files_needs_none(model_folder):
    found = answer(model_folder(), "--method", "hadamard")
    assert found["rotations"] is None and found["calibrate"] is None and found["bytes_quantized"]
    assert not any("rotations" in line for line in ask(model_folder(), "--method", "hadamard")[1])


def test_rotations_that_are_given_must_fit(model_folder, tmp_path):
    fitting = random_rotations(tmp_path / "fitting", 2, 2, 64)
    found = answer(model_folder(), "--rotations", str(fitting))
    assert found["rotations"] == str(fitting) and f"--kv-quant-rotations {fitting}" in found["command"]
    with pytest.raises(KVQuantError, match="head_dim 128"):
        ask(model_folder(), "--rotations", str(random_rotations(tmp_path / "other", 2, 2, 128)))
    with pytest.raises(KVQuantError, match="uses no rotation files"):
        ask(model_folder(), "--method", "int4", "--rotations", str(fitting))


@pytest.mark.parametrize(
    ("changes", "why", "lift"),
    [
        (dict(architectures=["SDARForCausalLM"]), "attention that looks at later tokens", "nothing planned"),
        (dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text"), "sliding windows", "a pool of their own"),
        (dict(head_dim=80), "heads of 80 elements", None),
        (dict(num_attention_heads=64, num_key_value_heads=1), "64 query heads to a KV head.*add --tp 4", None),
        (dict(architectures=["SomethingElse"]), "SGLang has no class", None),
    ],
    ids=["by the table", "by the config", "size", "group", "unknown"],
)
def test_model_that_is_refused(model_folder, changes, why, lift):
    model = model_folder(**changes)
    status, shown = ask(model)
    found = answer(model)
    assert status == 1 and found["answer"] == "refused" and found["command"] is None and found["tokens"] is None
    assert shown[0].startswith("refused: ")
    assert re.search(why, shown[0]) and not any("serve with" in line for line in shown), shown
    assert (found["lift"] is None) == (lift is None) and (lift is None or lift in shown[1])


def test_more_workers_make_room_for_many_query_heads(model_folder):
    model = model_folder(num_attention_heads=64, num_key_value_heads=1)
    assert ask(model, "--tp", "4")[0] == 0


def test_other_dtype_names_the_flag(model_folder):
    found = answer(model_folder(torch_dtype="float16"))
    assert found["answer"] == "served" and "--dtype bfloat16" in found["command"]


def test_config_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(KVQuantError, match="--model nowhere/model: no such folder, not in the hub's cache"):
        ask("nowhere/model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KVQuantError, match="cannot read its config"):
        ask(str(tmp_path))


@pytest.mark.parametrize("argv", [("--memory", "0"), ("--tp", "0"), ("--method", "int3"), ("--bits", "9")])
def test_wrong_options(argv):
    with pytest.raises(KVQuantError, match=argv[1]):
        ask(QWEN3, *argv)


def test_options_of_a_model_without_one():
    result = CliRunner().invoke(app, ["doctor", "--memory", "4"])
    assert isinstance(result.exception, KVQuantError) and "add --model" in str(result.exception)


def test_memory_of_a_gpu_less_the_weights(monkeypatch, model_folder, tmp_path):
    import torch

    gpu = SimpleNamespace(total_memory=1 << 30, name="Some GPU", major=9, minor=0)
    for name, value in (("is_available", True), ("current_device", 0), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpu)
    request = doctor_model.Request(model_folder(), KVQuantConfig("int4"))
    found = doctor_model.Diagnosis("m", "int4", "served")
    model = SimpleNamespace(model_path=request.model, revision=None)
    doctor_model._guess_memory(found, request, model)
    assert found.memory is None and found.memory_from is None, "nothing tells the weights' size"
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1 << 20))
    doctor_model._guess_memory(found, request, model)
    assert found.memory == int(0.88 * (1 << 30)) - (1 << 20) and "Some GPU" in found.memory_from
    gpu.total_memory = 1 << 20
    found.memory = None
    doctor_model._guess_memory(found, request, model)
    assert found.memory is None and "about" in found.memory_from
