"""Refuses settings that ``--episodic-policy`` does not support, before any process is spawned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError, typed
from sglang_kvq.sessions.config import EpisodicConfig
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.types import ModelConfig, ServerArgs

_ONE_PROCESS = "sessions are kept in one process"
#: Settings of ServerArgs, their harmless values, and why other values are refused.
REFUSED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("tokenizer_worker_num", (None, 1), _ONE_PROCESS),
    ("dp_size", (None, 1), "a session's history would be in another worker's cache"),
    ("enable_lora", (None, False), "pages of an adapter's cache cannot be chosen"),
    ("lora_paths", (None, [], {}), "pages of an adapter's cache cannot be chosen"),
    ("disable_radix_cache", (None, False), "histories are kept in the prefix cache"),
    ("skip_tokenizer_init", (None, False), "questions and histories are compared as text"),
    ("speculative_algorithm", (None,), "the positions of drafts are not moved yet"),
    ("enable_session_radix_cache", (None, False), "it gives session ids another meaning"),
)


def check(server_args: ServerArgs, model: ModelConfig, config: EpisodicConfig) -> None:
    """Refuses settings and models whose requests cannot begin with chosen pages.

    Raises:
        KVQuantError: lists every refused setting and property.
    """
    found = [
        f"{typed(field, value)}: {why}."
        for field, allowed, why in REFUSED
        if (value := compat.resolved(server_args, field, allowed[0])) not in allowed
    ]
    found += [f"{model.model_path} has {what}." for what in unsupported(model)]
    if _is_on("SGLANG_RUST_SERVER"):
        found.append(
            f"SGLANG_RUST_SERVER={os.environ['SGLANG_RUST_SERVER']}: sessions are kept in the Python server process, "
            "which this setting replaces."
        )
    if config.budget >= (context := model.context_len):
        found.append(
            f"--episodic-budget {config.budget}: the model takes {context} tokens, so no conversation would exceed the "
            f"budget. Use at most {(context - 1) // PAGE_SIZE * PAGE_SIZE}."
        )
    if found:
        raise KVQuantError(
            "--episodic-policy cannot be combined with:\n"
            + "\n".join(f"  {text}" for text in found)
            + "\nChange these settings, or remove --episodic-policy."
        )


def unsupported(model: ModelConfig) -> Iterator[str]:
    """Yields completions of "this model has ..." for properties with which chosen pages cannot work."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if _has_mrope(model):
        yield "positions of several axes (M-RoPE), which cannot be moved"
    if model.is_hybrid_swa:
        yield "sliding windows: chosen pages lack the state of the layers that have them"
    if mambaish_config(model) is not None:
        yield "recurrent states: chosen pages lack the state that all tokens before made"


def _has_mrope(model: ModelConfig) -> bool:
    if getattr(model, "model_is_mrope", False):
        return True
    text: Any = model.hf_text_config
    scaling = [getattr(text, name, None) for name in ("rope_scaling", "rope_parameters")]
    return any("mrope_section" in one for one in scaling if isinstance(one, dict))


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off")
