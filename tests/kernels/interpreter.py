"""Makes Triton's interpreter several times as fast: it does over and over what it need do once, or never.

For each call of a device function within a kernel it replaces every function of ``triton.language``, as it has done for
the kernel. For each operation it makes a table of all types to look one up. For each sum and product of integers it
computes in 64 bits whether 32 suffice, and drops the answer unless it debugs. For each result it checks a shape, and
wraps every number of it, though few shapes differ. It takes BF16 numbers apart, which are upper halves of FP32 numbers.
Results are the same but for subnormal BF16 numbers, which it gets wrong.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Replaces these parts of the interpreter in this process."""
    interpreter._patch_lang = _once_per_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter._convert_float = _by_halves(interpreter._convert_float)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    tl.core.block_type.__init__ = _by_shape(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _of_known_shape(tl.core.tensor.__init__)
    tl.core.tuple.__eq__ = _with_numbers(tl.core.tuple.__eq__)
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _if_shapes_differ(semantic.broadcast_impl_value)


def _once_per_launch(patch: Any) -> Any:
    """Returns Triton's function that replaces those of the modules which a function sees; once until they are restored.

    The scope of a kernel restores them when its launch ends. Triton drops the scopes of device functions.
    """
    replaced: set[Any] = set()

    @cache
    def seen_by(fn: FunctionType) -> frozenset[Any]:
        return frozenset(module for module in (tl, tl.core) if any(x is module for x in fn.__globals__.values()))

    def patch_once(fn: FunctionType) -> Any:
        if seen_by(fn) and seen_by(fn) <= replaced:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        replaced.update(seen_by(fn))
        restore = scope.restore

        def restore_all() -> None:
            restore()
            replaced.clear()

        scope.restore = restore_all
        return scope

    return patch_once


def _by_name(numpy_type: Any) -> Any:
    """Returns Triton's function that gives NumPy's type of a type, which remembers the names it was asked for."""
    known: dict[str, np.dtype] = {}

    def get_np_dtype(kind: Any) -> np.dtype:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return numpy_type(kind)
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = numpy_type(scalar)
        return found

    return get_np_dtype


def _by_shape(make: Any) -> Any:
    """Returns the constructor of a block's type, which remembers what it made of an element's type and a shape."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = tuple(x.value if type(x) is tl.constexpr else x for x in shape)
        if any(type(x) is not int for x in numbers):
            make(self, element_ty, shape)
            return
        # Types of pointers are made for each launch, and have no hash.
        element = (element_ty.address_space, element_ty.const) if element_ty.is_ptr() else None
        key = (element_ty.name, element, numbers)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return init


def _of_known_shape(make: Any) -> Any:
    """Returns a tensor's constructor, which remembers the shapes that it wrapped."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in known:
            make(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return init


def _with_numbers(equal: Any) -> Any:
    """Returns the comparison of Triton's tuples, which need not unwrap a list of plain numbers."""

    def compare(self: Any, other: Any) -> Any:
        if type(other) is list and all(type(x) is int for x in other):
            return tl.constexpr(self.values == other)
        return equal(self, other)

    return compare


def _if_shapes_differ(broadcast: Any) -> Any:
    """Returns the broadcast of two tensors to one shape, which first sees whether they have one."""

    def compare(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        same = a.shape.values == b.shape.values if a.is_block() and b.is_block() else a.is_block() == b.is_block()
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    return compare


def _by_halves(convert: Any) -> Any:
    """Returns the conversion of floats, which shifts those between BF16 and FP32 that are cut off or get zeros."""

    def shift(numbers: np.ndarray, kind: Any, wanted: Any, rounding: Any) -> np.ndarray:
        if rounding is None and kind is tl.bfloat16 and wanted is tl.float32:
            return numbers.view(np.uint16).astype(np.uint32) << np.uint32(16)
        if rounding is None and kind is tl.float32 and wanted is tl.bfloat16:
            return (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return convert(numbers, kind, wanted, rounding)

    return shift
