"""What the cache asks of a model's attention layers: that each has a place of its own, and calls attention plainly.

``backend.check_layers`` looks at a layer's own settings; here is what only shows between layers, or in a call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from sglang.srt.layers.radix_attention import RadixAttention


def check_layer_ids(model: torch.nn.Module, ids: range) -> None:
    """Refuse layers that share a place in the cache, or have none.

    Args:
        ids: layer ids that this worker's pool holds.

    Raises:
        SystemExit: names the layers.
    """
    owner: dict[int, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        if layer.layer_id not in ids:
            raise SystemExit(
                f"--kv-quant does not support this model: {name} is attention layer {layer.layer_id}, but the cache "
                f"holds layers {ids.start} to {ids.stop - 1}."
            )
        other = owner.setdefault(layer.layer_id, name)
        if other != name:
            raise SystemExit(
                f"--kv-quant does not support this model: {other} and {name} share the cache of layer {layer.layer_id}."
            )


def require_plain_call(
    layer: RadixAttention,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    save_kv_cache: bool,
    extra: Mapping[str, object],
) -> None:
    """Attention of a layer's own new keys and values, all to be stored here, with nothing else that changes the result.

    Args:
        extra: further keyword arguments of the call; those that are None ask for nothing.

    Raises:
        NotImplementedError: names the layer and what it asked for. An answer would be wrong: the cache would miss these
            tokens, hold them twice, or the argument would be ignored.
    """
    asked = [f"{name}=..." for name, value in extra.items() if value is not None]
    if k is None or v is None:
        asked.insert(0, "another layer's keys and values (k or v is None)")
    elif not save_kv_cache:
        asked.insert(0, "keys and values that attention does not store (save_kv_cache=False)")
    if asked:
        raise NotImplementedError(
            f"--kv-quant does not support this model: attention layer {layer.layer_id} asks for {', '.join(asked)}; "
            "serve it without --kv-quant."
        )
