"""Stand-in for SGLang's compiled kernels, which need CUDA libraries to load.

On the CPU engine SGLang imports many names from here and calls them only on machines with AMX, or for features
that are off. Any name can be imported; calling one says which kernel is missing.
"""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0+standin"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: this environment has no compiled SGLang kernels")

    absent.__name__ = absent.__qualname__ = name
    return absent
