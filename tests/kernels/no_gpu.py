"""A driver for Triton without a GPU: nothing is compiled or launched; launches are only recorded.

Kernels must not be interpreted, so scripts that use this run in a process of their own (``output_of``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from sglang_kvq.kernels.device import launch

#: Launches: the compiled kernel, its function, the grid and the arguments.
noted: list[tuple[Any, ...]] = []
#: Names of the kernels that Triton would have compiled, in order.
compiled: list[str] = []
#: Names of the kernels that were compiled and then loaded, in order.
loaded: list[str] = []
#: Compiled kernels.
_kernels: set[JITFunction] = set()
#: The GPU in use, and the bytes of shared memory that every kernel takes.
STATE = SimpleNamespace(device=0, shared=0)


class Nothing(CompiledKernel):
    """A compiled kernel that only records its launches."""

    def __init__(self, name: str) -> None:
        self.module, self.function, self.packed_metadata = object(), object(), ()
        self.src, self.name, self._run = None, name, self._note
        self.metadata = SimpleNamespace(shared=STATE.shared)

    def __del__(self) -> None:
        """Does nothing, because there is nothing to unload."""

    def _note(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        function, _, _, _, _, *arguments = rest
        noted.append((self, function, (x, y, z), tuple(arguments)))


def _compile_nothing(self: JITFunction, key: str, signature: Any, device: int, *rest: Any) -> Nothing:
    """Replaces ``JITFunction._do_compile``."""
    compiled.append(self.fn.__name__)
    _kernels.add(self)
    return self.device_caches[device][0].setdefault(key, Nothing(self.fn.__name__))


def forget() -> None:
    """Forgets everything that was compiled, as in a new process."""
    compiled.clear()
    launch._known.clear()
    for kernel in _kernels:
        kernel.device_caches.clear()


class _Driver:
    """A driver of two GPUs, which has no use for the kernels that it loads."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        load_binary=lambda name, *rest: (loaded.append(name), name, 0, 0, 1024),
        unload_module=lambda module: None,
    )

    def launcher_cls(self, source: Any, metadata: Any) -> object:
        return object()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return STATE.device

    def get_current_stream(self, device: int) -> int:
        return 0


def install(compiles: bool = False) -> None:
    """Installs the driver; ``compiles`` lets Triton compile for an H100, but then nothing can be launched."""
    driver.set_active(_Driver())
    if not compiles:
        JITFunction._do_compile = _compile_nothing


def output_of(module: str, *words: str, timeout: float = 300) -> str:
    """Runs a script in a separate process, where kernels are not interpreted; returns what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command, root = [sys.executable, "-m", module, *words], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout
