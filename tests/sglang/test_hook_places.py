"""``tests.hook_places`` replaces the same names as SGLang's own search."""

import sys
from types import ModuleType

import pytest

from tests import hook_places


@pytest.fixture(params=["SGLang's", "ours"])
def search(request, applied):
    from sglang.srt.plugins import hook_registry

    ours = hook_registry._propagate_patch
    assert isinstance(ours, hook_places.Places), "SGLang has another name for its search, so ours is not used"
    if request.param == "ours":
        return hook_places.Places(ours.usual)
    return ours.usual


def module(monkeypatch, name: str, **variables) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(variables)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.mark.parametrize("kind", ["function", "class", "object"])
def test_names_in_all_modules_but_the_source_are_replaced(search, monkeypatch, kind):
    """A module may be imported, and may get names, between two searches."""
    original = {"function": lambda: 1, "class": type("Original", (), {}), "object": object()}[kind]
    source = module(monkeypatch, "hooked_source", f=original)
    early = module(monkeypatch, "hooked_early", g=original, other=lambda: 1)
    assert search(object(), object(), source) == search(lambda: 2, lambda: 3, source) == 0
    late = module(monkeypatch, "hooked_late", f=original)
    early.again = original
    other, wrapped = early.other, lambda: 4
    assert search(original, wrapped, source) == 3
    assert [early.g, early.again, late.f, early.other, source.f] == [wrapped, wrapped, wrapped, other, original]
    assert search(original, wrapped, source) == 0
