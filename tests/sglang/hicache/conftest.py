"""A small cache and its host pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvq.sglang import runtime
from tests.cache.scheduler_model import PLANES, TWO_BITS, Model


@pytest.fixture(autouse=True)
def small_host(monkeypatch):
    """Lets host pools be small: SGLang would leave 10 GiB of host memory alone."""
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


@pytest.fixture(params=[TWO_BITS, PLANES], ids=["two bits", "first tokens"])
def m(request, monkeypatch) -> Model:
    made = Model(60, 8, 2, 1, 2, format=request.param)
    monkeypatch.setattr(runtime, "_current", SimpleNamespace(tiers=made.tiers))
    return made


@pytest.fixture
def controller(m):
    """Returns SGLang's cache controller, working on our host pool."""
    from tests.sglang.hicache.test_hicache import Controller

    return Controller(m)
