"""Views of a running cache: the check while the server is idle, and ``kv_quant`` in ``/server_info``."""

from __future__ import annotations

import os
import time
from typing import Any

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.record import code_bits
from sglang_kvq.sglang import plugin, runtime
from sglang_kvq.sglang.types import Original, Scheduler

#: Seconds without work after which a server checks its tables.
QUIET = 5.0
CHECKED_STEPS = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"


def check_when_idle(original: Original, self: Any) -> None:
    """AROUND ``SchedulerInvariantChecker._check_tree_cache``, which an idle SGLang calls repeatedly: checks our cache.

    The check waits for the device and copies tables from it, which would delay an arriving request. So it runs only
    after ``QUIET`` seconds without work, unless SGLang checks its pools at every step (``CHECKED_STEPS``). SGLang
    reports a failure like a leak of its own: fatal, or a warning with ``SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0``.
    """
    original(self)
    state = runtime.current()
    if state is None or state.tiers is None or (state.tiers.steps == state.checked and not state.tiers.pending):
        return
    if state.watch is not None:
        state.watch.look()  # the next batch, which would do both, may come much later
        state.watch.ask()
    now = time.monotonic()
    if state.tiers.steps != state.last_step:
        state.last_step, state.idle_since = state.tiers.steps, now
    if now - state.idle_since < QUIET and os.environ.get(CHECKED_STEPS, "0") in ("", "0"):
        return
    state.checked = state.tiers.steps
    try:
        state.allocator.check_integrity()
    except RuntimeError as error:
        self._report_leak("kv-quant", str(error))


def add_internal_state(original: Original, self: Scheduler, recv_req: Any) -> Any:
    """AROUND ``Scheduler.get_internal_state``: adds ``kv_quant`` to ``internal_states`` of ``GET /server_info``."""
    output = original(self, recv_req)
    state = runtime.current()
    if state is not None:
        output.internal_state["kv_quant"] = {**fixed_state(state), **live_state()}
    return output


def add_init_info(result: dict[str, Any], scheduler: Scheduler) -> dict[str, Any]:
    """AFTER ``Scheduler.get_init_info``: adds ``kv_quant`` to the top level of ``/server_info``.

    It holds only facts that never change, because SGLang asks once, at start.
    """
    return {**result, "kv_quant": fixed_state(runtime.started())}


def fixed_state(state: runtime.Runtime) -> dict[str, Any]:
    """Returns method, sizes and bits of this worker, in plain types."""
    layout, config = state.layout, state.config
    return {
        **state.status,
        "sink_tokens": config.sink_tokens,
        "recent_tokens": config.recent_tokens,
        "prefill_window": config.prefill_window,
        "tokens": layout.tokens,
        "bf16_tokens_same_memory": layout.bf16_tokens,
        "bits_per_element": round(layout.bits_per_element, 3),
        "record_bits_per_element": round(layout.geometry.record_bits_per_element, 3),
        "layer_bits": [(code_bits(f.k), code_bits(f.v)) for f in state.pages.formats],
        "memory_bytes": layout.total_bytes,
        "token_bytes": layout.geometry.page_bytes / PAGE_SIZE,
        "bf16_token_bytes": layout.geometry.slot_bytes / PAGE_SIZE,
        "bf16_pages": layout.slots if layout.arena is None else None,
        "shared_memory": layout.arena is not None,
        "max_running_requests": layout.max_requests,
        "requests_with_whole_windows": layout.whole_windows,
        "hooks": plugin.hook_counts(),
        **({} if state.host is None else {"host_tokens": state.host.size, "host_page_bytes": state.host.page_bytes}),
    }


def live_state() -> dict[str, Any]:
    """Returns the tokens that each tier holds now and the errors counted since the start. Waits for the device."""
    counts = runtime.live_tiers().counts()
    held = {
        "bf16_tokens": counts.slots_used * PAGE_SIZE,
        "quantized_tokens": counts.pages_quantized * PAGE_SIZE,
    }
    state = runtime.started()
    host = state.host
    split = {} if state.split is None else {"room": {"pages": state.split.pages, "bf16_pages": state.split.slots}}
    damaged = {} if host is None else {"damaged_pages": host.damaged_pages}
    return {"tiers": held, "errors": counts.errors, **split, **damaged}
