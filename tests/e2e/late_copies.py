"""An SGLang plugin for tests on a CPU: HiCache's copies happen late, and memory that nobody may read is poisoned.

On a CPU SGLang's copies happen when they are submitted, so nothing goes wrong without the waits that a GPU needs. Here
each copy joins its stream. It happens after the copies before it, and as late as it may:

    when something waits for an event after it: a layer for its part of a load, SGLang for the end of a copy
    when SGLang polls such an event; the first few polls, a random number, find that the event is still to come
    when pages are about to move in a shared memory (``TierManager.wait_for_copies``)

Freed pages, freed rows of host memory and pages that are about to be loaded are filled with NaN. ``/server_info``
counts late copies of pages to the host, late loads of a page's layer, and moves that had to wait (``live_state``).
With the variable ``KVQ_TEST_LATE_FAULT``, ``layers`` or ``moves`` do not wait. The plugin is not for servers that copy
chosen pages of a history, because on a CPU these copies do not wait for loads.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any

import torch

from sglang_kvq.constants import PAGE_SIZE

POISON = 0xFF
#: The most polls that find an event still to come.
POLLS = 12


class Stream:
    """Copies that were submitted and have not happened, with the events between them."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None] | Event] = []

    def synchronize(self, last: Event | None = None) -> None:
        """Lets all copies happen, or only those before an event."""
        while self.steps and (last is None or last in self.steps):
            step = self.steps.pop(0)
            if not isinstance(step, Event):
                step()

    def wait_stream(self, other: Any) -> None:
        """Does nothing: what a copy must wait for has happened."""

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    """An event. SGLang polls those with timing, and expects of others that they have happened."""

    def __init__(self, device: Device, enable_timing: bool = False) -> None:
        self._device, self._stream = device, device.layers
        self._polls = device.numbers.randint(0, POLLS) if enable_timing else 0

    def record(self) -> None:
        self._stream = self._device.current
        if self._stream is not self._device.layers:
            self._stream.steps.append(self)

    def query(self) -> bool:
        self._polls -= 1
        if self._polls < 0:
            self.synchronize()
        return self not in self._stream.steps

    def synchronize(self, *_: Any) -> None:
        self._stream.synchronize(self)

    wait = synchronize

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Device:
    """Stands for a module like ``torch.cuda`` where HiCache copies."""

    def __init__(self) -> None:
        self.numbers, self.late = random.Random(0), Counter(written=0, loaded=0, moves=0)
        self.layers = self.current = Stream()
        self.Stream, self.Event = Stream, partial(Event, self)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        try:
            yield
        finally:
            self.current = self.layers

    def wait_for_copies(self, controller: Any) -> None:
        engine = controller.l2_transfer_engine
        streams = (engine.device_to_host_stream, engine.host_to_device_stream)
        self.late["moves"] += any(stream.steps for stream in streams)
        for stream in streams:
            stream.synchronize()


class LatePool:
    """A host pool as it is when copies are submitted; they join the current stream."""

    def __init__(self, pool: Any, device: Device) -> None:
        self._pool, self._device, self._stream = copy.copy(pool), device, device.current
        pool.gathered = None  # first tokens of this backup only

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._pool, name)
        return partial(self._submit, name, found) if name.endswith("_physical") else found

    def _submit(self, name: str, function: Callable, *args: Any, **draft: Any) -> None:
        def happen() -> None:
            function(*args, **draft)
            self._device.late["written" if "backup" in name else "loaded"] += len(args[1])

        self._stream.steps.append(happen)


def _poison(tiers: Any, pages: torch.Tensor) -> None:
    slots = tiers.pool.page_slot[pages].clamp(min=0).long()
    tiers.pool.bf16_pages[:, slots[slots > 0]] = float("nan")
    for records in tiers.pool.records:
        records[pages[pages > 0]] = POISON


def _free_pages(tiers: Any, original: Callable, ids: torch.Tensor) -> None:
    _poison(tiers, tiers.pages_of(ids))
    original(tiers, ids)


def _before_load(tiers: Any, original: Callable, ids: torch.Tensor) -> None:
    original(tiers, ids)
    _poison(tiers, tiers.pages_of(ids))


def _free_rows(pool: Any, original: Callable, indices: torch.Tensor) -> int:
    pool.kv_buffer[indices[::PAGE_SIZE].cpu() // PAGE_SIZE] = POISON
    return int(original(pool, indices))


def install() -> None:
    """Replaces streams and events where HiCache copies, in a scheduler's process."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer

    from sglang_kvq.cache.tiers import TierManager
    from sglang_kvq.sglang import observe
    from sglang_kvq.sglang.hicache import transfers
    from sglang_kvq.sglang.hicache.host_pool import KVQuantHostPool

    device, state, fault = Device(), observe.live_state, os.environ.get("KVQ_TEST_LATE_FAULT")

    def prepare(engine: Any, original: Callable, copies: list) -> list:
        return [one._replace(host_pool=LatePool(one.host_pool, device)) for one in original(engine, copies)]

    cache_controller.device_module = l2_transfer.device_module = device
    observe.live_state = lambda: {**state(), "late": dict(device.late)}
    for owner, name, hook in (
        (l2_transfer.L2TransferEngine, "_prepare_transfers", prepare),
        (TierManager, "_apply_free", _free_pages),
        (TierManager, "before_load", _before_load),
        (KVQuantHostPool, "free", _free_rows),
    ):
        setattr(owner, name, partialmethod(hook, getattr(owner, name)))
    if fault != "moves":
        transfers._wait_for_copies = device.wait_for_copies
    if fault == "layers":
        Stream.wait_event = Stream.wait_stream
