"""Weights of errors in values: the square of each layer's output projection."""

from __future__ import annotations

from typing import Any

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.hf_attention import attention_modules
from sglang_kvq.rotations.identity import geometry_of, identity

#: Names of the projection from heads to the residual stream, in transformers' models.
NAMES = ("o_proj", "out_proj", "dense", "wo")

#: Tokens that are run to see which modules attend.
SEEN = 8

_FIX = "use another --composition than transform, or calibrate the unquantized model"


@torch.no_grad()
def output_weights(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """An error e in a KV head's values, read with all attention by every query head, moves the residual stream by a
    squared length of e W eᵀ.

    Args:
        model: a transformers causal language model.
        ids: int64 ``[n]``, of which a few are run.

    Returns:
        W float64 ``[layers, kv_heads, D, D]`` on the CPU: for W_h the columns of a layer's output projection that
        belong to query head h, the sum of W_hᵀ W_h over the query heads that read a KV head.

    Raises:
        KVQuantError: a layer without attention, or without such a projection.
    """
    heads = identity(model.config)["num_attention_heads"]
    layers, kv_heads, head_dim = geometry_of(model.config)
    modules = attention_modules(model, ids[:SEEN])
    missing = [layer for layer in range(layers) if layer not in modules]
    if missing:
        raise KVQuantError(
            f"layers {missing} of those that should be of full attention have no standard one; --kv-quant needs it "
            "there."
        )
    found = []
    for layer in range(layers):
        weight = _projection(model, modules[layer], layer, heads * head_dim).double()
        of_heads = weight.unflatten(1, (kv_heads, -1, head_dim)).movedim(0, 2)  # [kv_heads, group, hidden, D]
        found.append((of_heads.mT @ of_heads).sum(1).cpu())
    return torch.stack(found)


def _projection(model: Any, attention: torch.nn.Module, layer: int, width: int) -> torch.Tensor:
    """The weight ``[hidden, width]`` of an attention's output projection."""
    where = next((name for name, module in model.named_modules() if module is attention), type(attention).__name__)
    name = next((name for name in NAMES if isinstance(getattr(attention, name, None), torch.nn.Module)), None)
    if name is None:
        raise KVQuantError(
            f"layer {layer}: {where} ({type(attention).__name__}) has no output projection under any of the names "
            f"{', '.join(NAMES)}; {_FIX}."
        )
    projection: torch.nn.Module = getattr(attention, name)
    weight = getattr(projection, "weight", None)
    if not isinstance(projection, torch.nn.Linear) or not isinstance(weight, torch.Tensor):
        raise KVQuantError(
            f"layer {layer}: {where}.{name} is a {type(projection).__name__}, not a plain linear layer; {_FIX}."
        )
    if weight.is_meta:
        raise KVQuantError(
            f"layer {layer}: the weight of {where}.{name} is not in memory, because the model was offloaded; pass "
            "--device cpu, or --device auto with GPUs that hold the whole model."
        )
    if weight.dim() != 2 or weight.shape[1] != width or not weight.is_floating_point() or weight.itemsize < 2:
        raise KVQuantError(
            f"layer {layer}: the weight of {where}.{name} is {weight.dtype} {list(weight.shape)}, expected "
            f"[hidden_size, {width}] (query heads times head_dim) in bfloat16, float16 or float32; {_FIX}."
        )
    return weight
