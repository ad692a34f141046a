"""A driver for Triton without a GPU: nothing is compiled or launched; launches are only recorded.

Kernels must not be interpreted, so scripts that use this run in a process of their own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

#: Launches: the compiled kernel, its function, the grid and the arguments.
noted: list[tuple[Any, ...]] = []
#: The GPU in use.
STATE = SimpleNamespace(device=0)


class Nothing(CompiledKernel):
    """A compiled kernel that only records its launches."""

    def __init__(self) -> None:
        self.module, self.function, self.packed_metadata = object(), object(), ()
        self.src, self.name, self._run = None, "kernel", self._note

    def __del__(self) -> None:
        """Does nothing, because there is nothing to unload."""

    def _note(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        function, _, _, _, _, *arguments = rest
        noted.append((self, function, (x, y, z), tuple(arguments)))


def _compile_nothing(self: JITFunction, key: str, signature: Any, device: int, *rest: Any) -> Nothing:
    """Replaces ``JITFunction._do_compile``."""
    return self.device_caches[device][0].setdefault(key, Nothing())


class _Driver:
    """A driver of two GPUs, for code that only asks which one is in use."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return STATE.device

    def get_current_stream(self, device: int) -> int:
        return 0


def install() -> None:
    driver.set_active(_Driver())
    JITFunction._do_compile = _compile_nothing
