"""The structure of the package: layers, no import cycles, one package that imports SGLang, small folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: Layers from the lowest up. A package imports only packages before it, at the top of a file or within a function.
LAYERS = (
    ("constants", "errors", "releases", "cpus", "phases", "interruption", "rotation_zoo"),
    ("arguments", "server_process"),
    ("formats",),
    ("methods", "kernels"),
    ("sessions", "evaluation"),
    ("config",),
    ("cache",),
    ("attention",),
    ("rotations",),
    ("sglang",),
    ("planning",),
    ("cli",),
)
FLOOR = {name: floor for floor, names in enumerate(LAYERS) for name in names}
#: Largest number of files in a folder, without its __init__.py.
FILES = 12
#: Folders that would be worse if they were split, and their number of files.
LARGER: dict[str, int] = {
    "sglang_kvq/rotations/calibration": 13,
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted((ROOT / "sglang_kvq").rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """Yields the dotted names that a file imports anywhere; ``from a import b`` gives a.b if that is our module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


@cache
def graph() -> dict[str, set[str]]:
    return {name: {one for one in imported(path) if one in MODULES} - {name} for name, path in MODULES.items()}


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_no_circles():
    list(TopologicalSorter(graph()).static_order())  # raises CycleError, which lists the cycle


@pytest.mark.parametrize("name", sorted({package(module) for module in MODULES} - {""}))
def test_imports_go_down(name):
    assert name in FLOOR, f"sglang_kvq/{name} stands on no floor: add it to LAYERS"
    for module in (one for one in MODULES if package(one) == name):
        above = {package(one) for one in graph()[module] if package(one) not in ("", name)}
        above = {one for one in above if FLOOR[one] >= FLOOR[name]}
        assert not above, f"{module} imports {sorted(above)}, which stand no lower"


def test_only_one_package_imports_sglang():
    found = {name for name, path in MODULES.items() if any(one.split(".")[0] == "sglang" for one in imported(path))}
    assert found and {package(name) for name in found} == {"sglang"}, found


def test_folders_are_small():
    counts = dict.fromkeys({path.parent for path in MODULES.values()}, 0)
    for path in MODULES.values():
        counts[path.parent] += path.name != "__init__.py"
    over = {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > FILES}
    assert over == LARGER
