"""Both kinds of install give the same import names, and neither hides ``triton_kernels`` of SGLang's kernels wheel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.packaging.conftest import empty_environment, pip, run, share_packages

PROBE = """
import importlib.util, json
from importlib.resources import files
import sglang_kvq, sglang_kvq.kernels.decode.decode_attention, sglang_kvq.kernels.probe, sglang_kvq.rotation_zoo
spec = importlib.util.find_spec("triton_kernels")
zoo = files("sglang_kvq.rotation_zoo") / "probes" / "probe-1.5b"
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
    """Returns a fresh environment that has the package and sees the other packages of this environment."""
    python = empty_environment(tmp_path_factory.mktemp("environment"))
    share_packages(python)
    pip("--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation", *request.param, tree)
    return python, bool(request.param)


def test_names(installed: tuple[Path, bool], tree: Path, tmp_path: Path) -> None:
    python, editable = installed
    found = json.loads(run([python, "-c", PROBE], tmp_path))
    assert found["kernels"] and found["rotation"]
    assert (Path(found["package"]).parent.parent == tree) is editable
    # None, or a path in SGLang's kernels wheel if the tests' environment has one.
    assert not (found["triton_kernels"] or "").startswith((str(tree), str(python.parent.parent)))


def test_from_the_repository_sglangs_own_kernels_are_found(tmp_path: Path) -> None:
    """In a clone's root our folder comes first on sys.path, and SGLang must still reach its own module."""
    theirs = tmp_path / "triton_kernels"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    (theirs / "matmul.py").touch()
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import triton_kernels.matmul as m; print(m.__file__)"
    assert Path(run([sys.executable, "-c", code], ROOT).strip()) == theirs / "matmul.py"


def third_party(code: str, folder: Path) -> set[str]:
    """Returns the top-level modules, other than Python's and ours, of a process that ran the code."""
    show = "import sys; print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    return set(run([sys.executable, "-c", f"{code}\n{show}"], folder).split()) - {"sglang_kvq"}


def test_the_plugin_loads_torch_and_no_more(tmp_path: Path) -> None:
    """SGLang imports the plugin in every process, even for ``sglang serve --help``."""
    least = third_party("import torch, packaging.specifiers, packaging.version", tmp_path)
    assert third_party("import sglang_kvq.sglang.plugin", tmp_path) == least
    assert third_party("import sglang_kvq, sglang_kvq.releases", tmp_path) == third_party("", tmp_path)
