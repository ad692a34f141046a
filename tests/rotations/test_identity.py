"""A model's config determines which of its layers the cache holds."""

import pytest
from transformers import AutoConfig, PretrainedConfig

from sglang_kvq.rotations.identity import cached_layers, geometry_of

PLAIN = dict(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64, hidden_size=512)


class HybridConfig(PretrainedConfig):
    """A config like SGLang's own, in which the layers are properties."""

    full_attention_layer_ids = (1,)
    layers_block_type = ("attention",) * 4  # would give other layers


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        (dict(layer_types=["full_attention"] * 4), (0, 1, 2, 3)),
        (dict(layer_types=["linear_attention", "full_attention"] * 2), (1, 3)),
        (dict(layer_types=["sliding_attention", "full_attention"] * 2), (1, 3)),
        (dict(layers_block_type=["mamba", "attention", "moe", "attention"]), (1, 3)),
        (dict(full_attention_interval=4), (3,)),
        (dict(full_attention_interval=4, layer_types=["full_attention", "linear_attention"] * 2), (0, 2)),
    ],
)
def test_cached_layers(fields, layers):
    config = PLAIN | fields
    for given in (config, {"architectures": ["X"], "text_config": config}):
        assert cached_layers(given) == layers
        assert geometry_of(given) == (len(layers), 2, 64)


def test_sglangs_own_configs_say_it_themselves():
    assert cached_layers(HybridConfig(**PLAIN)) == (1,)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_transformers_hybrids(kind):
    config = AutoConfig.for_model(kind, num_hidden_layers=8)
    assert cached_layers(config) == cached_layers(config.to_dict()) == (3, 7)
    assert geometry_of(config).layers == 2
