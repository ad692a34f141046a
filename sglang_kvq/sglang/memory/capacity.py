"""Hooks that size the cache: they compute tokens and running requests from the available bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_kvq.cache.layout import (
    KVGeometry,
    MemoryLayout,
    bf16_slots,
    divide,
    reserved_bytes,
    rows_within,
    share,
    shared_reserve,
    window_slots,
)
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.methods import RotationKind, get_method
from sglang_kvq.releases import NEW_TREE, NEW_TREE_RELEASES
from sglang_kvq.rotations.identity import cached_layers
from sglang_kvq.rotations.resolve import resolve_formats, resolve_rotations
from sglang_kvq.sglang import compat, runtime
from sglang_kvq.sglang.attention import drafts
from sglang_kvq.sglang.disaggregation.checks import mode_of
from sglang_kvq.sglang.disaggregation.staging import entries_for, staging_bytes
from sglang_kvq.sglang.memory import stages
from sglang_kvq.sglang.runtime import config_of, logger
from sglang_kvq.sglang.types import Configurator, ModelConfig, Original, Scheduler


def compute_cell_size(original: Original, self: Configurator, kvc: Configurator, num_layers: int) -> int:
    """AROUND ``DefaultPoolConfigurator._compute_cell_size``: returns the bytes of one token in all layers."""
    plain: int = original(self, kvc, num_layers)
    config = config_of(kvc.server_args)
    if config is None or kvc.is_draft_worker:
        return plain
    # SGLang's own figure accounts for tensor parallelism, so the heads per worker follow from it.
    kv_heads = plain // (2 * kvc.model_config.head_dim * num_layers * kvc.kv_cache_dtype.itemsize)
    # The bytes returned here leave out the draft model's, which ``drafts.after_sizes`` adds.
    why_not = why_not_shared(kvc, config)
    if why_not is None and config.recent_min is None:
        config = replace(config, recent_min=0)  # windows shrink only while all memory is in use
    state = start_cache(kvc, config, kv_heads, num_layers, drafts.draft_page_bytes(kvc))
    if why_not is not None:
        logger.info("kv-quant divides the memory once: %s", why_not)
        return state.geometry.page_bytes // PAGE_SIZE
    args = kvc.server_args
    state.shared = window_slots(config, compat.prefill_batch(args), compat.step_tokens(args))
    return state.geometry.shared_page_bytes // PAGE_SIZE


def why_not_shared(kvc: Configurator, config: KVQuantConfig) -> str | None:
    """Returns why records and BF16 pages cannot share one memory (``cache.shared.split``) here; None if they can."""
    args = kvc.server_args
    if config.bf16_budget is not None:
        return f"--kv-quant-bf16-budget {config.bf16_budget} fixes the share of BF16 pages"
    if not compat.applies(NEW_TREE, compat.sglang_version()):
        return f"SGLang before {NEW_TREE_RELEASES[0]} admits requests by their tokens alone"
    if drafts.keeps_states(kvc.model_config):
        return "the model's recurrent states take a fixed part of the memory"
    for flag, given in (
        ("--disaggregation-mode", mode_of(args) is not None),
        ("--enable-streaming-session", getattr(args, "enable_streaming_session", False)),
        ("kvq calibrate", config.capture),
        ("--pp-size", stages.stages_of(args) > 1),
    ):
        if given:
            return f"pages cannot be moved in memory with {flag}"
    return None


def model_formats(config: KVQuantConfig, model: ModelConfig) -> tuple[RecordFormat, ...]:
    """Returns the page format of each layer in the cache."""
    rotations = None
    if get_method(config.method).rotation is RotationKind.LEARNED:  # clips and sensitivities come with the rotations
        rotations = resolve_rotations(config, model.model_path, model.hf_config)
    return resolve_formats(config, rotations, model.hf_config)


def start_cache(
    kvc: Configurator, config: KVQuantConfig, kv_heads: int, num_layers: int, draft_page_bytes: int = 0
) -> runtime.Runtime:
    """Starts this process's runtime, with the geometry of its cache.

    Args:
        kv_heads: KV heads on this worker.
        num_layers: number of this worker's layers that have full attention, as SGLang counts them.

    Raises:
        SystemExit: by the model's config the number of layers is another.
    """
    model = kvc.model_config
    formats = dict(zip(cached_layers(model.hf_config), model_formats(config, model)))
    layer_ids = tuple(i for i in formats if kvc.layer_info.start_layer <= i < kvc.layer_info.end_layer)
    if len(layer_ids) != num_layers:
        raise SystemExit(
            f"sglang-kvq: SGLang keeps {num_layers} layers of {model.model_path} in its KV cache, but according to "
            f"the model's config {len(layer_ids)} have full attention. Serve it without --kv-quant."
        )
    geometry = KVGeometry(kv_heads, tuple(formats[i] for i in layer_ids), draft_page_bytes)
    state = runtime.start(config, geometry, layer_ids)
    if mode_of(kvc.server_args) is not None:
        state.staged_windows = entries_for(requests_per_worker(kvc))
    return state


def calculate_pool_sizes(original: Original, self: Configurator, available_bytes: int, page_size: int) -> Any:
    """AROUND ``DefaultPoolConfigurator.calculate_pool_sizes``: first subtracts the bytes of BF16 pages and staging."""
    state = runtime.current()
    if state is None:
        return original(self, available_bytes, page_size)
    geometry = state.geometry
    if state.shared is not None:
        state.budget_bytes = available_bytes
        return original(self, max(available_bytes - shared_reserve(geometry, state.shared), 0), page_size)
    available_bytes -= staging_bytes(geometry, state.config.slots_per_request, state.staged_windows)
    state.budget_slots = bf16_slots(state.config, geometry, available_bytes)
    return original(self, max(available_bytes - reserved_bytes(geometry, state.budget_slots), 0), page_size)


def requests_per_worker(configurator: Configurator) -> int | None:
    """Returns each data-parallel worker's part of ``--max-running-requests``; None if the flag is not given."""
    given: int | None = configurator.server_args.max_running_requests
    workers: int = (configurator.ps if hasattr(configurator, "ps") else configurator).attn_dp_size
    return None if given is None else max(given // workers, 1)


def resolve_max_num_reqs(original: Original, self: Configurator, token_capacity: int) -> int:
    """AROUND ``KVCacheConfigurator.resolve_max_num_reqs``: limits running requests to those whose windows fit."""
    requests: int = original(self, token_capacity)
    state = runtime.current()
    if state is None or config_of(self.server_args) is None:
        return requests
    try:
        layout = _layout(self, state, token_capacity // PAGE_SIZE, requests)
    except KVQuantError as error:  # at this point only SystemExit ends the process without SGLang's traceback
        raise SystemExit(f"sglang-kvq: {error}") from None
    if state.shared is not None:
        rows = requests
        if self.server_args.max_running_requests is None:
            rows = min(rows, rows_within(state.budget_bytes, self.model_config.context_len))
        most, whole = (min(rows, n) for n in (layout.max_requests, layout.whole_windows))
        layout = replace(layout, max_requests=most, whole_windows=whole)
    state.layout = layout = stages.agree(layout, self.server_args)
    if self.server_args.max_running_requests is not None and layout.max_requests < requests:
        why = "" if layout.arena else f" and --kv-quant-bf16-budget {state.config.bf16_share} holds {layout.slots}"
        fix = "--mem-fraction-static" if layout.arena else "the budget"
        logger.warning(
            "--max-running-requests %d is lowered to %d: each running request keeps %d BF16 pages%s. Raise %s to run "
            "more at once.",
            requests,
            layout.max_requests,
            state.config.pinned_slots(compat.step_tokens(self.server_args)),
            why,
            fix,
        )
    return min(requests, layout.max_requests)


def _layout(configurator: Configurator, state: runtime.Runtime, pages: int, requests: int) -> MemoryLayout:
    """Returns the layout of a memory for ``pages`` pages. requests: SGLang's limit of running requests."""
    args, wanted = configurator.server_args, requests_per_worker(configurator)
    if state.shared is not None:
        return share(state.geometry, state.shared, pages=pages, budget_bytes=state.budget_bytes, wanted=wanted)
    return divide(
        state.config,
        state.geometry,
        pages=pages,
        slots=state.budget_slots,
        wanted=wanted,
        resumes=requests if getattr(args, "enable_streaming_session", False) else 1,
        chunk=compat.prefill_chunk(args),
        batch=compat.prefill_batch(args),
        written=compat.step_tokens(args),
    )


def limit_prompts(result: None, scheduler: Scheduler) -> None:
    """AFTER ``Scheduler.init_model_worker``: lowers the length from which on the scheduler refuses prompts.

    SGLang admits a request only if its prompt's pages and one more leave tokens of the cache free, and it lets the
    answer have only these tokens. But its own limit suits pages of one token. A longer prompt would get an empty
    answer, or wait until its client leaves, and hold up all later requests.
    """
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, scheduler.max_total_num_tokens - 2 * PAGE_SIZE)
