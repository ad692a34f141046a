"""Rules for models with sliding windows."""

from __future__ import annotations

from collections.abc import Collection

from sglang_kvq.sglang.types import ModelConfig


def unsupported_windows(model: ModelConfig, layer_types: Collection[str]) -> str | None:
    """Completes "this model has ..." if its windows are not served; None if they are, or if it has none.

    Args:
        layer_types: the kinds of its layers, by its config.
    """
    if not model.is_hybrid_swa:
        if "sliding_attention" not in layer_types:
            return None
        why = "--disable-hybrid-swa-memory is set" if model.disable_hybrid_swa_memory else "of this architecture"
        return (
            "sliding windows in some layers, whose keys and values SGLang keeps of all tokens as those of the others "
            f"({why}), so that quantizing the others would save little"
        )
    full = getattr(model, "full_attention_layer_ids", None)
    if full is None:  # DeepSeek V4, and schedules that SGLang does not know
        return "sliding windows beside keys that SGLang compresses, or in layers that it does not name"
    if not full:
        return "a sliding window in every layer, so that no layer's keys and values grow with the context"
    if model.is_hybrid_swa_compress and (model.head_dim, model.v_head_dim) != (
        model.swa_head_dim,
        model.swa_v_head_dim,
    ):
        return (
            f"heads of {model.swa_head_dim} and {model.swa_v_head_dim} elements in the layers with sliding windows and "
            f"of {model.head_dim} and {model.v_head_dim} in the others"
        )
    return None
