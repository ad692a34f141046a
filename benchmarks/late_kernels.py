"""Kernels that a server loads or compiles while it serves: requests wait for them, and memory may be too short.

SGLang 0.5.23 logs a kernel that takes a second to compile, and with ``ENV`` every kernel that it loads.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

#: SGLang logs kernels that it loads while less memory than this is free, in GiB.
ENV = {"SGLANG_TRITON_LOAD_WARNING_THRESHOLD_GB": "1000000"}
_KERNELS = Path(__file__).resolve().parent.parent / "sglang_kvq" / "kernels"
_LOGGED = re.compile(r"Triton kernel '(\w+)' (?:took [\d.]+ s to compile|device-loaded) after serving started")
#: SGLang's kernels that the plugin loads before it serves (``KVQuantAllocator.load_kernels``).
_LOADED = frozenset({"alloc_extend_kernel", "alloc_decode_kernel"})
_JITTED = re.compile(r"^@triton\.jit\b.*?^def (\w+)", re.M | re.S)


def late_kernels(log: str) -> list[str]:
    """Returns the names of the kernels in a server's log, in order, each once."""
    return list(dict.fromkeys(_LOGGED.findall(log)))


def own_late_kernels(log: str) -> list[str]:
    """Returns those that the plugin should have loaded before it served: all of its own, and some of SGLang's."""
    return [name for name in late_kernels(log) if name in _own() | _LOADED]


@cache
def _own() -> set[str]:
    return {name for file in _KERNELS.rglob("*.py") for name in _JITTED.findall(file.read_text())}
