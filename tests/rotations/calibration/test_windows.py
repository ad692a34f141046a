"""Configs with a ``sliding_window`` that SGLang does not apply are calibrated with full attention."""

import logging

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration import hf_attention
from sglang_kvq.rotations.calibration.run import calibrate
from sglang_kvq.rotations.calibration.settings import CalibrationSettings
from sglang_kvq.rotations.identity import unapplied_window

SIZES = dict(
    vocab_size=97,
    hidden_size=256,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
)
#: Much shorter than a context: a model that applied this window would have other moments.
WINDOW = 100
LONG = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0 + 0.4 * i for i in range(32)]}
MODELS = {
    "Mistral 7B v0.1": ("MistralConfig", {}),
    "Phi-3 mini 4k": ("Phi3Config", {}),
    "Phi-4 mini": ("Phi3Config", {"original_max_position_embeddings": 1024, "rope_scaling": LONG}),
    "StarCoder 2": ("Starcoder2Config", {}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 2}),
}
SETTINGS = CalibrationSettings(tokens=512, context=512, sensitivity_contexts=0)


def rotations(name: str, window: int | None):
    kind, more = MODELS[name]
    config = getattr(transformers, kind)(**SIZES, **more, sliding_window=window)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(97, (600,), generator=torch.Generator().manual_seed(0))
    return calibrate(model, ids, SETTINGS)


@pytest.mark.parametrize("name", MODELS)
def test_window_changes_nothing_and_is_said(name, caplog):
    hf_attention._say_once.cache_clear()
    want = rotations(name, None)
    assert "sliding_window" not in caplog.text
    with caplog.at_level(logging.WARNING):
        found = rotations(name, WINDOW)
    assert f"sliding_window of {WINDOW} tokens is left out: SGLang does not apply it" in caplog.text
    ours = [record for record in caplog.records if record.name == hf_attention.__name__]
    assert len(ours) == 1, "once, not in each pass"
    assert torch.equal(found.k, want.k) and torch.equal(found.v, want.v)
    assert found.meta == want.meta


def test_layers_that_have_windows_in_sglang_are_refused():
    config = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention"] and unapplied_window(config) is None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(KVQuantError, match="layer 1 attends, but .* only layers 0 have full attention"):
        calibrate(model, torch.zeros(600, dtype=torch.int64), SETTINGS)


@pytest.mark.parametrize(
    "config, window",
    [
        ({"sliding_window": 4096}, 4096),
        ({"text_config": {"sliding_window": 4096}}, 4096),
        ({"sliding_window": None}, None),
        ({"sliding_window": 0}, None),
        ({}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, 4096),
        ({"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]}, None),
    ],
    ids=str,
)
def test_windows_of_a_config(config, window):
    assert unapplied_window(config) == window
