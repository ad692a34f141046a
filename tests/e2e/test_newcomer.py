"""README's quick start works as written, however the package was installed, in the clone and elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests import newcomer, pairs
from tests.conftest import ROOT
from tests.e2e.conftest import ON_GPU

README = (ROOT / "README.md").read_text()


#: Ways to install the package, and folders to use it from; with ``--all`` every pair.
CASES = [("installed", "clone"), ("wheel", "elsewhere")]
if pairs.everything:
    CASES = list(product(newcomer.INSTALLS, ("clone", "elsewhere")))
INSTALLS = list(dict(CASES))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], newcomer.Node]:
    """``nodes(install)`` returns a host on which a newcomer has installed the package that way; all tests share it."""

    @cache
    def made(install: str) -> newcomer.Node:
        node = newcomer.Node(tmp_path_factory.mktemp("node"), cpu=not ON_GPU).prepare()
        node.run(newcomer.INSTALLS[install], node.clone)
        return node

    return made


@pytest.fixture
def node(request: pytest.FixtureRequest, nodes: Callable[[str], newcomer.Node]) -> newcomer.Node:
    """Returns a host on which a newcomer has installed the package in the way that the test names."""
    return nodes(request.param)


def test_readme_says_how_to_install_serve_and_ask() -> None:
    commands = newcomer.quick_start(README)
    assert newcomer.INSTALLS["installed"] in (command.split("  ")[0] for command in commands)
    server = next(n for n, command in enumerate(commands) if newcomer.is_server(command))
    assert any(command.startswith("curl") and '"messages"' in command for command in commands[server:])


@pytest.mark.parametrize(("node", "place"), CASES, indirect=["node"])
def test_quick_start(node: newcomer.Node, place: str, tmp_path: Path) -> None:
    where = node.clone if place == "clone" else tmp_path
    assert newcomer.use(node, where, README)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("node", INSTALLS, indirect=True)
def test_doctor_of_the_clone_sees_what_a_server_there_sees(node: newcomer.Node) -> None:
    """``python -m`` puts the current folder on the path, as a server does; a console script does not."""
    assert "checks passed" in node.run("python -m sglang_kvq.cli doctor", node.clone)


def test_demo(tmp_path: Path) -> None:
    """Runs the first command of the quick start in a clone with the environments and the model that ``./test`` made."""
    assert newcomer.quick_start(README)[0].startswith("./demo")
    clone = tmp_path / "clone"
    newcomer.clone_to(clone)
    for name in (".venvs", ".models"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, copy_function=os.link)
    done = subprocess.run([clone / "demo"], cwd=clone, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "The same memory, two KV caches" in done.stdout and "--kv-quant oscar" in done.stdout
