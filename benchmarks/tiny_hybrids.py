"""Parts of tiny hybrids besides attention: gated-delta-rule layers, and their fields in config.json.

A layer's state forgets within some thirty tokens and adds less to the residual stream than attention does, so that
measurements still depend on the KV cache. All later layers read the state, so a wrong state is noticed too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

#: The families.
HYBRIDS = ("qwen3_next", "qwen3_5_text")
#: Interval between layers of full attention.
INTERVAL = 3
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, KERNEL = 2, 4, 128, 4
#: Size of what a layer adds to the residual stream, relative to a token.
ADDED = 0.3

#: Flags of a hybrid's server; states of so small a model would otherwise fill half of the memory.
SERVER_FLAGS = ("--max-mamba-cache-size", "160")

CONFIG = {
    "attn_output_gate": True,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": INTERVAL,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": LINEAR_DIM,
    "linear_value_head_dim": LINEAR_DIM,
    "linear_conv_kernel_dim": KERNEL,
}


def layer_types(layers: int) -> list[str]:
    """Returns the layer types as config.json has them."""
    return ["linear_attention" if (i + 1) % INTERVAL else "full_attention" for i in range(layers)]


def next_token_head(hidden: int, normal: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights that join a token and its hidden state for the drafting layer, by their checkpoint names."""
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    found = {f"mtp.{name}.weight": normal(hidden, std=0.05) for name in norms}
    return found | {"mtp.fc.weight": normal(hidden, 2 * hidden, std=(2 * hidden) ** -0.5)}


def linear_attention(family: str, at: str, hidden: int, normal: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns one layer's weights by their checkpoint names.

    Args:
        at: the layer's name.
        normal: ``normal(*shape, std=...)`` draws them.
    """
    key, value, width = KEY_HEADS * LINEAR_DIM, VALUE_HEADS * LINEAR_DIM, hidden**-0.5
    found = {
        f"{at}.linear_attn.conv1d.weight": normal(2 * key + value, 1, KERNEL, std=KERNEL**-0.5),
        f"{at}.linear_attn.dt_bias": normal(VALUE_HEADS, std=0.1),
        f"{at}.linear_attn.A_log": math.log(0.05) + normal(VALUE_HEADS, std=0.1),
        f"{at}.linear_attn.norm.weight": 1 + normal(LINEAR_DIM, std=0.05),
        # A normalized head times silu of a unit normal is about one half.
        f"{at}.linear_attn.out_proj.weight": normal(hidden, value, std=2 * ADDED * value**-0.5),
    }
    if family == "qwen3_next":
        rows = {"in_proj_qkvz": 2 * (key + value), "in_proj_ba": 2 * VALUE_HEADS}
    else:
        rows = {"in_proj_qkv": 2 * key + value, "in_proj_z": value, "in_proj_b": VALUE_HEADS, "in_proj_a": VALUE_HEADS}
    return found | {f"{at}.linear_attn.{name}.weight": normal(n, hidden, std=width) for name, n in rows.items()}
