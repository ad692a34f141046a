"""Prepares the tiers before pages are copied between device and host, on the stream that runs the layers.

SGLang queues transfers and submits them at two places of the scheduler's loop. These hooks run just before. SGLang then
lets the copy stream wait for the layers' stream. So the layers' stream runs first the batch in flight, then the work
here, then the next plan. The copies start after the work here:

* Events that the scheduler has recorded are applied. A load may write to a freed page, and an earlier event may still
  have to copy that page.
* A page that exists only in BF16 gets its record before a backup. It keeps its BF16 copy.
* A page that is to be loaded counts as quantized from now on. Attention waits for each layer's part of the copy.

Pages of a shared memory move when its boundary moves. A move waits for all copies submitted before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.cache.transfer import to_device
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.hicache.host_pool import KVQuantHostPool, pages_of
from sglang_kvq.sglang.types import CacheController


def before_start_writing(controller: CacheController) -> None:
    """BEFORE ``HiCacheController.start_writing``, which copies queued pages to the host: prepares their records."""
    if (host := host_pool_of(controller)) is None:
        return
    queue = _with_pages(controller.write_queue)
    host.places = torch.empty(0, dtype=torch.int64)
    if not queue:
        return
    tiers = runtime.live_tiers()
    tiers.wait_for_copies = partial(_wait_for_copies, controller)
    with _layers_stream(controller, queue):
        tiers.before_backup(torch.cat([pages_of(operation.device_indices) for operation in queue]))
        if host.page.token_bytes:
            # In a node of the tree only the first page may begin a sequence.
            tokens = host.page.gather_tokens(tiers, _first_pages(tiers, queue))
            host.gathered = [_first_row(operation) for operation in queue], tokens
            if tokens.is_cuda:
                tokens.record_stream(controller.l2_transfer_engine.device_to_host_stream)
    host.places = torch.cat([pages_of(operation.host_indices) for operation in queue])
    host.page.clear_flags(host.kv_buffer, host.places)
    if tiers.pool.device.type == "cuda":  # not all releases make the copy stream wait for the layers' stream
        copies = controller.l2_transfer_engine.device_to_host_stream
        copies.wait_stream(_stream_of_layers(controller))


def before_start_loading(controller: CacheController) -> None:
    """BEFORE ``HiCacheController.start_loading``, which copies queued pages to the device: prepares these pages."""
    if (host := host_pool_of(controller)) is None or not (queue := _with_pages(controller.load_queue)):
        return
    tiers = runtime.live_tiers()
    tiers.wait_for_copies = partial(_wait_for_copies, controller)
    with _layers_stream(controller, queue):
        tiers.before_load(torch.cat([pages_of(operation.device_indices) for operation in queue]))
        begins = [o for o in queue if host.page.token_bytes and host.page.has_token(host.kv_buffer, _first_row(o))]
        if begins:
            _keep_first_tokens(tiers, host, begins)


def wait_for_loads(controller: CacheController) -> bool:
    """Makes later work on the layers' stream wait for the loads under way.

    The tree gives a page its place on the device when the page's load is queued. Call this before copying pages of the
    tree, which may not have arrived yet.

    Returns:
        False if a load is queued and has not begun: call again in the scheduler's next round.
    """
    if host_pool_of(controller) is None:
        return True
    if controller.load_queue:
        return False
    if runtime.live_tiers().pool.device.type == "cuda":
        for load in controller.ack_load_queue:
            _stream_of_layers(controller).wait_event(load.finish_event)
    return True


def _keep_first_tokens(tiers: TierManager, host: KVQuantHostPool, begins: list[Any]) -> None:
    """Keeps the first tokens of loaded pages that begin a sequence, so that the next plan can restore their BF16 pages.

    That plan reads the records of these pages before any layer waits for the load. So the records are copied here;
    SGLang's own copy later writes the same bytes.
    """
    device = tiers.pool.device
    rows = [_first_row(operation) for operation in begins]
    pages = _first_pages(tiers, begins)
    tokens = [host.page.token_of(host.kv_buffer, row).to(device, non_blocking=True) for row in rows]
    tiers.keep_first_tokens(pages, torch.stack(tokens, 1))
    (places,) = to_device([np.array(rows)], device)
    for layer in range(tiers.pool.layers):
        host.page.layout.load_layer(tiers.pool, layer, host.kv_buffer, places, pages)


def host_pool_of(controller: CacheController) -> KVQuantHostPool | None:
    """Returns the controller's host pool of quantized pages; None if it copies other pages."""
    anchor = getattr(controller.mem_pool_host, "anchor_entry", None)
    pool = getattr(anchor, "host_pool", controller.mem_pool_host)
    return pool if isinstance(pool, KVQuantHostPool) else None


def _with_pages(queue: list[Any]) -> list[Any]:
    """Returns the operations that copy pages of our pool; the others copy only sliding windows."""
    return [operation for operation in queue if len(operation.device_indices)]


def _first_row(operation: Any) -> int:
    """Returns the row in host memory of an operation's first page."""
    return int(pages_of(operation.host_indices[:1]))


def _first_pages(tiers: TierManager, operations: list[Any]) -> torch.Tensor:
    """Returns the first page of each operation on the device, int64 ``[n]``, after all events were applied."""
    return tiers.pages_of(torch.cat([pages_of(operation.device_indices[:1]) for operation in operations]))


def _wait_for_copies(controller: CacheController) -> None:
    """Makes the current stream wait for all copies submitted so far, because pages are about to move in memory."""
    if runtime.live_tiers().pool.device.type == "cuda":
        engine = controller.l2_transfer_engine
        for copies in (engine.device_to_host_stream, engine.host_to_device_stream):
            torch.cuda.current_stream().wait_stream(copies)


def _stream_of_layers(controller: CacheController) -> Any:
    """Returns the stream on which plans and layers run: a separate one only with overlap scheduling."""
    from sglang.srt.runtime_context import get_schedule

    own = controller.load_fence_stream
    return torch.cuda.current_stream() if own is None or get_schedule().disable_overlap_schedule else own


@contextmanager
def _layers_stream(controller: CacheController, queue: list[Any]) -> Iterator[None]:
    """Runs the body on the layers' stream, after the scheduler's stream, which produced the indices in ``queue``."""
    if runtime.live_tiers().pool.device.type != "cuda":
        yield
        return
    stream = _stream_of_layers(controller)
    for operation in queue:
        operation.device_indices.record_stream(stream)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
