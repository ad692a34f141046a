"""Parts of the package use what comes before them only."""

import ast
from pathlib import Path

import pytest

import sglang_kvq.rotations

ORDER = ("maths", "storage", "calibration", "inspection")
FOLDER = Path(sglang_kvq.rotations.__file__).parent


@pytest.mark.parametrize("part", ORDER)
def test_imports_go_one_way(part):
    later = {f"sglang_kvq.rotations.{name}" for name in ORDER[ORDER.index(part) + 1 :]}
    for path in (FOLDER / part).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not any(node.module.startswith(name) for name in later), f"{path.name} imports {node.module}"
