"""See, and change, the queries, keys and values of a Hugging Face model as its attention sees them: after RoPE."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.identity import cached_layers, unapplied_window
from sglang_kvq.rotations.maths.fake_quant import causal_attention

logger = logging.getLogger(__name__)

#: ``hook(layer, q, k, v, scale)`` with q ``[q_heads, T, D]``, k and v ``[kv_heads, T, D]`` of one sequence; returns the
#: attention output ``[q_heads, T, D]`` to use, or None for plain causal attention. ``layer`` counts the layers that the
#: cache holds (``identity.cached_layers``), from 0: in a hybrid of every fourth it is 1 in the model's eighth layer.
AttentionHook = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], "torch.Tensor | None"]

_NAME = "kvq_capture"


@contextmanager
def attention_hook(model: Any, hook: AttentionHook) -> Iterator[None]:
    """Run ``hook`` in place of every attention of ``model`` (a transformers model) inside the block.

    It goes through transformers' attention registry, so any architecture that uses the registry works. Sequences
    must be unpadded and one per batch. Sliding windows that SGLang does not apply are left out here too.

    Raises:
        KVQuantError: (in the forward pass) an attention that is not plain causal softmax.
    """

    def of_layer(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor | None:
        return hook(index_of(module), q, k, v, scale)

    index_of = _indices(model)
    if (window := unapplied_window(model.config)) is not None:
        _say_once(window)
    with _module_hook(model, of_layer):
        yield


@cache
def _say_once(window: int) -> None:
    logger.warning(
        "the config's sliding_window of %d tokens is left out: SGLang does not apply it, and serves this model with "
        "full attention",
        window,
    )


@torch.inference_mode()
def attention_modules(model: Any, ids: torch.Tensor) -> dict[int, torch.nn.Module]:
    """The module that attends in each layer of ``AttentionHook``, seen as these tokens, int64 ``[n]``, run."""
    seen: dict[int, torch.nn.Module] = {}
    index_of = _indices(model)

    def note(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        seen[index_of(module)] = module

    with _module_hook(model, note):
        ids = ids.to(model.device)
        model.base_model(ids[None], position_ids=positions(ids, 0), use_cache=False)
    return seen


def _indices(model: Any) -> Callable[[Any], int]:
    """Returns a function from an attention module to its layer, as ``AttentionHook`` counts them."""
    layers = cached_layers(model.config)

    def index_of(module: Any) -> int:
        if module.layer_idx not in layers:
            raise KVQuantError(
                f"layer {module.layer_idx} attends, but by the model's config only layers "
                f"{', '.join(map(str, layers))} are of full attention: such models are not supported."
            )
        return layers.index(module.layer_idx)

    return index_of


@contextmanager
def _module_hook(
    model: Any, hook: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor | None]
) -> Iterator[None]:
    """``attention_hook`` whose hook gets the attention's module in place of its layer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = module.layer_idx
        # A window on a layer that the cache holds is one that SGLang does not apply; other layers are refused below.
        for option in ("softcap", "s_aux"):
            if kwargs.get(option) is not None:
                raise KVQuantError(
                    f"layer {layer} uses {option}={kwargs[option]}: --kv-quant serves plain causal attention only."
                )
        q, k, v = query[0], key[0], value[0]
        if k.shape[-1] != v.shape[-1]:
            raise KVQuantError(
                f"keys have head_dim {k.shape[-1]}, values {v.shape[-1]}: such models are not supported."
            )
        scale = scaling if scaling is not None else q.shape[-1] ** -0.5
        out = hook(module, q, k, v, scale)
        if out is None:
            out = causal_attention(q, k, v, scale)
        return out.to(query.dtype).transpose(0, 1)[None].contiguous(), None

    previous = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(_NAME, attention)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(previous)


def positions(ids: torch.Tensor, first: int) -> torch.Tensor:
    """``position_ids`` of one sequence whose first token stands at ``first``: int64 ``[1, T]``."""
    return torch.arange(first, first + len(ids), device=ids.device)[None]
