"""What RoPE makes of keys, by transformers' own rotary embeddings."""

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.maths.rope import turn_of


def test_turns_cover_models_of_other_layouts():
    """Interleaved pairs and a part of head_dim (GLM), scaled cosines (YaRN)."""
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


def test_a_model_without_the_usual_rope_is_refused():
    from transformers import OPTConfig

    with pytest.raises(KVQuantError, match="OPTConfig: .* --positions equal to --context"):
        turn_of(OPTConfig(), 64)
