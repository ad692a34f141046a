"""Parts of the package use what comes before them only."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sglang_kvq.rotations

ORDER = ("maths", "storage", "calibration", "inspection")
FOLDER = Path(sglang_kvq.rotations.__file__).parent


def imported(path: Path) -> Iterator[str]:
    """Yields what a file imports with ``from``, also inside functions: ``module`` and ``module.name``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("part", ORDER)
def test_imports_go_one_way(part):
    later = {f"sglang_kvq.rotations.{name}" for name in ORDER[ORDER.index(part) + 1 :]}
    for path in (FOLDER / part).glob("*.py"):
        wrong = [module for module in imported(path) if any(module.startswith(name) for name in later)]
        assert not wrong, f"{path.name} imports {wrong}"


def test_no_files_import_each_other():
    root = FOLDER.parent.parent
    files = {".".join(path.relative_to(root).with_suffix("").parts): path for path in FOLDER.rglob("*.py")}
    graph = {name: {other for other in imported(path) if other in files} for name, path in files.items()}
    assert sum(map(len, graph.values())) > 50
    TopologicalSorter(graph).prepare()  # raises CycleError
