"""``kvq calibrate`` and ``kvq doctor --model`` agree on which models can be calibrated."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaForCausalLM
from typer.testing import CliRunner

from sglang_kvq.cli import app
from sglang_kvq.rotations import load_rotations
from sglang_kvq.rotations.calibration.eligible import auto_class, why_not
from sglang_kvq.rotations.calibration.rope import check_turn, turn_of
from sglang_kvq.rotations.identity import has_windows
from tests.rotations.helpers import tiny_model_folder

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = dict(
    vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, attention_bias=True, max_position_embeddings=1024,
)  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
SIGHT = dict(depth=1, hidden_size=64, num_heads=2, intermediate_size=64, out_hidden_size=64)
CODE = (
    "from transformers import LlamaConfig, LlamaForCausalLM\n\n\nclass Config(LlamaConfig):\n    model_type = 'own'\n"
)


def vision_config(kind):
    if kind == "llava":
        sight = dict(
            model_type="clip_vision_model", hidden_size=64, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, image_size=28, patch_size=14,
        )  # fmt: skip
        text = {"model_type": "llama", **TEXT}
        return AutoConfig.for_model(kind, text_config=text, vision_config=sight, image_token_index=90)
    more = {"embed_dim": 64} if kind == "qwen2_vl" else {"deepstack_visual_indexes": [0]} if kind == "qwen3_vl" else {}
    text = {**TEXT, "hidden_size": 256, "rope_parameters": SECTIONS, "rope_scaling": SECTIONS}
    return AutoConfig.for_model(
        kind, text_config=text, vision_config={**SIGHT, "out_hidden_size": 256, **more}, image_token_id=90
    )


@pytest.fixture
def folder(tmp_path):
    return tiny_model_folder(tmp_path, tokens=1200)


def kvq(*words):
    result = CliRunner().invoke(app, [*map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, str(result.exception)
    return result.exit_code, result.stdout + ("" if "--json" in words else result.stderr)


def calibrate(model, text, output, *more):
    few = ("--tokens", 512, "--context", 512, "--device", "cpu")
    return kvq("calibrate", model, "--text", text, "--output", output, *few, *more)


def change_config(model, **fields):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **fields}))


def own_code(model):
    """Turns the folder into a model that ships its own classes."""
    (model / "own.py").write_text(CODE + "\n\nclass Model(LlamaForCausalLM):\n    config_class = Config\n")
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change_config(model, model_type="own", architectures=["InternLM2ForCausalLM"], auto_map=code)
    return model


def test_the_text_part_of_a_vision_model_is_calibrated_as_that_text_model(folder, tmp_path):
    llama, text = folder
    network = AutoModelForImageTextToText.from_config(vision_config("llava"))
    part = LlamaForCausalLM.from_pretrained(llama)
    network.model.language_model.load_state_dict(part.model.state_dict())
    network.lm_head.load_state_dict(part.lm_head.state_dict())
    sees = tmp_path / "sees"
    network.save_pretrained(sees)
    for path in llama.glob("tokenizer*"):
        (sees / path.name).write_text(path.read_text())
    for composition in ("balanced", "transform"):
        more = ("--composition", composition, *(["--no-recommend"] * (composition == "transform")))
        found = {}
        for name, model in (("text", llama), ("sees", sees)):
            status, shown = calibrate(model, text, tmp_path / name / composition, *more)
            assert status == 0, shown
            found[name] = load_rotations(tmp_path / name / composition, layers=2, kv_heads=2, head_dim=64)
        assert torch.equal(found["text"].k, found["sees"].k) and torch.equal(found["text"].v, found["sees"].v)
        assert found["text"].meta.sensitivity == found["sees"].meta.sensitivity


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_vision_models_whose_rope_has_sections(kind, ids):
    model = AutoModelForImageTextToText.from_config(vision_config(kind)).eval()
    check_turn(model, ids[:64] % 80, turn_of(model.config, 64), 700)


def test_a_model_with_code_of_its_own(folder, tmp_path):
    model, text = own_code(folder[0]), folder[1]
    status, shown = calibrate(model, text, tmp_path / "out", "--no-sensitivity")
    assert status == 1 and "code of its own" in shown and "--trust-remote-code" in shown
    status, shown = kvq("doctor", "--model", model)
    assert status == 1 and "--trust-remote-code" in shown
    options = ("--no-sensitivity", "--trust-remote-code", "--positions", 512)
    status, shown = calibrate(model, text, tmp_path / "out", *options)
    assert status == 0, shown
    assert load_rotations(tmp_path / "out", layers=2, kv_heads=2, head_dim=64)


def test_doctor_names_a_command_that_calibrate_takes(folder, tmp_path):
    """``kvq doctor`` names a command that ``kvq calibrate`` accepts, or says that there is none."""
    model, text = own_code(folder[0]), folder[1]
    _, shown = kvq("doctor", "--model", model, "--trust-remote-code", "--json")
    assert "--trust-remote-code" in json.loads(shown)["calibrate"]
    model = Path(shutil.copytree(model, tmp_path / "other"))  # a new folder, because SGLang caches configs by path
    change_config(model, auto_map={"AutoConfig": "own.Config"})  # no class can run it
    status, shown = kvq("doctor", "--model", model, "--trust-remote-code")
    why = why_not(str(model), AutoConfig.from_pretrained(model, trust_remote_code=True), True)
    assert status == 1, shown
    assert shown.startswith("refused") and why in shown and "kvq calibrate /" not in shown
    assert "lifted by: --method int4" in shown
    status, shown = calibrate(model, text, tmp_path / "out", "--trust-remote-code")
    assert status == 1 and why in shown
    assert kvq("doctor", "--model", model, "--trust-remote-code", "--method", "hadamard")[0] == 0


def test_windows_between_layers_of_full_attention_need_sglang(folder, tmp_path):
    model, text = folder
    change_config(model, layer_types=["sliding_attention", "full_attention"], sliding_window=64)
    status, shown = calibrate(model, text, tmp_path / "out")
    assert status == 1 and "sliding windows" in shown and "`kvq calibrate --engine sglang`" in shown
    config = AutoConfig.from_pretrained(model)
    assert has_windows(config) and why_not(str(model), config, False) is None
    assert "--kv-quant oscar" in why_not(str(model), config, False, transform=True)


def test_what_quantization_does_to_both(folder, tmp_path):
    model, text = folder
    change_config(model, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    status, shown = calibrate(model, text, tmp_path / "out")
    assert status == 1 and "quantized by modelopt" in shown
    assert "quantized by modelopt" in why_not(str(model), AutoConfig.from_pretrained(model), False)
    change_config(model, quantization_config={"quant_method": "fp8"})
    assert auto_class(str(model), AutoConfig.from_pretrained(model), False) == "AutoModelForCausalLM"
