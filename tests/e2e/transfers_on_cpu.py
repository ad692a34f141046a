"""An SGLang plugin for tests: Mooncake and NIXL on a CPU, and a server that retracts as if memory had run out.

SGLang's shortcut for page ids pins memory and needs CUDA's events, and SGLang tells NIXL that the cache is on a GPU.
SGLang reads its switch for retraction when it is imported, and tests fork servers from a process that has imported it.
"""

import functools
import importlib.util
import os
import sys


def install() -> None:
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.disaggregation.mooncake import conn
    from sglang.srt.managers import scheduler

    conn.MooncakeKVSender.supports_host_tensor_indices = False
    if importlib.util.find_spec("nixl"):
        _nixl_in_host_memory()
    if steps := os.environ.get("KVQ_TEST_RETRACT"):
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, int(steps)


def _nixl_in_host_memory() -> None:
    from nixl._api import nixl_agent

    for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, _in_host_memory(getattr(nixl_agent, name)))


def _in_host_memory(method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        args = ["DRAM" if isinstance(x, str) and x == "VRAM" else x for x in args]
        return method(*args, **{k: "DRAM" if isinstance(x, str) and x == "VRAM" else x for k, x in kwargs.items()})

    return call
