"""A copy of the packaged files, a wheel made of it, and environments that have nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCES = ("pyproject.toml", "README.md", "LICENSE")
#: Links in the root to folders of the package.
LINKS = ("triton_kernels", "rotation_zoo")


def run(command: list[str | Path], folder: Path) -> str:
    """Runs a command in ``folder``, where Python looks for modules first, and returns what it prints."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def empty_environment(folder: Path) -> Path:
    """Creates a virtual environment that sees only the standard library, and returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def share_packages(python: Path) -> None:
    """Lets an environment find the packages of the tests' environment, so that no index is asked for dependencies.

    Python searches a path in a .pth file, but does not run .pth files in that path. So the tests' own editable install
    of the package stays invisible.
    """
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    (site / "packages_of_the_tests.pth").write_text(sysconfig.get_paths()["purelib"])


def pip(*words: str | Path) -> None:
    """Runs this environment's pip; the message of a failure is pip's output."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the packaged files, so that builds leave nothing behind, and adds a rotation and a nested package."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "sglang_kvq", copy / "sglang_kvq", ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKS:
        shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    entry = copy / "rotation_zoo" / "probes" / "probe-1.5b"  # deeper than ``kvq zoo`` looks
    entry.mkdir(parents=True)
    (entry / "config.json").write_text("{}")
    (entry / "rotations.safetensors").write_bytes(b"x")
    (entry / "notes.tmp").write_text("not data")
    nested = copy / "triton_kernels" / "probe"
    nested.mkdir()
    (nested / "__init__.py").write_text("HERE = True\n")
    return copy


@pytest.fixture(scope="session")
def wheel_file(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel of ``tree``."""
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, tree)
    (built,) = out.glob("sglang_kvq-*.whl")
    return built


@pytest.fixture(scope="session")
def wheel(wheel_file: Path) -> Iterator[zipfile.ZipFile]:
    """Yields the opened wheel."""
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive
