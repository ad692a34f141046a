"""Checks that a model's attention layers meet the cache's requirements: plain settings, distinct ids, plain calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_kvq.sglang.types import AttentionLayer


def check_layers(model: torch.nn.Module, head_dim: int, kv_heads: int, elsewhere: Collection[int] = ()) -> None:
    """Refuses attention layers that the cache does not support.

    Args:
        kv_heads: KV heads on this worker for which SGLang sized the cache.
        elsewhere: ids of layers that SGLang serves itself.

    Raises:
        SystemExit: names the layer and the reason.
    """
    if not any(isinstance(layer, RadixAttention) for layer in model.modules()):
        raise SystemExit(
            f"--kv-quant does not support this model: {type(model).__name__} has no attention layers that can be "
            "checked."
        )
    for name, layer in model.named_modules():
        if not isinstance(layer, RadixAttention) or layer.layer_id in elsewhere:
            continue
        window = layer.sliding_window_size
        for unsupported, why in (
            (window is not None and window > -1, f"a sliding window of {window} tokens"),
            (layer.logit_cap > 0, f"logit soft-capping ({layer.logit_cap})"),
            (
                layer.xai_temperature_len > 0,
                f"a temperature that depends on the position ({layer.xai_temperature_len})",
            ),
            (layer.is_cross_attention, "cross attention"),
            (layer.attn_type != AttentionType.DECODER, f"attention of type {layer.attn_type}"),
            (layer.head_dim != head_dim or layer.v_head_dim != head_dim, "key and value heads of different sizes"),
            (
                (layer.tp_k_head_num, layer.tp_v_head_num) != (kv_heads, kv_heads),
                f"{layer.tp_k_head_num} KV heads on this worker, where SGLang sized the cache for {kv_heads}. Some "
                "models divide their heads over all workers whatever --enable-dp-attention says: leave that flag out",
            ),
        ):
            if unsupported:
                raise SystemExit(f"--kv-quant does not support this model: {name} has {why}.")


def check_layer_ids(model: torch.nn.Module, ids: Collection[int], elsewhere: Collection[int] = ()) -> None:
    """Refuses attention layers that share a layer of the cache, or have none.

    Args:
        ids: layer ids in this worker's pool.
        elsewhere: as in ``check_layers``.

    Raises:
        SystemExit: names the layers.
    """
    owner: dict[int, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, RadixAttention) or layer.layer_id in elsewhere:
            continue
        if layer.layer_id not in ids:
            raise SystemExit(
                f"--kv-quant does not support this model: {name} is attention layer {layer.layer_id}, but the cache "
                f"holds layers {', '.join(map(str, ids))}."
            )
        other = owner.setdefault(layer.layer_id, name)
        if other != name:
            raise SystemExit(
                f"--kv-quant does not support this model: {other} and {name} share the cache of layer {layer.layer_id}."
            )


def learned_sinks(layer: AttentionLayer, extra: dict[str, object]) -> torch.Tensor | None:
    """Removes ``sinks`` from a call's further keyword arguments and returns it.

    Returns:
        Learned sinks of this worker's query heads, float ``[q_heads]``; None if the call has none.

    Raises:
        NotImplementedError: ``sinks`` is anything else, which kernels would misread.
    """
    sinks = extra.pop("sinks", None)
    if sinks is None:
        return None
    heads = layer.tp_q_head_num
    if not isinstance(sinks, torch.Tensor) or sinks.shape != (heads,) or not sinks.dtype.is_floating_point:
        given = f"{sinks.dtype} {list(sinks.shape)}" if isinstance(sinks, torch.Tensor) else type(sinks).__name__
        raise NotImplementedError(
            f"--kv-quant does not support this model: the sinks of attention layer {layer.layer_id} are {given}, not "
            f"one number for each of its {heads} query heads. Serve it without --kv-quant."
        )
    return sinks.contiguous()


def sink_types(model: torch.nn.Module, layer_ids: Collection[int]) -> list[torch.dtype | None]:
    """Returns the types of the learned sinks that layers will pass; None for layers without.

    Sinks are a parameter of the module that owns a layer: one number per query head, with ``sink`` in its name.
    """
    found: dict[torch.dtype | None, None] = {}
    for owner in model.modules():
        for layer in owner.children():
            if isinstance(layer, RadixAttention) and layer.layer_id in layer_ids:
                mine = [x for name, x in owner.named_parameters(recurse=False) if "sink" in name]
                mine = [x for x in mine if x.shape == (layer.tp_q_head_num,)]
                found[mine[0].dtype if mine else None] = None
    return list(found)


def own_keys_and_values(
    layer: AttentionLayer,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    save_kv_cache: bool,
    extra: Mapping[str, object],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``k`` and ``v`` of a plain call: the layer's own, all to be stored, without other arguments.

    Args:
        extra: further keyword arguments of the call; those that are None are ignored.

    Raises:
        NotImplementedError: the call is not plain; names the layer and the arguments. The result would be wrong: the
            cache would miss these tokens or hold them twice, or the argument would be ignored.
    """
    asked = [f"{name}=..." for name, value in extra.items() if value is not None]
    if k is None or v is None:
        asked.insert(0, "another layer's keys and values (k or v is None)")
    elif not save_kv_cache:
        asked.insert(0, "keys and values that attention does not store (save_kv_cache=False)")
    if asked or k is None or v is None:
        raise NotImplementedError(
            f"--kv-quant does not support this model: attention layer {layer.layer_id} asks for {', '.join(asked)}. "
            "Serve it without --kv-quant."
        )
    return k, v
