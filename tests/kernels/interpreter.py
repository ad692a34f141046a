"""Makes Triton's interpreter several times faster by caching or skipping repeated work.

The interpreter repeats work in these places. Each launch looks for the functions of ``triton.language`` that it
patches, and each call of a device function within a kernel patches them again. Each operation builds a table of all
types to look one up, and asks a dozen questions about the types of its operands, most of which are of one type. Each
integer sum or product is also computed in 64 bits to detect overflow, although only debug mode uses the answer. Each
result has its shape checked and every number of the shape wrapped, though few shapes differ. BF16 numbers are converted
bit field by bit field, although they are the upper halves of FP32 numbers. Each conversion chooses among ways that are
one here. Equal types are made and compared again and again, and plain values are searched for constants. Results stay
the same except for subnormal BF16 numbers, which become wrong.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

#: Code of the wrapper that Triton puts around each of its builtins.
_BUILTIN = tl.core.program_id.__code__
#: Elements with which Triton computes if both operands have them.
_KEPT = {kind.name for kind in (tl.int1, tl.uint8, tl.int8, tl.int32, tl.int64, tl.uint32, tl.float32, tl.float64)}
#: Integers that the interpreter converts in one way.
_INTEGERS = tuple(kind.name for kind in (tl.int8, tl.uint8, tl.int16, tl.int32, tl.uint32, tl.int64))
#: Most constants that are kept for later operations.
_CONSTANTS = 4096


def speed_up() -> None:
    """Replaces the slow parts of the interpreter in this process."""
    interpreter._patch_lang = _once_per_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter._convert_float = _by_halves(interpreter._convert_float)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    tl.core.block_type.__init__ = _by_shape(tl.core.block_type.__init__)
    tl.core.block_type.to_ir = lambda self, builder: self  # the builder would make an equal type
    tl.core.dtype.__eq__ = _same_at_once(tl.core.dtype.__eq__)
    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = _plain_at_once(tl.core._unwrap_if_constexpr)
    interpreter.TensorHandle.__post_init__ = _if_too_wide(interpreter.TensorHandle.__post_init__)
    tl.core.tensor.__init__ = _of_known_shape(tl.core.tensor.__init__)
    tl.core.tuple.__eq__ = _with_numbers(tl.core.tuple.__eq__)
    tl.core.block_type.with_element_ty = _by_names(tl.core.block_type.with_element_ty)
    semantic = interpreter.TritonSemantic
    semantic.broadcast_impl_value = _if_shapes_differ(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _if_types_differ(semantic.binary_op_type_checking_impl)
    semantic.cast = _if_elements_differ(semantic.cast)
    builder.create_splat = _filled(builder.create_splat)


def _once_per_launch(patch: Any) -> Any:
    """Wraps Triton's function that patches a function's modules, so that it runs once until they are restored.

    The scope of a kernel restores the modules when its launch ends. Triton drops the scopes of device functions.
    """
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    replacements: list[tuple[Any, str, Any]] = []
    originals: list[tuple[Any, str, Any]] = []
    is_patched = False

    def restore() -> None:
        nonlocal is_patched
        scope = interpreter._LangPatchScope()
        scope._changes = [*originals]
        scope.restore()
        is_patched = False

    def patch_once(fn: Any) -> Any:
        nonlocal is_patched
        if is_patched:
            return interpreter._LangPatchScope()
        if not originals:
            changes = patch(both)._changes
            known = {(owner, name): original for owner, name, original in reversed(changes)}
            originals.extend((*place, original) for place, original in known.items())
            replacements.extend((*place, _direct(getattr(*place))) for place in known)
        for owner, name, replacement in replacements:
            setattr(owner, name, replacement)
        is_patched = True
        return SimpleNamespace(restore=restore)

    return patch_once


def _direct(patched: Any) -> Any:
    """Returns a builtin's replacement that calls the function within the builtin at once; others as they are."""
    builtin = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
    if getattr(builtin, "__code__", None) is not _BUILTIN:
        return patched
    function, semantic = builtin.__wrapped__, interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _by_name(numpy_type: Any) -> Any:
    """Returns Triton's function that maps a type to NumPy's, with a cache keyed by the type's name."""
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
    """Returns the constructor of a block type, with a cache keyed by element type and shape."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    pointer = tl.pointer_type

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        # Pointer types are created for each launch and have no hash.
        element = (element_ty.address_space, element_ty.const) if type(element_ty) is pointer else None
        key = (element_ty.name, element, *shape)
        found = known.get(key)
        if found is None:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    return init


def _same_at_once(equal: Any) -> Any:
    """Returns the comparison of types, with a fast path for a type and itself."""
    return lambda self, other: self is other or equal(self, other)


def _plain_at_once(unwrap: Any) -> Any:
    """Returns the function that unwraps constants, with a fast path for values that are or contain none."""
    plain = {tl.tensor, tl.core.dtype, tl.core.block_type, interpreter.TensorHandle, int, float, bool, str, type(None)}
    constant = tl.constexpr

    def unwrap_at_once(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constant else unwrap(value)

    return unwrap_at_once


def _if_too_wide(check: Any) -> Any:
    """Returns the check of a new block's element size, with a fast path for elements that are not too wide."""

    scalar, pointer = tl.core.dtype, tl.pointer_type

    def compare(self: Any) -> None:
        kind = self.dtype
        if type(kind) is scalar and self.data.itemsize * 8 <= kind.primitive_bitwidth:
            return
        if type(kind) is not pointer:  # of which the check asks nothing
            check(self)

    return compare


def _of_known_shape(make: Any) -> Any:
    """Returns a tensor's constructor, with a cache of wrapped shapes."""
    known: dict[str, tuple[Any, Any]] = {}
    block = tl.block_type

    def init(self: Any, handle: Any, type: Any) -> None:
        key = type.name if type.__class__ is block else ""
        if key not in known:
            make(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return init


def _by_names(with_element: Any) -> Any:
    """Returns the function that changes a block type's elements, with a cache keyed by both types' names."""
    known: dict[tuple[str, str], Any] = {}

    def with_element_ty(self: Any, element: Any) -> Any:
        if element.is_ptr():
            return with_element(self, element)
        key = self.name, element.name
        if key not in known:
            known[key] = with_element(self, element)
        return known[key]

    return with_element_ty


def _with_numbers(equal: Any) -> Any:
    """Returns the comparison of Triton's tuples, with a fast path for a list of plain numbers."""

    def compare(self: Any, other: Any) -> Any:
        if type(other) is list and all(type(x) is int for x in other):
            return tl.constexpr(self.values == other)
        return equal(self, other)

    return compare


def _if_shapes_differ(broadcast: Any) -> Any:
    """Returns the function that broadcasts two tensors to one shape, with a fast path for equal shapes."""

    def compare(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        same = a.shape.values == b.shape.values if a.is_block() and b.is_block() else a.is_block() == b.is_block()
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    return compare


def _if_types_differ(check: Any) -> Any:
    """Returns the function that brings two operands to one type, with fast paths.

    Tensors of one type stay as they are, and so do pointers and their offsets; only shapes may differ. A number
    becomes the same constant each time it meets the same type.
    """
    known: dict[tuple[Any, ...], Any] = {}

    def compare(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        if type(rhs) is tl.tensor and type(lhs) is tl.tensor:
            left, right = lhs.dtype.name, rhs.dtype.name
            if (left == right and left in _KEPT) or (lhs.dtype.is_ptr() and flags[:1] == (True,) and right in _KEPT):
                return self.broadcast_impl_value(lhs, rhs)
        elif (type(rhs) is int or (type(rhs) is float and rhs)) and type(lhs) is tl.tensor:  # -0.0 equals 0.0
            key = lhs.type.name, type(rhs), rhs, flags, *named.items()
            if key in known:
                return lhs, known[key]
            left, right = check(self, lhs, rhs, *flags, **named)
            if left is lhs:
                if len(known) == _CONSTANTS:
                    known.clear()
                known[key] = right
            return left, right
        return check(self, lhs, rhs, *flags, **named)

    return compare


def _if_elements_differ(cast: Any) -> Any:
    """Returns the conversion of tensors, with fast paths: for the wanted type, and for pairs converted in one way.

    Triton asks a dozen questions to choose among ways that are all ``cast_impl`` in the interpreter.
    """
    floats = ("fp16", "fp32", "fp64")
    pairs = {("bf16", "fp32"), ("fp32", "bf16"), *product(floats, repeat=2)}
    pairs |= {*product(("int1", *_INTEGERS), (*_INTEGERS, "fp32")), *product(("fp32",), _INTEGERS)}

    def compare(self: Any, tensor: Any, wanted: Any, rounding: Any = None) -> Any:
        if tensor.dtype is wanted:
            return tensor
        if rounding is not None or (tensor.dtype.name, wanted.name) not in pairs:
            return cast(self, tensor, wanted, rounding)
        kind = tensor.type.with_element_ty(wanted)
        return self.tensor(self.builder.cast_impl(tensor.handle, kind), kind)

    return compare


def _filled(splat: Any) -> Any:
    """Returns the function that fills a block with a number, without NumPy's slower ``full``."""

    def create_splat(kind: Any, number: Any) -> Any:
        if isinstance(number.dtype, tl.block_type):
            return splat(kind, number)
        block = np.empty(kind.shape.values, number.data.dtype)
        block[...] = number.data
        return interpreter.TensorHandle(block, number.dtype.scalar)

    return create_splat


def _by_halves(convert: Any) -> Any:
    """Returns the conversion of floats, which turns BF16 into FP32 and truncates FP32 to BF16 by shifts."""

    def shift(numbers: np.ndarray, kind: Any, wanted: Any, rounding: Any) -> np.ndarray:
        if rounding is None and kind is tl.bfloat16 and wanted is tl.float32:
            return numbers.view(np.uint16).astype(np.uint32) << np.uint32(16)
        if rounding is None and kind is tl.float32 and wanted is tl.bfloat16:
            return (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return convert(numbers, kind, wanted, rounding)

    return shift
