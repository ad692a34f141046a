"""Finds faster what SGLang's registry of hooks looks for: all modules' names of a function that a hook replaces.

SGLang looks through all modules' variables again for each of 70 hooks, which takes a process about four seconds.
"""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType


class Places:
    """Does the work of ``hook_registry._propagate_patch`` with a table of all modules' functions and classes."""

    def __init__(self, usual) -> None:
        self.usual = usual
        self._places: dict[int, list[tuple[ModuleType, str]]] = {}
        self._sizes: dict[int, tuple[ModuleType, int]] = {}

    def read(self) -> None:
        """Adds modules that are new, or have got variables since they were read."""
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType):
                continue
            own = vars(module)
            if self._sizes.get(id(module)) == (module, len(own)):
                continue
            self._sizes[id(module)] = module, len(own)
            for name, value in list(own.items()):
                if _is_searched(value):
                    self._places.setdefault(id(value), []).append((module, name))

    def __call__(self, original: object, wrapped: object, source: object) -> int:
        """Replaces ``original`` in all modules but ``source``; returns how many names were replaced."""
        if not _is_searched(original):
            return self.usual(original, wrapped, source)
        self.read()
        count = 0
        for module, name in self._places.get(id(original), []):
            if module is not source and vars(module).get(name) is original:
                setattr(module, name, wrapped)
                count += 1
        return count


def _is_searched(value: object) -> bool:
    """Returns whether a value is a function or a class; does not ask the value itself, which may warn or import."""
    return issubclass(type(value), (FunctionType, type))


def install() -> None:
    """Replaces SGLang's search in this process and those forked from it."""
    from sglang.srt.plugins import hook_registry

    if not isinstance(hook_registry._propagate_patch, Places):
        hook_registry._propagate_patch = places = Places(hook_registry._propagate_patch)
        places.read()
