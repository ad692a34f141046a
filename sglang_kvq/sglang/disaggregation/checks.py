"""Refuses settings that ``--kv-quant`` does not support on a server in ``--disaggregation-mode``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import refused_beside
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.attention.drafts import BRANCHING, draft_model, keeps_states
from sglang_kvq.sglang.disaggregation.drafts import WITH_PREFIX_CACHE
from sglang_kvq.sglang.hooks import TRANSFERS
from sglang_kvq.sglang.types import ModelConfig, ServerArgs

#: Supported transfer back ends: their buffers may differ in size, and they send a request's state with its last chunk.
#: SGLang resolves ``mooncake_tcp`` to ``mooncake``, with TCP as its transport.
BACKENDS = ("mooncake", "mooncake_tcp", "nixl")

_UNTRIED = "not tried with --kv-quant and --disaggregation-mode yet"
_PLAIN = "it expects plain keys and values"
_OFF = (None, False, "")

#: Field of ServerArgs, why it is refused, and its harmless values.
REFUSED: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    (
        "disaggregation_transfer_backend",
        f"quantized pages can be sent by {', '.join(BACKENDS)} only",
        (None, *BACKENDS),
    ),
    ("enable_dp_attention", _UNTRIED, _OFF),
    ("enable_mixed_chunk", _UNTRIED, _OFF),
    ("disaggregation_enable_kv_checksum", "the checksum is taken before the last pages are quantized", _OFF),
    ("disaggregation_decode_host_receive_threshold", _PLAIN, (None, 1, 1.0)),
    ("disaggregation_decode_allocation_policy", _UNTRIED, (None, "early")),
    ("optimistic_prefill_attempts", _UNTRIED, (None, 0)),
    ("enable_streaming_session", _UNTRIED, _OFF),
    ("kv_canary", "the canary's notes are not sent with the pages", (None, "none")),
)

#: The same on a decode server only.
REFUSED_IF_DECODING: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("enable_hierarchical_cache", f"{_UNTRIED}, except on the prefill server", _OFF),
)

#: Environment variables of SGLang that are refused, and why.
REFUSED_ENVIRONMENT = (
    ("SGLANG_DISAGG_STAGING_BUFFER", _PLAIN),
    ("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "a cached prefix is quantized with the batch that reads it"),
)


def mode_of(server_args: ServerArgs) -> str | None:
    """Returns ``prefill`` or ``decode``; None on a server that does both."""
    return _mode(compat.resolved(server_args, "disaggregation_mode"))


def _mode(value: object) -> str | None:
    return None if value in (None, "null", "") else str(value)


def refused_in(mode: str) -> tuple[tuple[str, str, tuple[object, ...]], ...]:
    """Returns what ``REFUSED`` has for a server in this mode."""
    return (*REFUSED, *(REFUSED_IF_DECODING if mode == "decode" else ()))


def refused_flags(values: Mapping[str, Any]) -> list[str]:
    """Returns the problems of the settings that the user typed, each with the fix."""
    mode = _mode(values.get("disaggregation_mode"))
    if mode is None:
        return []
    if not compat.applies(TRANSFERS, compat.sglang_version()):
        return [
            f"--disaggregation-mode {mode}: SGLang {compat.sglang_version()} sends plain BF16 pages only. Install "
            f"SGLang {TRANSFERS.removeprefix('>=')} or newer."
        ]
    found = refused_beside(refused_in(mode), values, f"--disaggregation-mode {mode}")
    algorithm = values.get("speculative_algorithm")
    if (
        mode == "decode"
        and values.get("disaggregation_decode_enable_radix_cache")
        and algorithm not in (None, *WITH_PREFIX_CACHE)
    ):
        found.append(
            f"--disaggregation-decode-enable-radix-cache and --speculative-algorithm {algorithm}: SGLang serves the "
            f"pair with {', '.join(WITH_PREFIX_CACHE)} only. Leave out one of the two."
        )
    for name, why in REFUSED_ENVIRONMENT:
        if os.environ.get(name, "").lower() not in ("", "0", "false", "no", "off"):
            found.append(f"{name}={os.environ[name]} and --disaggregation-mode {mode}: {why}. Unset it.")
    return found


def refused_settings(server_args: ServerArgs, config: KVQuantConfig, model: ModelConfig) -> list[str]:
    """Returns the problems of the settings as SGLang decided them, of the config, and of the model."""
    mode = mode_of(server_args)
    if mode is None:
        return []
    refused = refused_in(mode)
    found = refused_beside(
        refused,
        {field: compat.resolved(server_args, field) for field, _, _ in refused},
        f"--disaggregation-mode {mode}",
    )
    with_mode = f"and --disaggregation-mode {mode}"
    if config.episodic is not None:
        found.append(f"--episodic-policy {config.episodic.policy} {with_mode}: {_UNTRIED}.")
    if config.recent_min is not None:
        found.append(
            f"--kv-quant-recent-min {config.recent_min} {with_mode}: a window is sent whole. Leave "
            "--kv-quant-recent-min out."
        )
    served, algorithm = [("a model", model)], compat.resolved(server_args, "speculative_algorithm")
    if algorithm not in (None, BRANCHING):
        served.append(("a draft model", draft_model(server_args, model)))
    for name, kept in served:
        for what, has in (("sliding windows", kept.is_hybrid_swa), ("recurrent states", keeps_states(kept))):
            if has:
                found.append(f"{name} with {what} {with_mode}: {_UNTRIED}.")
    return found
