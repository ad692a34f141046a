"""Parts of the package import only earlier parts. ``tests/packaging/test_layers.py`` finds circular imports."""

import subprocess
import sys

import pytest

from tests.packaging.test_layers import graph

ORDER = ("maths", "storage", "calibration", "inspection")


@pytest.mark.parametrize("part", ORDER)
def test_imports_go_one_way(part):
    later = tuple(f"sglang_kvq.rotations.{name}" for name in ORDER[ORDER.index(part) + 1 :])
    own = {module: used for module, used in graph().items() if module.startswith(f"sglang_kvq.rotations.{part}.")}
    assert sum(map(len, own.values())) > 5
    for module, used in own.items():
        wrong = [one for one in used if later and one.startswith(later)]
        assert not wrong, f"{module} imports {wrong}"


def test_rotations_and_the_reference_import_neither_triton_nor_sglang():
    names = [
        f"sglang_kvq.{name}" for name in ("rotations.calibration.run", "rotations.inspection", "attention.reference")
    ]
    code = f"import sys, {', '.join(names)}; print({{'triton', 'sglang'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
