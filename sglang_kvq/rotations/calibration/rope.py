"""RoPE of a model's keys and queries, and their second moments over all the positions that will be served.

RoPE (arXiv 2104.09864) turns keys with their position: if a context begins d tokens later, its keys are k T(d). T(d)
is orthogonal and the same for all layers. One pass over the text therefore gives the moments of prompts of any length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.hf_attention import attention_hook, positions
from sglang_kvq.rotations.identity import cached_layers

#: Largest accepted relative error of predicted keys. At another position, a BF16 model rounds differently, which adds
#: up to some 2% in the last layer. A wrong turn is off by about 1.
TURN_TOLERANCE = 0.2

#: Function ``turn(d)`` that returns T(d), float64 ``[D, D]``. Rows of keys times T(d) are the keys of the same tokens d
#: positions later.
Turn = Callable[[int], torch.Tensor]

#: Types of models of which layers with full attention use no RoPE if others have a sliding window.
_ROPE_IN_WINDOWS = ("afmoe", "cohere2", "exaone4", "exaone_moe")


def turn_of(hf_config: Any, head_dim: int) -> Turn:
    """Returns T of a transformers model's layers of full attention, computed with the model's own rotary embedding.

    RoPE may have any layout and scaling, and cover only a part of head_dim.

    Raises:
        KVQuantError: transformers' code for the model has no rotary embedding of the usual form.
    """
    hf_config = hf_config.get_text_config()
    module = _modeling(hf_config)
    apply = getattr(module, "apply_rotary_pos_emb", None) or _apply_by_sections(module)
    names = [n for n in vars(module) if n.endswith("RotaryEmbedding") and "Vision" not in n] if module else []
    classes = [getattr(module, name) for name in names]
    if apply is None or len(classes) != 1:
        raise KVQuantError(
            f"{type(hf_config).__name__}: transformers has no rotary embedding of the usual form for this model, so "
            "its keys at later positions cannot be predicted. Pass --positions equal to --context to calibrate for "
            "prompts of that length only."
        )
    embedding = classes[0](hf_config)

    def turn(distance: int) -> torch.Tensor:
        cos, sin = _cos_and_sin(embedding, torch.tensor([[0, distance]]))
        n = cos.shape[-1]  # less than head_dim if RoPE covers only a part of it
        if hf_config.model_type == "gpt_oss":  # one cosine for a pair
            n *= 2
        basis = torch.eye(n, dtype=torch.float64)[None, None]
        (begin, _), (end, _) = (apply(basis, basis, cos[:, [i]], sin[:, [i]]) for i in (0, 1))
        whole = torch.eye(head_dim, dtype=torch.float64)
        whole[:n, :n] = end[0, 0] / begin[0, 0, 0, 0]  # some models scale cos and sin
        return whole

    return turn


def _modeling(hf_config: Any) -> ModuleType | None:
    """Returns the Python module with the model's classes, from transformers' list or among loaded ones, or None."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)].__module__]
    return sys.modules.get(type(hf_config).__module__.replace("configuration_", "modeling_"))


def _apply_by_sections(module: ModuleType | None) -> Callable[..., Any] | None:
    """Returns a function that applies RoPE to text in a model with sections for time, height and width; else None.

    It assumes that a text token has the same position in all sections. ``check_turn`` verifies this for the model.
    """
    half = getattr(module, "rotate_half", None)
    if half is None or not hasattr(module, "apply_multimodal_rotary_pos_emb"):
        return None
    return lambda q, k, cos, sin: tuple(x * cos.unsqueeze(1) + half(x) * sin.unsqueeze(1) for x in (q, k))


def _cos_and_sin(embedding: Any, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines, float64 ``[1, n, D]``, of positions int64 ``[1, n]``."""
    try:
        several = hasattr(embedding, "layer_types")  # one RoPE for each type of layers (Gemma 3)
        found = embedding(torch.zeros(1), at, *["full_attention"] * several)
    except (IndexError, RuntimeError):  # it takes positions for time, height and width
        found = embedding(torch.zeros(1), at.expand(3, *at.shape))
    cos, sin = (x.double() for x in found)
    return (cos[0], sin[0]) if cos.dim() == 4 else (cos, sin)


def mean_over_positions(moment: torch.Tensor, turn: Turn, positions: Sequence[int]) -> torch.Tensor:
    """Returns the mean of T(d)ᵀ M T(d) over the positions d at which contexts begin, for M float64 ``[..., D, D]``."""
    total = torch.zeros_like(moment)
    for position in positions:
        t = turn(position)
        total += t.mT @ moment @ t
    return total / len(positions)


def roped_layers(hf_config: Any, layers: int) -> torch.Tensor:
    """Returns which ``cached_layers`` use RoPE, bool ``[layers]``: some models leave it out in every few layers."""
    text = hf_config.get_text_config()
    if text.model_type in _ROPE_IN_WINDOWS and "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        return torch.zeros(layers, dtype=torch.bool)
    given = getattr(text, "no_rope_layers", None)  # 1 where RoPE is used, despite its name
    return torch.tensor([bool(given[i]) for i in cached_layers(text)] if given else [True] * layers)


@torch.inference_mode()
def check_turn(model: Any, ids: torch.Tensor, turn: Turn, position: int) -> None:
    """Checks that the model's keys change with their position as ``turn`` predicts."""
    near, far = (_keys(model, ids.to(model.device), first) for first in (0, position))
    t = turn(position)
    roped = roped_layers(model.config, len(near))
    for layer, (k, moved) in enumerate(zip(near, far)):
        error = float((moved - (k @ t if roped[layer] else k)).norm() / moved.norm().clamp(min=1e-30))
        if error > TURN_TOLERANCE:
            raise KVQuantError(
                f"layer {layer}: at position {position} keys differ by {error:.2f} of their size from what RoPE makes "
                "of those at 0; this model encodes positions in an unsupported way. Pass --positions equal to "
                "--context to calibrate for prompts of that length only."
            )


def _keys(model: Any, ids: torch.Tensor, first: int) -> list[torch.Tensor]:
    """Returns each layer's keys, float64 ``[kv_heads, n, D]`` on the CPU; the first token is at position ``first``."""
    keys: list[torch.Tensor] = []

    def keep(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        keys.append(k.double().cpu())

    with attention_hook(model, keep):
        model.base_model(ids[None], position_ids=positions(ids, first), use_cache=False)
    return keys
