"""Hooks on SGLang's prefill/decode disaggregation; ``handover`` has the code that they call."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.disaggregation.drafts import layout_of
from sglang_kvq.sglang.disaggregation.handover import Handover, current, started
from sglang_kvq.sglang.disaggregation.layout import layout_name
from sglang_kvq.sglang.runtime import logger
from sglang_kvq.sglang.types import Original, Scheduler

#: Ends the error of a decode server that meets a prefill server with another layout.
_FIX = "Give both servers the same model, --kv-quant flags, rotations, draft model and --tp."


# -- starting ---------------------------------------------------------------------------------------


def around_slots(original: Original, self: Any, size: int) -> None:
    """AROUND ``ReqToMetadataIdxAllocator.__init__``, which SGLang calls first for transfers: builds our part of them.

    On a prefill server a request's metadata slot is also its staging entry, so there are at most as many slots as
    entries.
    """
    from sglang.srt.runtime_context import get_disagg

    state = runtime.started()
    state.handover = handover = Handover(
        state.pages,
        decode=get_disagg().disaggregation_mode == "decode",
        sink_pages=state.config.sink_pages,
        recent_pages=state.config.recent_pages,
        entries=state.staged_windows,
    )
    logger.info(
        "kv-quant transfers: at most %d windows on their way, %.1f MiB",
        handover.staging.entries,
        handover.staging.table.nbytes / 2**20,
    )
    original(self, size if handover.decode else min(size, handover.staging.entries))


def after_state(
    result: None, kv_args: Any, token_to_kv_pool: Any, draft_token_to_kv_pool: Any = None, *args: Any, **kwargs: Any
) -> None:
    """AFTER ``setup_state_kv_args``: registers the windows, which are sent once per request, and names the layout.

    The layout's name replaces the name of the cache's dtype. SGLang compares this name between two servers, also if one
    of them runs without ``--kv-quant``.
    """
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.utils import append_state_component
    from sglang.srt.runtime_context import get_parallel

    # The only kind of state whose places SGLang asks of the pool (``KVQuantPool.request_state_transfer_indices``).
    append_state_component(kv_args, StateType.DSV4_REQUEST_STATE, *started().staging.buffers())
    handover, draft = started(), None
    if draft_token_to_kv_pool is not None:
        draft = layout_of(draft_token_to_kv_pool, kv_args)
        handover.drafts = draft_token_to_kv_pool
    kv_args.kv_cache_dtype_str = layout_name(runtime.started(), get_parallel().attn_tp_size, draft)
    logger.info("kv-quant transfers as %s", kv_args.kv_cache_dtype_str)


# -- prefill ----------------------------------------------------------------------------------------


def around_forward(original: Original, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``TpModelWorker.forward_batch_generation``: prepares a prefill's pages and window for the transfer.

    The work runs on the stream of the layers. SGLang sends pages only after it has the batch's result, so the work is
    done by then.
    """
    handover = current()
    if handover is None or handover.decode or batch is None or not batch.forward_mode.is_extend():
        return original(self, batch, *args, **kwargs)
    rows = []
    for req in batch.reqs:
        length = len(req.origin_input_ids)
        tokens = min(req.extend_end, length)
        rows.append(handover.computing(req.kv.req_pool_idx, tokens, _entry(req) if tokens == length else None))
    result = original(self, batch, *args, **kwargs)
    for row in rows:
        handover.computed(row, runtime.live_tiers())
    return result


def _entry(req: Any) -> int:
    if req.metadata_buffer_index < 0:
        raise RuntimeError("kv-quant: SGLang prefills a request that it cannot send yet. Please report this.")
    return int(req.metadata_buffer_index)


# -- decode -----------------------------------------------------------------------------------------


def around_available(original: Original, self: Any) -> int:
    """AROUND ``ReqToMetadataIdxAllocator.available_size``: a decode server counts free staging entries, too.

    So it requests a transfer only if the request's window has room.
    """
    handover = started()
    free: int = original(self)
    if not handover.decode:
        return free
    handover.settle(runtime.live_tiers())
    return min(free, handover.staging.available())


def after_prebuilt(batch: Any, self: Scheduler, running_batch: Any) -> None:
    """AFTER ``Scheduler._get_new_prebuilt_batch``: records the requests that now begin to run.

    Their cache has arrived, or was restored after a retraction.
    """
    if batch is None:
        return
    handover, tiers = started(), runtime.live_tiers()
    if tiers.pool.device.type == "cuda" and self.enable_overlap:
        handover.layers = self.forward_stream
    for req, tokens in zip(batch.reqs, batch.seq_lens_cpu.tolist()):
        handover.arrive(req.kv.req_pool_idx, tokens, req.kv.cache_protected_len, tiers)


def around_free(original: Original, self: Any, req: Any) -> None:
    """AROUND ``DecodeReqToTokenPool.free``: frees a returned row's window, and its staging entry if it never ran."""
    row = req.kv.req_pool_idx
    original(self, req)
    started().free_row(row)
    runtime.live_tiers().pending.free_rows([row])


def around_parallel_info(original: Original, self: Any, bootstrap_addr: str) -> bool:
    """AROUND ``CommonKVManager.try_ensure_parallel_info``, which compares two servers: refuses a server that differs.

    SGLang raises in the scheduler's loop if the servers differ. So one request with a wrong address would end this
    server. The hook refuses the address instead.
    """
    refused = started().refused
    try:
        known: bool = original(self, bootstrap_addr)
    except RuntimeError as error:
        text = f"The prefill server at {bootstrap_addr} keeps its cache in another way. {error} {_FIX}"
        if refused.get(bootstrap_addr) != text:
            logger.error("kv-quant: %s", text)
        refused[bootstrap_addr] = text
        return False
    if known:
        refused.pop(bootstrap_addr, None)
    return known


def around_prefill_info(original: Original, self: Any, addr_to_reqs: Any) -> Any:
    """AROUND ``DecodePreallocQueue._ensure_prefill_info``: gives up the transfers from a refused address.

    The poll that follows ends their requests on all workers, because another worker may not know of the refusal yet.
    """
    ready, remaining = original(self, addr_to_reqs)
    waiting = []
    for waits in remaining:
        if (reason := _refusal(waits.req)) is None:
            waiting.append(waits)
        elif waits.kv_receiver is not None:
            waits.kv_receiver.abort()
            self.kv_manager.record_failure(waits.req.bootstrap_room, reason)
    return ready, waiting


def after_handshakes(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``DecodePreallocQueue._update_handshake_waiters``: a request to a refused address ends with status 400."""
    from sglang.srt.disaggregation.utils import prepare_abort
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for waits in self.queue:
        reason = _refusal(waits.req)
        if reason is not None and isinstance(waits.req.finished_reason, FINISH_ABORT):
            prepare_abort(waits.req, reason, status_code=HTTPStatus.BAD_REQUEST)


def _refusal(req: Any) -> str | None:
    """Returns why the address of a request's prefill server is refused; None if it is not."""
    from sglang.srt.disaggregation.decode import _bootstrap_addr

    return started().refused.get(_bootstrap_addr(req))
