"""Check that a model rotates its keys with their position as ``maths.rope`` computes."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.maths.rope import Turn, roped_layers

#: BF16 models round their way to the last layer differently at another position: some 2%. A wrong turn is off by about
#: 1.
TURN_TOLERANCE = 0.2


@torch.inference_mode()
def check_turn(model: Any, ids: torch.Tensor, turn: Turn, position: int) -> None:
    """See the model turn its keys as foreseen.

    Args:
        model: as for ``attention_hook``.
        ids: int64 ``[n]``; a hundred or so are enough.

    Raises:
        KVQuantError: the keys of these tokens from ``position`` on are not those from 0 on, turned.
    """
    near, far = (_keys(model, ids.to(model.device), first) for first in (0, position))
    t = turn(position)
    roped = roped_layers(model.config, len(near))
    for layer, (k, moved) in enumerate(zip(near, far)):
        error = float((moved - (k @ t if roped[layer] else k)).norm() / moved.norm().clamp(min=1e-30))
        if error > TURN_TOLERANCE:
            raise KVQuantError(
                f"layer {layer}: at position {position} keys differ by {error:.2f} of their size from what RoPE makes "
                "of those at 0; this model's positions are not understood: pass --positions equal to --context to "
                "calibrate for prompts of that length only."
            )


def _keys(model: Any, ids: torch.Tensor, first: int) -> list[torch.Tensor]:
    """Every layer's keys, float64 ``[kv_heads, n, D]`` on the CPU, of tokens whose first stands at ``first``."""
    keys: list[torch.Tensor] = []

    def keep(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        keys.append(k.double().cpu())

    with attention_hook(model, keep):
        model.base_model(ids[None], position_ids=positions(ids, first), use_cache=False)
    return keys
