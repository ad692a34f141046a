"""Looking at a running cache: the idle check, and ``kv_quant`` in ``/server_info``."""

from __future__ import annotations

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.sglang import plugin, runtime

_checked = -1


def check_when_idle(original, self):
    """AROUND ``SchedulerInvariantChecker._check_tree_cache``: SGLang calls it when nothing runs.

    A failure is reported as SGLang's own leak checks are: fatal under
    ``SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE``, a warning otherwise.
    """
    global _checked
    original(self)
    state = runtime.current()
    if state is None or state.tiers is None or (state.tiers.steps == _checked and not state.tiers.pending):
        return
    _checked = state.tiers.steps
    try:
        state.allocator.check_integrity()
    except RuntimeError as error:
        self._report_leak("kv-quant", str(error))


def add_internal_state(original, self, recv_req):
    """AROUND ``Scheduler.get_internal_state``: what ``GET /server_info`` lists under ``internal_states``."""
    output = original(self, recv_req)
    if runtime.current() is not None:
        output.internal_state["kv_quant"] = snapshot(runtime.current())
    return output


def snapshot(state: runtime.Runtime) -> dict:
    """What is served, sizes, bits and tokens per tier of this worker, in plain types."""
    layout, config, counts = state.layout, state.config, state.tiers.counts()
    return {
        **state.status,
        "sink_tokens": config.sink_tokens,
        "recent_tokens": config.recent_tokens,
        "tokens": layout.tokens,
        "bf16_tokens_same_memory": layout.bf16_tokens,
        "bits_per_element": round(layout.bits_per_element, 3),
        "record_bits_per_element": round(layout.geometry.record_bits_per_element, 3),
        "layer_bits": [(f.k.bits, f.v.bits) for f in state.pages.formats],
        "memory_bytes": layout.total_bytes,
        "bf16_pages": layout.slots,
        "max_running_requests": layout.max_requests,
        "hooks": plugin.hook_counts(),
        "tiers": {
            "bf16_tokens": counts.slots_used * PAGE_SIZE,
            "quantized_tokens": counts.pages_quantized * PAGE_SIZE,
        },
    }
