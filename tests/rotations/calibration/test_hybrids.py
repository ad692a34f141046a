"""Calibration of models in which only some layers use full attention: files hold these layers in their order."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import load_rotations, save_rotations
from sglang_kvq.rotations.calibration.hf_attention import attention_hook
from sglang_kvq.rotations.calibration.rope import turn_of
from sglang_kvq.rotations.calibration.run import calibrate
from sglang_kvq.rotations.calibration.settings import CalibrationSettings
from sglang_kvq.rotations.calibration.transform import output_weights
from sglang_kvq.rotations.identity import cached_layers, geometry_of

SETTINGS = CalibrationSettings(
    context=512, tokens=1024, sink=64, recent=64, positions=4096, clip_contexts=1, sensitivity_contexts=1,
    sensitivity_context=256, sensitivity_draws=1,
)  # fmt: skip
FULL = (1, 3)


def hybrid(kind: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    config = AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"] * 2, pad_token_id=0,
        **(experts if kind == "qwen3_next" else {}),
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text"])
def model(request):
    return hybrid(request.param)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 97, (1100,), generator=torch.Generator().manual_seed(1))


def keys_of(model, ids) -> dict[int, torch.Tensor]:
    held = {}
    with torch.inference_mode(), attention_hook(model, lambda layer, q, k, v, scale: held.update({layer: k})):
        model.base_model(ids[None], use_cache=False)
    return held


def test_a_part_of_each_head_turns_with_its_position(model):
    """RoPE covers a quarter of head_dim in these models; transformers' code of Qwen 3.5 also has a RoPE for vision."""
    turn = turn_of(model.config, 64)(1000)
    assert torch.equal(turn[16:, 16:], torch.eye(48, dtype=torch.float64)) and not turn[:16, 16:].any()
    assert not torch.allclose(turn[:16, :16], torch.eye(16, dtype=torch.float64), atol=0.1)


def test_files_have_the_layers_of_full_attention(model, ids, tmp_path):
    found = calibrate(model, ids, SETTINGS)
    assert cached_layers(model.config) == FULL and found.k.shape[0] == len(FULL)
    assert found.meta.model["num_hidden_layers"] == 4
    assert len(found.meta.clip_k) == len(FULL) and len(found.meta.sensitivity["v"]["2"]) == len(FULL)
    save_rotations(found, tmp_path / "r", kv_heads=1)
    loaded = load_rotations(tmp_path / "r", **geometry_of(model.config)._asdict())
    assert torch.equal(loaded.k, found.k)


def test_each_layer_has_its_own_moments(model, ids):
    """Enlarging one layer's values enlarges that layer's spectrum and no other."""
    before = calibrate(model, ids, SETTINGS).v_eigenvalues
    projection = model.model.layers[FULL[0]].self_attn.v_proj.weight
    projection.data *= 3
    after = calibrate(model, ids, SETTINGS).v_eigenvalues
    projection.data /= 3
    grown = (after[:, 0, -1] / before[:, 0, -1]).tolist()
    assert grown[0] == pytest.approx(9, rel=0.1) and grown[1] < 3


def test_output_projections_are_those_of_attention(model, ids):
    weights = output_weights(model, ids)
    assert weights.shape == (len(FULL), 1, 64, 64)
    for index, layer in enumerate(FULL):
        of_heads = model.model.layers[layer].self_attn.o_proj.weight.double().unflatten(1, (2, 64))
        torch.testing.assert_close(weights[index, 0], sum(of_heads[:, h].T @ of_heads[:, h] for h in range(2)))


def test_a_config_that_names_other_layers(ids):
    model = hybrid("qwen3_next")
    model.config.layer_types = ["full_attention", "linear_attention"] * 2
    with pytest.raises(KVQuantError, match="layer 1 attends, but by the model's config only layers 0, 2"):
        keys_of(model, ids[:64])
