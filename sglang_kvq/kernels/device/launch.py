"""Launches that find their compiled kernel without Triton's search.

Triton binds, classifies and hashes all arguments of every launch. That takes the host longer than the launch itself. A
prefill's layers wait for it, and so do decode steps without CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.driver import driver

from sglang_kvq.kernels.device.common import INTERPRETED

#: True if Triton itself does every launch.
searches = INTERPRETED
#: Alignment in bytes that Triton compiles for.
_ALIGNMENT = 16
#: Integers that Triton passes as int32.
_INT32 = range(-(2**31), 2**31)
#: For each kernel: flags of the arguments that Triton specializes; compiled kernels and their constants, by kinds.
_known: dict[Any, tuple[tuple[bool, ...], dict[Any, tuple[Any, tuple[Any, ...]]]]] = {}


def start_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launches a kernel like ``kernel[grid](*arguments, **constants)``, usually without Triton's search.

    Triton itself does the first launch for arguments of the same kinds, and every launch of a kernel with hooks. Later
    launches use the kernel that Triton compiled.

    Args:
        grid: numbers of programs, in one to three dimensions.
        arguments: all parameters of the kernel that are not constants.
        constants: the kernel's constants, and Triton's options.
    """
    if searches or kernel.pre_run_hooks:
        kernel[grid](*arguments, **constants)
        return
    known = _known.get(kernel.fn)
    if known is None:
        flags = tuple(not parameter.do_not_specialize for parameter in kernel.params)
        known = _known[kernel.fn] = flags, {}
    specialized, compiled = known
    kinds = (driver.active.get_current_device(), *map(_kind, arguments, specialized), *constants.items())
    found = compiled.get(kinds)
    if found is None:
        names = kernel.arg_names[len(arguments) :]
        compiled[kinds] = kernel[grid](*arguments, **constants), tuple(constants[name] for name in names)
        return
    function, values = found
    function[(*grid, 1, 1)[:3]](*arguments, *values)


def _kind(x: Any, specialized: bool = True) -> Any:
    """Returns the kind of an argument: never coarser than Triton's own specialization, and finer for integers."""
    kind = type(x)
    if kind is torch.Tensor:
        return (x.dtype,) if x.data_ptr() % _ALIGNMENT else x.dtype
    if kind is int:
        return kind if not specialized and x in _INT32 else x
    if isinstance(x, tuple):
        return kind, *[_kind(y) for y in x]
    return kind if kind is float or kind is bool else x
