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
    """The installed SGLang's version."""
    return Version(distribution_version("sglang"))


def applies(specifier: str, version: Version) -> bool:
    """Returns True if a release is in ``specifier`` (``""`` is all); a pre-release counts as its release."""
    return SpecifierSet(specifier).contains(version.base_version, prereleases=True)


def is_supported(version: Version) -> bool:
    return any(applies(specifier, version) for specifier in SUPPORTED)


def resolved(server_args: ServerArgs, field: str, default: Any = None) -> Any:
    """A setting as SGLang decided it. From ``NEW_TREE`` on the fields of ServerArgs keep what was typed."""
    result = getattr(import_module("sglang.srt.arg_groups.overrides"), "resolution_result", None)
    if result is None:
        return getattr(server_args, field, default)
    return result(server_args, field, default)


def prefill_graphs(device: str) -> tuple[str, ...]:
    """Returns the backends of CUDA graphs for prefill that are served, by SGLang's names.

    ``breakable`` leaves attention out of its graphs. The others would freeze a batch's plan.
    """
    served = device == "cuda" and applies(NEW_TREE, sglang_version())
    return ("disabled", "breakable") if served else ("disabled",)


def prefill_chunk(server_args: ServerArgs) -> int | None:
    """``--chunked-prefill-size``; None where prompts are prefilled whole."""
    chunk = resolved(server_args, "chunked_prefill_size")
    return None if chunk is None or chunk <= 0 else int(chunk)


def prefill_batch(server_args: ServerArgs) -> int:
    """Most tokens of a prefill batch of several requests."""
    return prefill_chunk(server_args) or int(resolved(server_args, "max_prefill_tokens"))


def step_tokens(server_args: ServerArgs) -> int:
    """Tokens that a decode step writes for each request: one, or the drafts."""
    return int(resolved(server_args, "speculative_num_draft_tokens") or 1)


def typed(server_args: ServerArgs, field: str) -> bool:
    """Returns True if the user gave a setting: it differs from SGLang's default.

    Before ``NEW_TREE`` a setting may be given as what it would be anyway, and SGLang cannot tell either.
    """
    kind = type(server_args)
    names = getattr(kind, "__struct_fields__", None)
    if names is None:
        default = kind.__dataclass_fields__[field].default
    else:
        default = dict(zip(reversed(names), reversed(kind.__struct_defaults__)))[field]
    return bool(getattr(server_args, field) != default)


def setting(server_args: ServerArgs, field: str) -> Any:
    """A setting as it is now, in a process that SGLang has configured and may have changed it in."""
    context = import_module("sglang.srt.runtime_context")
    if hasattr(server_args, "override"):
        return getattr(server_args, field)
    return context.get_context().config_leaf(field)


def override(server_args: ServerArgs, **fields: Any) -> None:
    """Change settings in a process that SGLang has configured, in the way that it does itself."""
    if hasattr(server_args, "override"):
        server_args.override("kv-quant", **fields)
    else:
        import_module("sglang.srt.runtime_context").get_context().override("kv-quant", **fields)


def model_config(server_args: ServerArgs) -> ModelConfig:
    """SGLang's ModelConfig of a resolved ServerArgs; cached by SGLang, no weights are read."""
    overrides = import_module("sglang.srt.arg_groups.overrides")
    if hasattr(overrides, "model_config_of"):
        return overrides.model_config_of(server_args)
    return server_args.get_model_config()


def gpu_memory() -> float | None:
    """Returns the MiB of the smallest NVIDIA GPU as SGLang counts them; None without one."""
    try:
        found: float | None = import_module("sglang.srt.utils.common").get_device_memory_capacity("cuda")
    except (RuntimeError, ValueError):  # SGLang stops at it a moment later
        return None
    return found


def attention_backend(device: str) -> str:
    """The SGLang backend name that ours is registered under."""
    return "torch_native" if device == "cpu" else "triton"
