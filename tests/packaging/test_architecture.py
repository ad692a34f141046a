"""docs/architecture.md names existing code: every file and function of its walks, and every package."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text()
FOLDERS = (ROOT, ROOT / "sglang_kvq", ROOT / "sglang_kvq" / "kernels")
#: Number of stops of the longest walk.
STOPS = 8


def find(name: str, beside: Path | None = None) -> Path | None:
    """Returns the file or folder that a name in the text means; ``beside``: the one named before it."""
    places = [folder / name for folder in (*([beside.parent] if beside else []), *FOLDERS)]
    return next((place for place in places if place.exists()), None)


@cache
def defined(path: Path) -> set[str]:
    """Returns the names of a file's functions and methods; methods also as ``Class.method``."""
    tree = ast.parse(path.read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    members = [(c.name, m) for c in classes for m in c.body]
    names |= {f"{c}.{m.name}" for c, m in members if isinstance(m, ast.FunctionDef)}
    return names | {f"{c}.{m.target.id}" for c, m in members if isinstance(m, ast.AnnAssign)}


def stops() -> list[tuple[str, str]]:
    """Returns (what, where) for each row of each walk."""
    walks = TEXT.split("## A key's way")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in walks.splitlines() if re.match(r"\| \d", line)]
    return [(cells[1].strip(), cells[2].strip()) for cells in rows]


@pytest.mark.parametrize("stop", range(len(stops())))
def test_each_stop_of_a_walk_exists(stop):
    where = stops()[stop][1]
    file, found = None, 0
    for name in re.findall(r"`([^`]+)`", where):
        if name.endswith(".py") or "/" in name:
            file = find(name, file)
            assert file is not None, f"{where}: there is no {name}"
            found += 1
        else:
            files = [file] if file else [*(ROOT / "sglang_kvq").rglob("*.py")]
            assert any(name in defined(path) for path in files), f"{where}: no {name} there"
            found += 1
    assert found, f"{where!r} names no file"


def test_walks_are_short():
    for walk in TEXT.split("## A key's way")[1].split("\n## ")[0].split("###")[1:]:
        numbers = [int(n) for n in re.findall(r"^\| (\d)", walk, re.M)]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) <= STOPS


def test_every_package_is_on_the_map():
    table = TEXT.split("## Packages")[1].split("\n## ")[0]
    named = {name.strip("/") for name in re.findall(r"`([\w/]+/)`", table)}
    packages = {p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "sglang_kvq").rglob("__init__.py")}
    tops = {name.split("/")[0] for name in named} | {"sglang_kvq"}
    leaves = {name for name in packages if not any(other.startswith(f"{name}/") for other in packages)}
    missing = {leaf for leaf in leaves if not any(leaf == name or leaf.startswith(f"{name}/") for name in named)}
    modules = {path.name for path in (ROOT / "sglang_kvq").glob("*.py")} - {"__init__.py"}
    missing |= modules - set(re.findall(r"`(?:sglang_kvq/)?(\w+\.py)`", table))
    assert not missing, f"docs/architecture.md's map lacks {missing}"
    assert {"launch", "benchmarks", "tests"} <= tops
    assert all(find(name) for name in named)
