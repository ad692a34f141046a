"""A plugin for servers of these tests: HiCache leaves 10 GiB of host memory alone, which a small machine has not."""

from __future__ import annotations


def install() -> None:
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
