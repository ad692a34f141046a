"""The wheel in an environment that has nothing else, as on a node without this repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sglang_kvq
from sglang_kvq.rotations.storage.zoo import shipped
from tests.conftest import ROOT
from tests.packaging.conftest import empty_environment, pip, run, share_packages

#: A program that lists the installed data files and kernels that code or tools look for.
FILES = """
import json
from importlib.resources import files
package = files("sglang_kvq")
zoo = files("sglang_kvq.rotation_zoo")
folders = [path for path in files("sglang_kvq.kernels").iterdir() if path.is_dir() and path.name != "probe"]
kernels = [path.name for folder in folders for path in folder.iterdir() if path.name.endswith(".py")]
print(json.dumps({
    "typed": (package / "py.typed").is_file(),
    "kernels": sorted(kernels),
    "rotations": sorted(entry.name for entry in zoo.iterdir() if (entry / "rotations.safetensors").is_file()),
}))
"""


@pytest.fixture(scope="module")
def python(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment with the wheel alone, without its dependencies."""
    found = empty_environment(tmp_path_factory.mktemp("empty"))
    pip("--python", found, "install", "--quiet", "--no-deps", "--no-index", wheel_file)
    return found


@pytest.fixture(scope="module")
def complete(python: Path) -> Path:
    """Returns the same Python after adding the dependencies from the tests' environment, so that no index is asked."""
    share_packages(python)
    return python


def test_files_that_are_no_modules(python: Path, tmp_path: Path) -> None:
    found = json.loads(run([python, "-c", FILES], tmp_path))
    assert found["typed"]
    assert found["kernels"] == sorted(path.name for path in (ROOT / "sglang_kvq" / "kernels").rglob("*.py"))
    assert found["rotations"] == [folder.name for folder, _ in shipped()] != []


def test_the_package_is_imported_from_there_and_needs_nothing(python: Path, tmp_path: Path) -> None:
    code = "import sglang_kvq, sglang_kvq.releases; print(sglang_kvq.__file__, sglang_kvq.__version__)"
    path, version = run([python, "-c", code], tmp_path).split()
    assert Path(path).is_relative_to(python.parent.parent)
    assert version == sglang_kvq.__version__


def test_kernels_and_the_plugin_are_imported(complete: Path, tmp_path: Path) -> None:
    modules = (
        "sglang_kvq.kernels.decode.decode_attention",
        "sglang_kvq.sglang.plugin",
        "sglang_kvq.attention.triton_ops",
    )
    code = f"import sys, {', '.join(modules)}; print(*(sys.modules[name].__file__ for name in {modules}))"
    for path in run([complete, "-c", code], tmp_path).split():
        assert Path(path).is_relative_to(complete.parent.parent)


def test_the_command_works(complete: Path, tmp_path: Path) -> None:
    kvq = complete.with_name("kvq")
    shown = run([kvq, "--help"], tmp_path)
    for command in ("calibrate", "convert", "doctor", "eval", "inspect", "push", "zoo"):
        assert command in shown
    listed = run([kvq, "zoo"], tmp_path)
    for _, config in shipped():
        assert config["base_model"] in listed
