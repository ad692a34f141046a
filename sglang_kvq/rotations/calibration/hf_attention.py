"""Lets a function see and replace the attention of a Hugging Face model, with its queries and keys after RoPE."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.identity import cached_layers, geometry_of, unapplied_window
from sglang_kvq.rotations.maths.fake_quant import causal_attention

logger = logging.getLogger(__name__)

#: ``hook(layer, q, k, v, scale)`` with q ``[q_heads, T, D]``, k and v ``[kv_heads, T, D]`` of one sequence; returns the
#: attention output ``[q_heads, T, D]`` to use, or None for plain causal attention. ``layer`` counts the layers that the
#: cache holds (``identity.cached_layers``), from 0. If only every fourth layer has full attention, the model's eighth
#: layer has number 1.
AttentionHook = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], "torch.Tensor | None"]

_NAME = "kvq_capture"

#: Options by which transformers' models ask for other attention than plain softmax.
_OTHER_SOFTMAX = {"softcap": "a soft cap on scores", "s_aux": "learned sinks"}
_FIX = (
    "such models cannot be calibrated in transformers. Use --kv-quant int4, which needs no rotations; `kvq doctor "
    "--model` says if it serves the model."
)


@contextmanager
def attention_hook(model: Any, hook: AttentionHook, *, batched: bool = False) -> Iterator[dict[int, torch.nn.Module]]:
    """Runs ``hook`` in place of every attention of a transformers model; yields the modules that attend, by layer.

    The hook is entered in transformers' attention registry. Sequences must be unpadded and one per batch. If
    ``batched``, the hook instead takes and returns tensors of a whole batch, ``[B, heads, T, D]``, and must not return
    None. Sliding windows that SGLang does not apply are not applied here either. Attention that is not plain causal
    softmax is refused.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers, seen = cached_layers(model.config), dict[int, torch.nn.Module]()
    _, kv_heads, head_dim = geometry_of(model.config)
    if (window := unapplied_window(model.config)) is not None:
        _say_once(window)

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        # SGLang applies no window to the layers that the cache holds; other layers are refused below.
        for option, what in _OTHER_SOFTMAX.items():
            if kwargs.get(option) is not None:
                raise KVQuantError(f"layer {module.layer_idx} has {what} ({option}): {_FIX}")
        q, k, v = (query, key, value) if batched else (query[0], key[0], value[0])
        if (k.shape[-1], v.shape[-1], k.shape[-3]) != (head_dim, head_dim, kv_heads):
            raise KVQuantError(
                f"layer {module.layer_idx} has {k.shape[-3]} KV heads with keys of {k.shape[-1]} elements and values "
                f"of {v.shape[-1]}, by the model's config {kv_heads} of {head_dim} (MLA, for example): {_FIX}"
            )
        if module.layer_idx not in layers:
            known = f"only layers {', '.join(map(str, layers))} have" if layers else "no layer has"
            raise KVQuantError(
                f"layer {module.layer_idx} attends, but by the model's config {known} full attention: {_FIX}"
            )
        layer = layers.index(module.layer_idx)
        seen[layer] = module
        scale = scaling if scaling is not None else q.shape[-1] ** -0.5
        out = hook(layer, q, k, v, scale)
        if out is None:
            out = causal_attention(q, k, v, scale)
        out = out.to(query.dtype)
        return (out if batched else out[None]).transpose(1, 2).contiguous(), None

    previous = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(_NAME, attention)
    try:
        model.set_attn_implementation(_NAME)
        yield seen
    finally:
        model.set_attn_implementation(previous)


@cache
def _say_once(window: int) -> None:
    logger.warning(
        "the config's sliding_window of %d tokens is left out: SGLang does not apply it, and serves this model with "
        "full attention",
        window,
    )


def positions(ids: torch.Tensor, first: int) -> torch.Tensor:
    """Returns ``position_ids`` of one sequence whose first token is at position ``first``, int64 ``[1, T]``."""
    return torch.arange(first, first + len(ids), device=ids.device)[None]
