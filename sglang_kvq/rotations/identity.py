"""What a model's config tells about rotations: its geometry, and which model it is."""

from __future__ import annotations

from typing import Any, NamedTuple

#: Config fields that tell one architecture and training run's shape from another; ``identity`` reads them.
IDENTITY_FIELDS = (
    "architectures",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
)


class Geometry(NamedTuple):
    """What rotations must fit: the keywords of ``load_rotations``."""

    layers: int
    kv_heads: int
    head_dim: int


def geometry_of(hf_config: Any) -> Geometry:
    """Of a transformers config or its dict."""
    found = identity(hf_config)
    return Geometry(found["num_hidden_layers"], found["num_key_value_heads"], found["head_dim"])


def identity(hf_config: Any) -> dict[str, Any]:
    """The ``IDENTITY_FIELDS`` of a transformers config or its dict; defaults are filled in as transformers does."""
    if not isinstance(hf_config, dict) and hasattr(hf_config, "get_text_config"):
        hf_config = hf_config.get_text_config()

    def get(name: str) -> Any:
        return hf_config.get(name) if isinstance(hf_config, dict) else getattr(hf_config, name, None)

    found = {name: get(name) for name in IDENTITY_FIELDS}
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
    found["head_dim"] = found["head_dim"] or (found["hidden_size"] or 0) // (found["num_attention_heads"] or 1)
    rope = get("rope_parameters") or get("rope_scaling") or {}
    theta = found["rope_theta"] or rope.get("rope_theta")
    found["rope_theta"] = float(theta) if theta is not None else None
    found["architectures"] = list(found["architectures"] or [])
    return found
