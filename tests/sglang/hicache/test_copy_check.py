"""The soak's check of copied pages sees a byte that changed, and nothing else; the tiers and the host pool are real."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import copy_check
from sglang_kvq.cache.pending import PendingOps
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.sglang import observe, runtime
from tests.cache.schedules import shared_model
from tests.cache.test_sink_token_cache import again, prompt
from tests.cache.test_tiers import prefill
from tests.sglang.hicache.test_hicache import Controller, evicted, loaded, pages_in_tree

ROWS = [3, 9, 2, 7, 5]


@pytest.fixture(params=["divided", "shared"])
def parts(request, m, monkeypatch):
    """A cache, its controller and the hooks of the check."""
    from sglang_kvq.sglang.hicache.host_pool import KVQuantHostPool

    methods = (
        "__init__",
        "backup_from_device_all_layer_physical",
        "load_to_device_per_layer_physical",
        "free",
        "clear",
    )
    for owner, names in (
        (KVQuantHostPool, methods),
        (PendingOps, ("free_pages",)),
        (TierManager, ("reset", "apply_pending")),
        (observe, ("live_state",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # the check replaces it until the test ends
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", ModuleType("scheduler"))
    copy_check.install()
    if request.param == "shared":
        m = shared_model(random.Random(0), rows=2, recent=2, sinks=1)
        monkeypatch.setattr(runtime, "_current", SimpleNamespace(tiers=m.tiers))
    return m, Controller(m), observe.live_state.func.__self__


def counts(hooks: copy_check.Hooks) -> tuple[int, int, int, int]:
    found = hooks.copies.counts()
    return tuple(found[name][what] for name in ("loads", "pages") for what in ("compared", "wrong"))


def written(m, controller) -> list[int]:
    """Returns a conversation that the tree holds and the host has."""
    text = prompt(1)
    m.leave(prefill(m, text), publish=True)
    controller.write((pages_in_tree(m, text), ROWS))
    return text


def test_pages_that_come_back_and_leave_are_compared(parts):
    m, controller, hooks = parts
    text = written(m, controller)
    assert counts(hooks) == (0, 0, 0, 0)
    evicted(m, text)
    m.tiers.apply_pending()
    assert counts(hooks) == (0, 0, 5, 0)
    loaded(m, controller, text, ROWS)
    m.leave(again(m, text), publish=True)
    assert counts(hooks) == (5, 0, 5, 0)
    m.tiers.reset()
    m.tiers.apply_pending()
    assert counts(hooks) == (5, 0, 10, 0) and copy_check.all_equal(hooks.copies.counts())


@pytest.mark.parametrize("damage", ["host", "device", "exchanged"])
def test_a_changed_page_is_seen(damage, parts):
    m, controller, hooks = parts
    text = written(m, controller)
    pages = m.tiers.pages_of(torch.tensor(pages_in_tree(m, text)))
    records = m.pool.records[-1]
    if damage == "host":
        controller.host.kv_buffer[ROWS[1], 5] += 1
    elif damage == "device":
        records[pages[2], 0, 3] += 1
    else:
        records[pages[:2]] = records[pages[:2].flip(0)]
    evicted(m, text)
    loaded(m, controller, text, ROWS)
    assert counts(hooks) == {"host": (5, 1, 5, 0), "device": (5, 0, 5, 1), "exchanged": (5, 0, 5, 2)}[damage]
    assert not copy_check.all_equal(hooks.copies.counts())


def test_rows_that_others_filled_have_no_checksum(parts):
    """A row that was freed may come from storage next; ``clear`` frees all."""
    m, controller, hooks = parts
    text = written(m, controller)
    evicted(m, text)
    copies = hooks.copies
    tokens = controller.host.alloc(4 * controller.page_size)
    copies.of_row[[0, 1]] = 7
    controller.host.free(tokens[: 2 * controller.page_size])
    assert not copies.of_row[[0, 1]].any() and copies.of_row[ROWS].all()
    controller.host.clear()
    loaded(m, controller, text, ROWS)
    assert counts(hooks) == (0, 0, 5, 0)


def test_other_processes_are_left_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler", raising=False)
    before = observe.live_state
    copy_check.install()
    assert observe.live_state is before
