"""Reads a model's geometry and identity from its config, to match the model with rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

#: Config fields that distinguish architectures and sizes of models; ``identity`` reads them.
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

#: Kinds in a config's ``layer_types`` that have no keys and values, or whose cache does not grow with the context.
UNCACHED_LAYER_TYPES = frozenset(
    {"linear_attention", "mamba", "conv", "sliding_attention", "chunked_attention", "moe", "mlp"}
)
#: Why transformers cannot run a model that ``has_windows`` for calibration.
WINDOWS = "some layers have sliding windows, which calibration in transformers does not cover"


class Geometry(NamedTuple):
    """The shape that rotations must fit, as keywords of ``load_rotations``; ``layers`` counts ``cached_layers``."""

    layers: int
    kv_heads: int
    head_dim: int


class LayerNumbers(NamedTuple):
    """A model's own numbers of its ``cached_layers``, and the total number of its layers."""

    cached: tuple[int, ...]
    total: int


def layer_numbers(hf_config: Any) -> LayerNumbers:
    """Returns the layer numbers of a transformers config or its dict."""
    cached = cached_layers(hf_config)
    return LayerNumbers(cached, max(_getter(hf_config)("num_hidden_layers") or 0, *(i + 1 for i in cached), 0))


def geometry_of(hf_config: Any) -> Geometry:
    """Returns the geometry of a transformers config or its dict."""
    found = identity(hf_config)
    return Geometry(len(cached_layers(hf_config)), found["num_key_value_heads"], found["head_dim"])


def cached_layers(hf_config: Any) -> tuple[int, ...]:
    """Returns the indices of the layers that the cache and rotation files hold, ascending: those of full attention."""
    get = _getter(hf_config)
    known = get("full_attention_layer_ids")  # in SGLang's configs
    if known is not None:
        return tuple(known)
    layers = range(get("num_hidden_layers") or 0)
    kinds = get("layer_types") or get("layers_block_type")
    if kinds:
        return tuple(i for i, kind in zip(layers, kinds) if kind not in UNCACHED_LAYER_TYPES)
    interval = get("full_attention_interval") or 1  # the layers between have linear attention
    return tuple(i for i in layers if (i + 1) % interval == 0)


def unapplied_window(hf_config: Any) -> int | None:
    """Returns the length in tokens of a config's ``sliding_window`` that SGLang does not apply; None if there is none.

    SGLang gives a window to the layers that ``layer_types`` calls ``sliding_attention``, and to no others: Mistral 7B
    v0.1, Phi-3, Phi-4 mini and StarCoder 2 attend to all tokens in every layer. Such models are served, and so
    calibrated, with full attention. A starting server checks each layer (``sglang.layers.check_layers``).
    """
    get = _getter(hf_config)
    window = get("sliding_window")
    if not isinstance(window, int) or window <= 0 or get("use_sliding_window") is False:
        return None
    return None if "sliding_attention" in (get("layer_types") or ()) else window


def has_windows(hf_config: Any) -> bool:
    """Returns True if layers with windows lie between those of full attention; only SGLang runs such calibrations."""
    return not {"sliding_attention", "chunked_attention"}.isdisjoint(_getter(hf_config)("layer_types") or ())


def why_no_transform(hf_config: Any) -> str | None:
    """Returns why no calibration for transform coding can run a model; None if one may."""
    if not has_windows(hf_config):
        return None
    return f"{WINDOWS}, and SGLang gives no gradients for --composition transform. Use --kv-quant oscar."


def calibrate_options(hf_config: Any, *, transform: bool = False) -> list[str]:
    """Returns the options of ``kvq calibrate`` that a model, and rotations for transform coding, need."""
    engine = ["--engine", "sglang"] if has_windows(hf_config) else []
    return ["--composition", "transform", *engine] if transform else engine


def identity(hf_config: Any) -> dict[str, Any]:
    """Returns the ``IDENTITY_FIELDS`` of a transformers config or its dict, with transformers' defaults filled in."""
    get = _getter(hf_config)
    found = {name: get(name) for name in IDENTITY_FIELDS}
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
    found["head_dim"] = found["head_dim"] or (found["hidden_size"] or 0) // (found["num_attention_heads"] or 1)
    rope = get("rope_parameters") or get("rope_scaling") or {}
    theta = found["rope_theta"] or rope.get("rope_theta")
    found["rope_theta"] = float(theta) if theta is not None else None
    found["architectures"] = list(found["architectures"] or [])
    return found


def _getter(hf_config: Any) -> Callable[[str], Any]:
    """Returns a function that looks up a field of the (text) config or its dict; it returns None if absent."""
    if isinstance(hf_config, dict):
        return (hf_config.get("text_config") or hf_config).get
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    return lambda name: getattr(text, name, None)
