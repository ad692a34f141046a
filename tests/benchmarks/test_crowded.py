"""The memory of a soak: with ``benchmarks.crowded`` its boundary moves, and without it never does."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks import crowded, soak
from sglang_kvq.cache.layout import KVGeometry, share, window_slots
from sglang_kvq.cache.pending import PendingOps
from sglang_kvq.cache.shared.split import Split
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang import observe, runtime
from sglang_kvq.sglang.memory import capacity
from tests.cache.scheduler_model import TWO_BITS

SCALES = {"GPU": soak.GPU, "CPU": soak.CPU}


def boundaries(scale, make=share) -> set[int]:
    """Returns the places of the boundary for all numbers of pages and requests that such a server may have."""
    windows = window_slots(KVQuantConfig("int4", recent_min=KVQuantConfig.recent_tokens), scale.chunk)
    pages, geometry = scale.pool // PAGE_SIZE, KVGeometry(2, (TWO_BITS,) * 4)
    split = Split(make(geometry, windows, pages=pages, budget_bytes=1 << 40, wanted=scale.requests).arena, windows)
    found = {split.first_slot}
    for requests in range(scale.requests + 1):
        for used in range(pages - split.excess(pages, requests) + 1):
            split.fit(used, requests)
            found.add(split.first_slot)
    return found


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_the_boundary_moves_only_in_a_crowded_memory(scale):
    assert len(boundaries(scale)) == 1
    assert len(boundaries(scale, partial(crowded.share, share))) > 1


def test_moves_are_counted_in_a_shared_memory(monkeypatch):
    for owner, name in ((PendingOps, "move_boundary"), (capacity, "share"), (observe, "live_state")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # the plugin replaces it until the test ends
    monkeypatch.setattr(observe, "live_state", lambda: {"errors": 0})
    state = SimpleNamespace(shared=object())
    monkeypatch.setattr(runtime, "started", lambda: state)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", ModuleType("scheduler"))
    crowded.install()
    pending = PendingOps()
    for slot in (5, 7):
        pending.move_boundary(slot)
    assert pending and observe.live_state() == {"errors": 0, "boundary_moves": 2}
    state.shared = None
    assert observe.live_state() == {"errors": 0}


def test_other_processes_are_left_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler", raising=False)
    before = PendingOps.move_boundary
    crowded.install()
    assert PendingOps.move_boundary is before
