"""Errors that a plan counts on the device are logged while the server is busy, and no step waits for them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache import transfer
from sglang_kvq.cache.transfer import LateCopy
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.sglang import observe, runtime
from sglang_kvq.sglang.attention.error_watch import ErrorWatch
from tests import device_waits
from tests.sglang.attention.test_padding import Worker


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def on_gpu(copy: LateCopy, asked: list[None]) -> None:
    """Makes a copy on a CPU keep the distances of a GPU's; appends to ``asked`` for each copy."""
    copy._host = torch.zeros(1, dtype=torch.int64)
    copy._copied = SimpleNamespace(record=lambda: asked.append(None), query=lambda: True)


def test_an_unmet_page_is_logged_while_requests_run(caplog):
    """The page being filled loses its BF16 copy, which must never happen; a plan counts that and later steps log it."""
    worker = Worker()
    worker.extend({1: 300, 2: 70}, pad_to=370, seed=0)
    worker.decode(pad_to=2, seed=1)
    assert not errors_of(caplog)
    worker.tiers.pool.page_slot[worker.tiers.pool.req_to_token[1, 300].long() // 64] = -1  # the page being filled
    worker.tiers._dirty = True
    worker.decode(pad_to=2, seed=2)
    counted = int(worker.tiers.errors)
    assert counted and not errors_of(caplog)
    for seed in range(3, 6):
        worker.decode(pad_to=2, seed=seed)
    (line,) = errors_of(caplog)
    assert f"{counted} so far" in line and "Restart the server" in line


def test_an_error_of_the_last_batch_is_logged_when_idle(caplog, monkeypatch):
    worker = Worker()
    state = runtime.Runtime(KVQuantConfig("int2"), None, (0,))
    state.tiers, state.watch = worker.tiers, worker.backend.watch
    state.allocator = SimpleNamespace(check_integrity=lambda: None)
    monkeypatch.setattr(runtime, "_current", state)
    worker.extend({1: 30}, pad_to=30, seed=0)
    worker.tiers.errors += 2
    observe.check_when_idle(lambda self: None, None)
    assert "2 so far" in errors_of(caplog)[0]


def test_a_gpu_is_asked_once_a_second_and_the_last_error_is_logged_when_idle(caplog, monkeypatch):
    """A copy that the last batch skips, because another began less than a second ago, is made by the idle server."""
    worker, now, asked = Worker(), [100.0], []
    state = runtime.Runtime(KVQuantConfig("int2"), None, (0,))
    state.tiers, state.watch = worker.tiers, worker.backend.watch
    state.allocator = SimpleNamespace(check_integrity=lambda: None)
    monkeypatch.setattr(runtime, "_current", state)
    monkeypatch.setattr(observe.time, "monotonic", lambda: now[0])
    on_gpu(state.watch._errors, asked)
    for seed in range(3):
        now[0] += 0.2
        worker.extend({1: 30}, pad_to=30, seed=seed)
    worker.tiers.errors += 2
    assert len(asked) == 1
    while now[0] < 102:
        now[0] += 0.2
        observe.check_when_idle(lambda self: None, None)
    (line,) = errors_of(caplog)
    assert "2 so far" in line and len(asked) == 2


def test_an_idle_server_checks_its_tables_only_once_no_request_would_wait(monkeypatch):
    """An idle server checks its tables only after a quiet time, because the check waits for the device."""
    worker, checks, now = Worker(), [], [100.0]
    state = runtime.Runtime(KVQuantConfig("int2"), None, (0,))
    state.tiers = worker.tiers
    state.allocator = SimpleNamespace(check_integrity=lambda: checks.append(worker.tiers.steps))
    monkeypatch.setattr(runtime, "_current", state)
    monkeypatch.setattr(observe.time, "monotonic", lambda: now[0])
    monkeypatch.delenv(observe.CHECKED_STEPS, raising=False)

    def idle(seconds: float) -> None:
        for _ in range(10):
            now[0] += seconds / 10
            observe.check_when_idle(lambda self: None, None)

    for seed in range(3):  # a request, then a pause shorter than QUIET
        worker.extend({1: 30}, pad_to=30, seed=seed)
        idle(observe.QUIET * 0.9)
    assert not checks
    idle(observe.QUIET)
    assert checks == [worker.tiers.steps]
    idle(10 * observe.QUIET)
    assert len(checks) == 1, "nothing ran since"
    worker.extend({2: 30}, pad_to=30, seed=7)
    monkeypatch.setenv(observe.CHECKED_STEPS, "1")
    idle(0.1)
    assert len(checks) == 2, "a server whose steps are checked is checked at once"


def test_server_info_has_the_count(monkeypatch):
    worker = Worker()
    state = runtime.Runtime(KVQuantConfig("int2"), None, (0,))
    state.tiers = worker.tiers
    monkeypatch.setattr(runtime, "_current", state)
    worker.tiers.errors += 3
    assert observe.live_state() == {"tiers": {"bf16_tokens": 0, "quantized_tokens": 0}, "errors": 3}


def test_only_what_was_asked_for_arrives():
    count = torch.tensor([1])
    copy = LateCopy(lambda: count, count.device)
    assert copy.arrived() is None
    copy.ask()
    assert copy.arrived() == [1] and copy.arrived() is None


def test_copies_from_a_gpu_keep_their_distance(monkeypatch):
    now, counted, asked = [100.0], [], []
    monkeypatch.setattr(transfer.time, "monotonic", lambda: now[0])
    count = lambda: counted.append(now[0]) or torch.tensor([len(counted)])  # noqa: E731
    copy = LateCopy(count, torch.device("cpu"), seconds=1.0)
    on_gpu(copy, asked)
    for now[0], found in ((100.0, [1]), (100.5, None), (100.9, None), (101.1, [2]), (101.2, None), (150.0, [3])):
        copy.ask()
        assert copy.arrived() == found
    assert counted == [100.0, 101.1, 150.0] and len(asked) == 3


@pytest.mark.gpu
def test_the_host_never_waits():
    tiers = SimpleNamespace(
        errors=torch.zeros((), dtype=torch.int64, device="cuda"), pool=SimpleNamespace(device=torch.device("cuda"))
    )
    watch = ErrorWatch(tiers)
    with device_waits.refused():
        for _ in range(100):
            watch.look()
            tiers.errors += 1
            watch.ask()
    torch.cuda.synchronize()
    watch.look()
    assert watch._logged
