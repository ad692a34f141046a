"""``kvq doctor --model`` gives the server's answers from a model's config alone."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks.capacity import random_rotations
from benchmarks.tiny_models import MODELS
from sglang_kvq.cli import app
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.releases import NEW_TREE
from sglang_kvq.sglang import checks, compat, runtime
from sglang_kvq.sglang.doctor import model as doctor_model
from sglang_kvq.sglang.memory import capacity
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


def test_the_servers_command_runs_the_models_code_if_the_doctor_did():
    assert "--trust-remote-code" in answer(QWEN3, "--trust-remote-code")["command"].split()
    assert "--trust-remote-code" not in answer(QWEN3)["command"]


def test_tokens_are_those_that_a_server_had():
    """Token counts agree with recorded servers, which had the KV memory of BF16's tokens.

    The H100's memory was shared between records and BF16 pages; the H200's was divided once.
    """
    if compat.applies(NEW_TREE, compat.sglang_version()):
        rows = json.loads((ROOT / "benchmarks" / "results" / "serving_all_h100.json").read_text())["rows"]
        plain, ours = (next(row["cache_tokens"] for row in rows if row["method"] == name) for name in ("none", "oscar"))
    else:
        rows = json.loads((ROOT / "benchmarks" / "results" / "serving_h200.json").read_text())["rows"]
        plain, ours = next((row["none"], row["oscar"]) for row in rows if row["scenario"] == "capacity")
    found = answer(QWEN3, "--memory", str(plain * 147456 / 2**30))
    assert found["tokens_bf16"] == pytest.approx(plain, rel=1e-3)
    assert found["tokens"] == pytest.approx(ours, rel=1.5e-2)  # the H100's servers had 1% more or less free memory


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
    # In a shared memory the BF16 pages that a prefill batch may write come off first; a worker's are a quarter.
    assert 0.99 < shared["tokens"] / (4 * alone["tokens"]) < 1.12
    assert "--tp 4" in shared["command"]


def test_rotations_of_the_zoo_are_named(model_folder):
    found = answer(model_folder(**SMOLLM2))
    assert found["rotations"].endswith("smollm2-135m-instruct") and found["calibrate"] is None
    planes = answer(model_folder(**SMOLLM2), "--method", "transform", "--bits", "1.6")
    assert planes["rotations"].endswith("smollm2-135m-instruct-transform")
    assert planes["bytes_quantized"] * 8 / (2 * 30 * 3 * 64) <= 1.6 + 1 / 32, "first tokens come on top"
    assert "--kv-quant-bits 1.6" in planes["command"]
    shown = [ask(model_folder(**SMOLLM2), "--method", method)[1] for method in ("transform", "oscar")]
    assert ["first tokens in BF16 counted" in "\n".join(text) for text in shown] == [True, False]


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
    with pytest.raises(KVQuantError, match="no-such-folder: no such folder"):
        ask(model_folder(), "--rotations", "no-such-folder")
    with pytest.raises(KVQuantError, match="uses no rotation files"):
        ask(model_folder(), "--method", "int4", "--rotations", str(fitting))


@pytest.mark.parametrize(
    ("folder", "inferred"), [("Qwen3-8B/seq20000_prompt83_group128", False), ("Qwen3.5-4B@main", True)]
)
def test_an_inferred_folder_is_called_so(model_folder, folder, inferred):
    location = f"Zhongzhu/OSCAR-RotationZoo/{folder}"
    found = answer(model_folder(), "--rotations", location)
    assert (found["rotations"], found["rotations_inferred"]) == (location, inferred)
    _, shown = ask(model_folder(), "--rotations", location)
    assert any("(the folder's name is inferred)" in line for line in shown) == inferred


@pytest.mark.parametrize(
    ("changes", "why", "lift"),
    [
        (dict(architectures=["SDARForCausalLM"]), "attention that looks at later tokens", "nothing planned"),
        (dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text"), "sliding windows", "a pool of their own"),
        (dict(head_dim=80), "heads of 80 elements", None),
        (dict(num_attention_heads=64, num_key_value_heads=1), "64 query heads per KV head.*Add --tp 4", None),
        (
            dict(num_attention_heads=42, num_key_value_heads=2, hidden_size=2688),
            "21 query heads per KV head.*Add --tp 6",
            None,
        ),
        (dict(architectures=["SomethingElse"]), "SGLang has no class", None),
    ],
    ids=["by the table", "by the config", "size", "group", "group of odd heads", "unknown"],
)
def test_model_that_is_refused(model_folder, changes, why, lift):
    model = model_folder(**changes)
    status, shown = ask(model)
    found = answer(model)
    assert status == 1 and found["answer"] == "refused" and found["command"] is None and found["tokens"] is None
    assert shown[0].startswith("refused: ")
    assert re.search(why, shown[0]) and not any("serve with" in line for line in shown), shown
    assert (found["lift"] is None) == (lift is None) and (lift is None or lift in shown[1])


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(64, 1, 4), (42, 2, 6)])
def test_more_workers_make_room_for_many_query_heads(model_folder, heads, kv_heads, tp):
    model = model_folder(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=64 * heads)
    assert ask(model, "--tp", str(tp))[0] == 0


def test_other_dtype_names_the_flag(model_folder):
    found = answer(model_folder(torch_dtype="float16"))
    assert found["answer"] == "served" and "--dtype bfloat16" in found["command"]


def test_config_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(KVQuantError, match="--model nowhere/model: no such folder, not in the hub's cache"):
        ask("nowhere/model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KVQuantError, match="cannot read its config"):
        ask(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(KVQuantError, match=rf"^--model {tmp_path}/config.json: \[\], not a JSON object"):
        ask(str(tmp_path))


SERVED_HERE = [
    name for name in ("qwen3_next", "gpt_oss", "mellum", "qwen3_5") if MODELS[name].is_served(compat.sglang_version())
]
hybrid = pytest.mark.skipif("qwen3_next" not in SERVED_HERE, reason="this SGLang does not serve recurrent states")
windowed = pytest.mark.skipif("gpt_oss" not in SERVED_HERE, reason="this SGLang does not serve windows")


@windowed
def test_calibration_of_a_model_with_windows_runs_in_sglang(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gpt_oss"].config()))
    assert "kvq calibrate" in (named := answer(str(tmp_path))["calibrate"]) and "--engine sglang" in named
    refused = answer(str(tmp_path), "--method", "transform")
    assert refused["answer"] == "refused" and refused["calibrate"] is None


@pytest.mark.parametrize("name", SERVED_HERE)
def test_layers_of_full_attention_alone_are_counted(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name].config()))
    found = answer(str(tmp_path), "--method", "int4", "--memory", "1")
    full = MODELS[name].config()["layer_types"].count("full_attention")
    assert (found["quantized_layers"], found["layers"]) == (full, MODELS[name].layers) and full < MODELS[name].layers
    heads, head_dim = MODELS[name].kv_heads, MODELS[name].head_dim
    assert found["bytes_bf16"] == full * heads * 2 * head_dim * 2
    assert ("recurrent states" if MODELS[name].is_hybrid else "layers with windows") in found["beside"]
    windows = (MODELS[name].layers - full) * heads * 2 * head_dim * 2
    if MODELS[name].has_windows:  # plain SGLang keeps 0.8 of the tokens of these layers
        assert found["tokens_bf16"] == pytest.approx(2**30 / (found["bytes_bf16"] + 0.8 * windows), rel=1e-3)


@hybrid
def test_hybrid_has_what_a_server_of_an_h200_had():
    """Figures agree with the log in docs/hybrids.md of a server with Qwen3-Next-80B-A3B and 64 GiB."""
    log = (ROOT / "docs" / "hybrids.md").read_text()
    found = answer(str(ROOT / "benchmarks" / "models" / "qwen3-next-80b-a3b"), "--method", "int2", "--memory", "64")
    states, size, requests = re.search(r"\((\d+) of ([\d.]+) MiB.*for (\d+) running requests", log, re.DOTALL).groups()
    assert found["beside"] == f"{states} recurrent states of {size} MiB" and found["requests"] == int(requests)
    assert found["tokens"] / found["requests"] == pytest.approx(24741, rel=0.01), "tokens of a request in that log"


@hybrid
def test_workers_share_states(tmp_path):
    model = str(ROOT / "benchmarks" / "models" / "qwen3-next-80b-a3b")
    alone, shared = (answer(model, "--method", "int2", "--memory", "64", "--tp", tp) for tp in "12")
    assert shared["tokens"] == pytest.approx(2 * alone["tokens"], rel=0.01)
    assert "of 36.8 MiB" in shared["beside"]


def test_window_that_sglang_does_not_apply_is_said(model_folder):
    mistral = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=1024)
    found = answer(model_folder(**mistral))
    assert found["answer"] == "served" and found["window"] == 1024 and found["quantized_layers"] == found["layers"]
    assert any(
        "SGLang does not apply the config's sliding_window of 1,024" in line for line in ask(model_folder(**mistral))[1]
    )
    assert answer(QWEN3)["window"] is None


@pytest.mark.parametrize(
    ("heads", "tp", "why"),
    [
        ((64, 8), 3, "--tp 3: .* has 64 query heads, which 3 GPUs cannot share. Use 1, 2, 4, 8, 16, 32, 64"),
        ((24, 4), 6, "--tp 6: .* has 4 KV heads, which 6 GPUs cannot share. Use 1, 2, 4, 8, 12, 24"),
        ((12, 2), 3, "--tp 3: .* has 2 KV heads"),
        ((12, 3), 2, "--tp 2: .* has 3 KV heads"),
        ((64, 8), 8, None),
        ((64, 8), 16, None),
        ((12, 4), 12, None),
    ],
)
def test_gpus_that_cannot_share_the_heads(model_folder, heads, tp, why):
    """SGLang's layers divide query heads by the GPUs; KV heads are divided too, or several GPUs keep the same one."""
    model = model_folder(num_attention_heads=heads[0], num_key_value_heads=heads[1], hidden_size=64 * heads[0])
    status, shown = ask(model, "--tp", str(tp))
    assert status == (why is not None) and (why is None or re.search(why, shown[0])), shown


@hybrid
def test_gpus_that_cannot_share_linear_attention():
    status, shown = ask(str(ROOT / "benchmarks" / "models" / "qwen3-next-80b-a3b"), "--tp", "3", "--method", "int2")
    assert status == 1 and "16 query heads" in shown[0]
    config = SimpleNamespace(linear_num_key_heads=4, linear_num_value_heads=32)
    model = SimpleNamespace(
        num_attention_heads=16, get_total_num_kv_heads=lambda: 2, hf_text_config=config, model_path="m"
    )
    with pytest.raises(KVQuantError, match="4 key heads in its layers of linear attention.*Use 1, 2, 4"):
        checks.check_division(model, 8)


def test_file_that_this_user_may_not_read_is_named(model_folder, monkeypatch):
    model = model_folder()
    weights = Path(model) / "model.safetensors"
    weights.write_bytes(b"")
    weights.chmod(0o600)
    monkeypatch.setattr(doctor_model.os, "access", lambda path, mode: Path(path) != weights)  # root may read everything
    with pytest.raises(KVQuantError, match="model.safetensors cannot be read: .* mode 0600, .*. Run chmod a.r on it"):
        ask(model)


@pytest.mark.parametrize("method", ["none", "int3", "oskar"])
def test_method_that_is_none_of_ours(method):
    with pytest.raises(KVQuantError, match=f"--method {method}: ") as error:
        ask(QWEN3, "--method", method)
    assert "none," not in str(error.value) and "Choose one of oscar, " in str(error.value)


@pytest.mark.parametrize("argv", [("--memory", "0"), ("--tp", "0"), ("--method", "int3"), ("--bits", "9")])
def test_wrong_options(argv):
    with pytest.raises(KVQuantError, match=argv[1]):
        ask(QWEN3, *argv)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-8b",
        pytest.param("gpt-oss-120b", marks=windowed),
        pytest.param("qwen3-next-80b-a3b", marks=hybrid),
    ],
)
def test_memory_without_room_for_a_window(name):
    with pytest.raises(KVQuantError, match=r"^--memory 0.0001: .* Raise --memory\.$"):
        ask(str(ROOT / "benchmarks" / "models" / name), "--memory", "0.0001")


@pytest.mark.parametrize(
    "argv",
    [
        ["--memory", "4.5"],
        ["--method", "oscar"],
        ["--tp", "1"],
        ["--bits", "2"],
        ["--rotations", "here"],
        ["--trust-remote-code"],
    ],
    ids=" ".join,
)
def test_options_of_a_model_without_one(argv):
    result = CliRunner().invoke(app, ["doctor", *argv])
    assert isinstance(result.exception, KVQuantError) and f"{' '.join(argv)}: " in str(result.exception)
    assert "Add --model" in str(result.exception)


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


def test_weights_of_a_small_model_on_the_hub_are_one_file_without_an_index(monkeypatch, tmp_path):
    import huggingface_hub
    from transformers.utils import hub

    model, asked = SimpleNamespace(model_path="Qwen/Qwen3-0.6B", revision=None), []
    monkeypatch.setattr(hub, "cached_file", lambda *given, **settings: None)  # there is no index
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *given, **settings: None)

    def metadata(url, **settings):
        asked.append(url)
        return SimpleNamespace(size=1 << 20)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    assert doctor_model.weight_bytes(model) == 1 << 20
    assert asked[0].endswith("Qwen/Qwen3-0.6B/resolve/main/model.safetensors")

    def unreachable(url, **settings):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    assert doctor_model.weight_bytes(model) is None
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 10))
    cached = str(tmp_path / "model.safetensors")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *given, **settings: cached)
    assert doctor_model.weight_bytes(model) == 1 << 10
