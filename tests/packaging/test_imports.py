"""Both kinds of install give the same import names; neither hides the ``triton_kernels`` of SGLang's kernels wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.packaging.test_wheel import pip, tree  # noqa: F401  (a fixture)

PROBE = """
import importlib.util, json
from importlib.resources import files
import sglang_kvq, sglang_kvq.kernels.probe, sglang_kvq.rotation_zoo
spec = importlib.util.find_spec("triton_kernels")
zoo = files("sglang_kvq.rotation_zoo") / "probe-1.5b"
print(json.dumps({
    "package": sglang_kvq.__file__,
    "kernels": sglang_kvq.kernels.probe.HERE,
    "rotation": (zoo / "rotations.safetensors").is_file(),
    "triton_kernels": spec and spec.origin,
}))
"""


@pytest.fixture(scope="module", params=[(), ("-e",)], ids=["installed", "editable"])
def installed(
    request: pytest.FixtureRequest, tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bool]:
    """A fresh environment that has the package and sees the other packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    # A path in a .pth file is searched, but .pth files in it are not run: this environment's own editable install
    # of the package stays out of sight.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages_of_the_tests.pth").write_text(sysconfig.get_paths()["purelib"])
    pip("--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation", *request.param, tree)
    return python, bool(request.param)


def probe(python: Path, folder: Path, code: str = PROBE) -> str:
    done = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names(installed: tuple[Path, bool], tree: Path, tmp_path: Path) -> None:  # noqa: F811
    python, editable = installed
    found = json.loads(probe(python, tmp_path))
    assert found["kernels"] and found["rotation"]
    assert (Path(found["package"]).parent.parent == tree) is editable
    # None, or that of SGLang's kernels wheel where the tests run beside one.
    assert not (found["triton_kernels"] or "").startswith((str(tree), str(python.parent.parent)))


def test_from_the_repository_sglangs_own_kernels_are_found(tmp_path: Path) -> None:
    """In the root of a clone our folder comes first on sys.path; SGLang must still reach its module."""
    theirs = tmp_path / "triton_kernels"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    (theirs / "matmul.py").touch()
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import triton_kernels.matmul as m; print(m.__file__)"
    assert Path(probe(Path(sys.executable), ROOT, code).strip()) == theirs / "matmul.py"
