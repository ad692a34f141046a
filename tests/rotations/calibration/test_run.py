"""Calibration of a random model: rotations, clips and statistics follow their definitions."""

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.base import check_rotations
from sglang_kvq.rotations.calibration.hf_attention import attention_hook
from sglang_kvq.rotations.calibration.rope import roped_layers
from sglang_kvq.rotations.calibration.run import calibrate
from sglang_kvq.rotations.calibration.settings import CalibrationSettings
from tests.rotations.helpers import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = dict(tokens=1024, context=512, clip_grid=(0.86, 1.0), clip_contexts=1, sensitivity_contexts=0)


@pytest.mark.parametrize("granularity", ["per-head", "per-layer"])
@pytest.mark.parametrize("composition", ["balanced", "offset", "oscar"])
def test_calibration_gives_rotations_of_the_model(llama, ids, granularity, composition):
    seen = []
    settings = CalibrationSettings(**SETTINGS, granularity=granularity, composition=composition)
    rotations = calibrate(llama, ids, settings, progress=lambda name, done, total: seen.append(name))
    check_rotations(rotations, layers=2, kv_heads=2, head_dim=64)
    assert rotations.granularity == granularity
    for clips in (rotations.meta.clip_k, rotations.meta.clip_v):
        assert len(clips) == 2 and set(clips) <= set(settings.clip_grid)
    assert rotations.meta.tokens == 1024 and rotations.meta.model["num_key_value_heads"] == 2
    assert list(dict.fromkeys(seen)) == ["looking at the model", "moments", "rotations", "clips"]
    assert llama.config._attn_implementation != "kvq_capture"


def test_importance_follows_its_definition(llama, ids):
    """Eigenvalues are those of mean QᵀQ and of Vᵀ diag(w) V, computed directly from one context's activations."""
    held = {}
    with torch.inference_mode(), attention_hook(llama, lambda layer, *x: held.__setitem__(layer, x)):
        llama.base_model(ids[None, :512])
    settings = CalibrationSettings(**{**SETTINGS, "tokens": 512}, positions=512)  # only the first positions
    rotations = calibrate(llama, ids[:512], settings)
    for layer, (q, k, v, _) in held.items():
        q, k, v = (x[:, settings.sink :].double() for x in (q, k, v))
        for head in range(2):
            group = torch.cat([q[2 * head], q[2 * head + 1]])
            importance = group.T @ group / len(group)
            w = torch.stack([row @ importance @ row for row in k[head]])
            sst = v[head].T @ torch.diag(w / w.mean()) @ v[head] / len(w)
            for eigen, matrix in ((rotations.k_eigenvalues, importance), (rotations.v_eigenvalues, sst)):
                torch.testing.assert_close(
                    eigen[layer, head].double(), torch.linalg.eigvalsh(matrix), rtol=1e-4, atol=1e-4
                )


def test_layers_without_rope_are_left_alone(ids):
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=97, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, no_rope_layers=[1, 0],
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = SmolLM3ForCausalLM(config).eval()
    assert roped_layers(config, 2).tolist() == [True, False]
    calibrated = {
        most: calibrate(model, ids, CalibrationSettings(**SETTINGS, positions=most)).k_eigenvalues
        for most in (512, 4096)
    }
    torch.testing.assert_close(calibrated[512][1], calibrated[4096][1])
    assert not torch.allclose(calibrated[512][0], calibrated[4096][0], rtol=0.01)


def test_short_corpus(llama, ids):
    with pytest.raises(KVQuantError, match="1100 tokens, calibration needs 2048"):
        calibrate(llama, ids, CalibrationSettings(**{**SETTINGS, "tokens": 2048}))


def test_nan_activations(ids):
    broken = tiny_llama()
    broken.model.layers[1].self_attn.v_proj.weight.data[3, 3] = float("nan")
    with pytest.raises(KVQuantError, match="layer 1: .* NaN or infinity"):
        calibrate(broken, ids, CalibrationSettings(**SETTINGS))


def test_unsupported_head_dim(ids):
    with pytest.raises(KVQuantError, match="head_dim 32"):
        calibrate(tiny_llama(dim=32), ids, CalibrationSettings(**SETTINGS))


def test_soft_capping_is_refused_and_the_model_restored(ids):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, attn_logit_softcapping=30.0, layer_types=["full_attention"],
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(KVQuantError, match="layer 0 has a soft cap on scores .*--kv-quant int4"):
        calibrate(model, ids, CalibrationSettings(**SETTINGS))
    assert model.config._attn_implementation == before


SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.mark.parametrize(
    "kind, fields, why",
    [
        ("gpt2", {"hidden_size": 128, "n_positions": 256}, "--context 512: this model has 256 positions"),
        (
            "glm4_moe_lite",
            {
                "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
                "v_head_dim": 256, "mlp_layer_types": ["dense"],
            },
            r"layer 0 has 2 KV heads with keys of 256 elements .* config 2 of 64 \(MLA",
        ),
        (
            "gpt_oss",
            {"head_dim": 64, "layer_types": ["full_attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
            "layer 0 has learned sinks .*--kv-quant int4",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_be_calibrated_are_told_in_one_line(kind, fields, why):
    """GPT-2's table of positions is shorter than a context, GLM-4.7-Flash has MLA, gpt-oss has learned sinks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **fields})).eval()
    with pytest.raises(KVQuantError, match=why) as caught:
        calibrate(model, torch.arange(1100) % 97, CalibrationSettings(**SETTINGS))
    assert "\n" not in str(caught.value)
