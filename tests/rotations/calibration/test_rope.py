"""RoPE of keys and moments uses transformers' own rotary embeddings and agrees with the model at other positions."""

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.calibration.rope import check_turn, mean_over_positions, roped_layers, turn_of
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, first_positions
from sglang_kvq.rotations.maths.fake_quant import causal_attention
from sglang_kvq.rotations.maths.moments import MomentSums


def test_turns_cover_models_of_other_layouts():
    """RoPE may have interleaved pairs and cover part of head_dim (GLM), or scale its cosines (YaRN)."""
    from transformers import Glm4Config, LlamaConfig

    scaled = LlamaConfig(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "rope_theta": 1e4,
        }
    )
    for config, turned in ((Glm4Config(head_dim=128), 64), (scaled, 128)):
        turn = turn_of(config, 128)
        identity = torch.eye(128, dtype=torch.float64)
        torch.testing.assert_close(turn(100) @ turn(57), turn(157), rtol=0, atol=1e-4)
        torch.testing.assert_close(turn(157) @ turn(157).T, identity, rtol=0, atol=1e-5)
        assert ((turn(1) - identity).abs().sum(0) > 1e-9).sum() == turned


def last_keys(model, ids, first, name="kvq_test"):
    """Returns the last layer's keys; the first token is at position ``first``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    held = []

    def attend(module, q, k, v, *args, **kwargs):
        held.append(k[0].double())
        return causal_attention(q[0], k[0], v[0], 1.0)[None].transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    model.set_attn_implementation(name)
    with torch.inference_mode():
        model.base_model(ids[None], position_ids=positions(ids, first), use_cache=False)
    return held[-1]


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "olmo3", "smollm3", "cohere2", "exaone4", "afmoe"])
def test_layers_of_full_attention_between_windows(kind):
    """They may have a RoPE of their own, or none; only SGLang runs such models for calibration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, layer_types=["sliding_attention"] * 3 + ["full_attention"], pad_token_id=0,
        num_local_experts=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, num_dense_layers=4,
        no_rope_layers=[1, 1, 1, 0] if kind == "smollm3" else None, sliding_window=256, max_position_embeddings=4096,
    )  # fmt: skip
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.arange(20)
    near, far = last_keys(model, ids, 0), last_keys(model, ids, 700)
    (roped,) = roped_layers(config, 1)
    assert bool(roped) == (kind in ("gemma3_text", "gpt_oss", "olmo3"))
    assert (far - (near @ turn_of(config, 64)(700) if roped else near)).norm() < 1e-3 * far.norm()
    assert ((far - near).norm() > 0.1 * far.norm()) == bool(roped)


def test_a_model_without_the_usual_rope_is_refused():
    from transformers import OPTConfig

    with pytest.raises(KVQuantError, match="OPTConfig: .* --positions equal to --context"):
        turn_of(OPTConfig(), 64)


pytestmark = pytest.mark.usefixtures("one_thread")


def activations(model, ids, position):
    """Returns q and k of every layer for these tokens, from ``position`` on."""
    held = []
    with torch.inference_mode(), attention_hook(model, lambda layer, q, k, v, scale: held.append((q, k))):
        model.base_model(ids[None], position_ids=positions(ids, position))
    return held


def test_a_contexts_position_turns_keys_and_leaves_scores(llama, ids):
    near, far = (activations(llama, ids[:200], position) for position in (0, 300))
    for (q, k), (turned_q, turned_k) in zip(near, far):
        assert (k - turned_k).norm() > 0.1 * k.norm()
        torch.testing.assert_close(q[:2] @ k[:1].mT, turned_q[:2] @ turned_k[:1].mT, rtol=1e-3, atol=1e-3)


def test_moments_are_those_of_contexts_at_every_position(llama, ids):
    """Averages of the model run at each position agree with ``mean_over_positions`` of one run at position 0."""
    spread = first_positions(CalibrationSettings(tokens=1024, context=512), 5, llama.config)
    means = []
    for position in spread:
        sums = MomentSums(64)
        for layer, (q, k) in enumerate(activations(llama, ids[:300], position)):
            sums.add(layer, q, k, k)
        means.append(sums.mean(2, 1, shared=False))
    turn = turn_of(llama.config, 64)
    for i in range(2):  # queries, keys
        there = torch.stack([mean[i] for mean in means]).mean(0)
        torch.testing.assert_close(mean_over_positions(means[0][i], turn, spread), there, rtol=1e-3, atol=1e-3)
        assert (there - means[0][i]).norm() > 0.05 * there.norm()


def test_a_model_that_turns_keys_otherwise_is_refused(llama, ids):
    check_turn(llama, ids[:64], turn_of(llama.config, 64), 512)
    with pytest.raises(KVQuantError, match="layer 0: at position 512 .* --positions equal to --context"):
        check_turn(llama, ids[:64], lambda distance: torch.eye(64, dtype=torch.float64), 512)
