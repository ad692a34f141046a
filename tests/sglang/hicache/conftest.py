"""A small cache, and the host's side of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvq.sglang import runtime
from tests.cache.scheduler_model import PLANES, TWO_BITS, Model


@pytest.fixture(autouse=True)
def small_host(monkeypatch):
    """SGLang leaves 10 GiB of host memory alone."""
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.fixture(params=[TWO_BITS, PLANES], ids=["two bits", "first tokens"])
def m(request, monkeypatch) -> Model:
    made = Model(60, 8, 2, 1, 2, format=request.param)
    monkeypatch.setattr(runtime, "_current", SimpleNamespace(tiers=made.tiers))
    return made


@pytest.fixture
def controller(m):
    """SGLang's queues, over a host pool of ours."""
    from tests.sglang.hicache.test_hicache import Controller

    return Controller(m)
