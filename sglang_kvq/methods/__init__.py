"""The registry behind ``--kv-quant``: one short file per method."""

from __future__ import annotations

from importlib import import_module

from sglang_kvq.errors import KVQuantError
from sglang_kvq.methods.base import Method, RotationKind, Width

__all__ = ["METHOD_NAMES", "Method", "RotationKind", "Width", "get_method"]

#: Every value of ``--kv-quant`` except ``none``. Each is a module of this package that holds ``METHOD``; underscores
#: replace dashes in the module's name.
METHOD_NAMES = ("oscar", "oscar-lloyd-max", "transform", "turboquant", "kivi", "hadamard", "int2", "int4")


def get_method(name: str) -> Method:
    """Returns the method with this name.

    Raises:
        KVQuantError: there is no such method.
    """
    if name not in METHOD_NAMES:
        raise KVQuantError(f"--kv-quant {name}: unknown method. Choose one of none, {', '.join(METHOD_NAMES)}.")
    method: Method = import_module(f"sglang_kvq.methods.{name.replace('-', '_')}").METHOD
    return method
