"""Parts of the package import only earlier parts. ``tests/packaging/test_layers.py`` finds circular imports."""

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
