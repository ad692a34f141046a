"""Pipeline stages: gives all stages the same limits, and refuses settings that do not work with ``--pp-size``.

Every stage runs its own scheduler on the same requests. All schedulers must take the same decisions, so they must count
the same pages and admit the same number of requests. Stages have different layers, so their pages differ in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from sglang_kvq.cache.layout import MemoryLayout
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import refused_beside
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.attention.drafts import keeps_states
from sglang_kvq.sglang.types import ModelConfig, ServerArgs

_UNTRIED = "not tried with --kv-quant and --pp-size yet"
_OFF = (None, False, "")

#: Field of ServerArgs, why it is refused, and its harmless values.
REFUSED: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("disaggregation_mode", "each stage would have to send its own window", (None, "null")),
    ("speculative_algorithm", "drafts are made by the last stage alone", (None,)),
    ("enable_hierarchical_cache", _UNTRIED, _OFF),
    ("enable_streaming_session", _UNTRIED, _OFF),
    ("enable_mixed_chunk", _UNTRIED, _OFF),
    ("enable_dynamic_chunking", "chunks may end within a page", _OFF),
    ("enable_dp_attention", _UNTRIED, _OFF),
)


def stages_of(server_args: ServerArgs) -> int:
    """Returns the number of pipeline stages."""
    return int(compat.resolved(server_args, "pp_size", 1) or 1)


def refused_flags(values: Mapping[str, Any]) -> list[str]:
    """Returns the problems of the settings that the user typed, each with the fix."""
    stages = values.get("pp_size")
    if stages in (None, 1):
        return []
    return refused_beside(REFUSED, values, f"--pp-size {stages}", ". Leave out one of the two")


def refused_settings(server_args: ServerArgs, config: KVQuantConfig, model: ModelConfig) -> list[str]:
    """Returns the problems of the settings as SGLang decided them, of the config, and of the model."""
    stages = stages_of(server_args)
    if stages == 1:
        return []
    fields = ("pp_size", *(field for field, _, _ in REFUSED))
    found = refused_flags({field: compat.resolved(server_args, field) for field in fields})
    beside, layers = f"and --pp-size {stages}", model.num_hidden_layers
    if config.episodic is not None:
        found.append(
            f"--episodic-policy {config.episodic.policy} {beside}: each stage would choose other tokens. Leave out one "
            "of the two."
        )
    if config.capture:
        found.append(f"kvq calibrate {beside}: {_UNTRIED}. Use --tp.")
    for what, has in (("sliding windows", model.is_hybrid_swa), ("recurrent states", keeps_states(model))):
        if has:
            found.append(f"a model with {what} {beside}: {_UNTRIED}. Use --tp.")
    if layers < stages:
        found.append(f"--pp-size {stages}: the model has {layers} layers. Use at most {layers}.")
    return found


def agree(layout: MemoryLayout, server_args: ServerArgs) -> MemoryLayout:
    """Returns the layout with the numbers of requests that all stages can serve, the smallest of any stage.

    Every worker must call this equally often, because each call waits for all workers.

    Raises:
        SystemExit: SGLang gave the stages different numbers of pages.
    """
    if stages_of(server_args) == 1:
        return layout
    requests, whole, fewest, most = least_of_all(
        [layout.max_requests, layout.whole_windows, layout.pages, -layout.pages]
    )
    if fewest != -most:
        raise SystemExit(
            f"sglang-kvq: SGLang gives the pipeline stages from {fewest} to {-most} pages of cache, but all need the "
            "same number. Serve without --pp-size."
        )
    return replace(layout, max_requests=requests, whole_windows=whole)


def least_of_all(numbers: list[int]) -> list[int]:
    """Returns, for each position of the list, the smallest number among all workers of this copy of the model."""
    from sglang.srt.distributed.parallel_state import get_world_group

    found = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return [int(number) for number in found.tolist()]
