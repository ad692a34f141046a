"""Differences between the supported SGLang releases, and between devices, in one place."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as distribution_version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sglang_kvq.releases import NEW_TREE, SUPPORTED
from sglang_kvq.sglang.types import ModelConfig, ServerArgs


def sglang_version() -> Version:
    """Returns the version of the installed SGLang."""
    return Version(distribution_version("sglang"))


def applies(specifier: str, version: Version) -> bool:
    """Returns True if ``specifier`` contains a release (``""`` contains all); a pre-release counts as its release."""
    return SpecifierSet(specifier).contains(version.base_version, prereleases=True)


def is_supported(version: Version) -> bool:
    return any(applies(specifier, version) for specifier in SUPPORTED)


def resolved(server_args: ServerArgs, field: str, default: Any = None) -> Any:
    """Returns a setting as SGLang decided it. From ``NEW_TREE`` on the fields of ServerArgs keep the typed values."""
    result = getattr(import_module("sglang.srt.arg_groups.overrides"), "resolution_result", None)
    if result is None:
        return getattr(server_args, field, default)
    return result(server_args, field, default)


def prefill_graphs(device: str) -> tuple[str, ...]:
    """Returns SGLang's names of the CUDA graph backends for prefill that are supported.

    ``breakable`` leaves attention out of its graphs. Other backends would capture one batch's plan and repeat it.
    """
    served = device == "cuda" and applies(NEW_TREE, sglang_version())
    return ("disabled", "breakable") if served else ("disabled",)


def prefill_chunk(server_args: ServerArgs) -> int | None:
    """Returns ``--chunked-prefill-size``; None if prompts are prefilled whole."""
    chunk = resolved(server_args, "chunked_prefill_size")
    return None if chunk is None or chunk <= 0 else int(chunk)


def prefill_batch(server_args: ServerArgs) -> int:
    """Returns the maximum number of tokens in a prefill batch of several requests."""
    return prefill_chunk(server_args) or int(resolved(server_args, "max_prefill_tokens"))


def drafts(server_args: ServerArgs) -> int:
    """Returns how many tokens of each request a step verifies; 0 without speculative decoding."""
    speculates = resolved(server_args, "speculative_algorithm") is not None
    return int(resolved(server_args, "speculative_num_draft_tokens") or 1) if speculates else 0


def step_tokens(server_args: ServerArgs) -> int:
    """Returns how many tokens a decode step writes for each request: one, or the number of drafts."""
    return drafts(server_args) or 1


def typed(server_args: ServerArgs, field: str) -> bool:
    """Returns True if the user gave a setting, that is, if its value differs from SGLang's default.

    Before ``NEW_TREE`` a setting may be typed with its default value. It then counts as not given; SGLang cannot tell
    either.
    """
    kind = type(server_args)
    names = getattr(kind, "__struct_fields__", None)
    if names is None:
        default = kind.__dataclass_fields__[field].default
    else:
        default = dict(zip(reversed(names), reversed(kind.__struct_defaults__)))[field]
    return bool(getattr(server_args, field) != default)


def setting(server_args: ServerArgs, field: str) -> Any:
    """Returns a setting's current value in a process that SGLang has configured; SGLang may have changed the value."""
    context = import_module("sglang.srt.runtime_context")
    if hasattr(server_args, "override"):
        return getattr(server_args, field)
    return context.get_context().config_leaf(field)


def override(server_args: ServerArgs, **fields: Any) -> None:
    """Changes settings in a process that SGLang has configured, by SGLang's own means."""
    if hasattr(server_args, "override"):
        server_args.override("kv-quant", **fields)
    else:
        import_module("sglang.srt.runtime_context").get_context().override("kv-quant", **fields)


def model_config(server_args: ServerArgs) -> ModelConfig:
    """Returns SGLang's ModelConfig of a resolved ServerArgs, which SGLang caches. Reads no weights."""
    overrides = import_module("sglang.srt.arg_groups.overrides")
    if hasattr(overrides, "model_config_of"):
        return overrides.model_config_of(server_args)
    return server_args.get_model_config()


def gpu_memory() -> float | None:
    """Returns the memory in MiB of the smallest NVIDIA GPU, as SGLang counts it; None without a GPU."""
    try:
        found: float | None = import_module("sglang.srt.utils.common").get_device_memory_capacity("cuda")
    except (RuntimeError, ValueError):  # SGLang itself stops with the same error soon after
        return None
    return found


def attention_backend(device: str) -> str:
    """Returns the name of the SGLang attention backend that ours replaces."""
    return "torch_native" if device == "cpu" else "triton"
