"""Launches that find their compiled kernel without Triton's search.

Triton binds, classifies and hashes all arguments of every launch. That takes the host longer than the launch itself. A
prefill's layers wait for it, and so do decode steps without CUDA graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from sglang_kvq.kernels.device.common import INTERPRETED

#: True if Triton itself does every launch.
searches = INTERPRETED
#: The kernels of launches while these only compile (``compile_together``); None at other times.
_compiling: ContextVar[list[Any] | None] = ContextVar("compiling", default=None)
#: Most kernels that are compiled at the same time.
_MOST_THREADS = 16
#: Alignment in bytes that Triton compiles for.
_ALIGNMENT = 16
#: Integers that Triton passes as int32.
_INT32 = range(-(2**31), 2**31)
#: For each kernel: indices of the arguments that Triton does not specialize; by kinds, compiled kernels, their
#: constants, and whether an argument is ``Fixed``.
_known: dict[Any, tuple[tuple[int, ...], dict[Any, tuple[Any, tuple[Any, ...], bool]]]] = {}


class Constants(dict[str, Any]):
    """A kernel's constants and Triton's options, for callers that launch with the same ones again and again.

    Do not change it. Two of them are equal only if they are one object.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class Fixed:
    """A tuple of many arguments that never changes, so that its kinds are found once and not in every launch.

    Attributes:
        fields: the tuple, which kernels get.
        kinds: kinds of the fields; they keep no tensor alive.
    """

    def __init__(self, fields: tuple[Any, ...]) -> None:
        kinds: list[Any] = []
        _add_kinds(kinds, [fields])
        self.fields, self.kinds = fields, tuple(kinds)


def start_kernel(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, constants: Constants | None = None, **named: Any
) -> None:
    """Launches a kernel like ``kernel[grid](*arguments, **constants)``, usually without Triton's search.

    Triton itself does the first launch for arguments of the same kinds, and every launch of a kernel with hooks. Later
    launches use the kernel that Triton compiled.

    Args:
        grid: numbers of programs, in one to three dimensions.
        arguments: all parameters of the kernel that are not constants; ``Fixed`` in place of its tuple.
        constants: the kernel's constants, and Triton's options; None for those in ``named``.
    """
    key: Any = constants
    if constants is None:
        constants, key = named, tuple(named.items())  # type: ignore[assignment]
    if (compiling := _compiling.get()) is not None:
        compiling.append(kernel.warmup(*_fields(arguments), grid=grid, **constants))
        return
    if searches or kernel.pre_run_hooks:
        kernel[grid](*_fields(arguments), **constants)
        return
    known = _known.get(kernel.fn)
    if known is None:
        known = _known[kernel.fn] = tuple(p.num for p in kernel.params if p.do_not_specialize), {}
    unspecialized, compiled = known
    kinds: list[Any] = [driver.active.get_current_device(), key]
    _add_kinds(kinds, _without_numbers(arguments, unspecialized))
    found = compiled.get(kind := tuple(kinds))
    if found is None:
        names = kernel.arg_names[len(arguments) :]
        function, has_fixed = kernel[grid](*_fields(arguments), **constants), any(type(x) is Fixed for x in arguments)
        compiled[kind] = _ready(function), tuple(constants[name] for name in names), has_fixed
        return
    function, values, has_fixed = found
    function[(*grid, 1, 1)[:3]](*(_fields(arguments) if has_fixed else arguments), *values)


def compile_together(launch: Callable[[], None]) -> list[Any]:
    """Compiles and loads the kernels that ``launch`` starts with ``start_kernel``, several at once; runs none of them.

    Threads suffice, because Triton's compiler seldom holds Python's lock. Triton would load a kernel at its first
    launch, when a busy server may have no memory left for it.

    Returns:
        each launch's compiled kernel, in order; none if Triton itself does every launch.
    """
    if searches:
        return []
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    kernels: list[Any] = []
    with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor):
        before = _compiling.set(kernels)
        try:
            launch()
        finally:
            _compiling.reset(before)
    compiled = [_ready(kernel) for kernel in kernels]
    for kernel in compiled:
        _ = kernel.run  # loads it
    return compiled


def _ready(kernel: Any) -> Any:
    """Returns the compiled kernel for what Triton returns, which is a future if two launches share one compilation."""
    return kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel


def _fields(arguments: Sequence[Any]) -> list[Any]:
    """Returns the arguments with tuples in place of ``Fixed``."""
    return [x.fields if type(x) is Fixed else x for x in arguments]


def _without_numbers(arguments: tuple[Any, ...], unspecialized: tuple[int, ...]) -> Sequence[Any]:
    """Returns the arguments with ``int`` in place of integers that Triton does not compile for, by their indices."""
    if not unspecialized:
        return arguments
    others = list(arguments)
    for index in unspecialized:
        if type(others[index]) is int and others[index] in _INT32:
            others[index] = int
    return others


def _add_kinds(kinds: list[Any], arguments: Sequence[Any]) -> None:
    """Appends the kind of each argument: never coarser than Triton's own specialization, and finer for integers."""
    for x in arguments:
        kind = type(x)
        if kind is torch.Tensor:
            kinds.append(x.dtype)
            kinds.append(x.data_ptr() % _ALIGNMENT == 0)
        elif isinstance(x, tuple):
            kinds.append(kind)
            kinds.append(len(x))
            _add_kinds(kinds, x)
        elif kind is Fixed:
            kinds.append(x.kinds)
        else:
            kinds.append(kind if kind is float or kind is bool else x)
