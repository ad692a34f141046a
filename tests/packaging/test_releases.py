"""One module lists the served SGLang releases; all other mentions of a release agree with it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sglang_kvq import releases
from sglang_kvq.releases import EXCLUDED, NEWEST, OLDEST, RELEASES
from tests.conftest import ROOT

NUMBER = re.compile(r"\b0\.5\.(?:1[0-9]|[2-9][0-9])\b")
#: Files in which a person or a program reads which release to take.
TEXTS = ("README.md", "CONTRIBUTING.md", "Dockerfile", "demo", "test", "pyproject.toml")
FOLDERS = ("docs", "launch", "sglang_kvq", "tests", "benchmarks", ".ci", ".github")
#: Files with numbers that are examples of releases that are not served.
EXAMPLES = ("tests/sglang/test_hooks.py", "tests/sglang/doctor/test_doctor.py", "tests/packaging/test_releases.py")


def texts() -> Iterator[tuple[str, str]]:
    """Yields name and content of each file that people edit; results keep the releases of their time."""
    paths = [ROOT / name for name in TEXTS]
    for folder in FOLDERS:
        paths += (
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in ("", ".py", ".md", ".sh", ".yaml", ".yml", ".txt")
        )
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and "__pycache__" not in name and name != "docs/results/accuracy.md":
            yield name, path.read_text(errors="replace")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_number_written_anywhere_is_of_a_known_release() -> None:
    """A release that was added, dropped or mistyped is found wherever it is mentioned."""
    wrong = {
        f"{name}: {number}"
        for name, text in texts()
        if name not in EXAMPLES
        for number in NUMBER.findall(text)
        if number not in (*RELEASES, *EXCLUDED)
    }
    assert not wrong


def test_the_package_names_no_release_but_in_two_modules() -> None:
    """Only ``releases`` may say which releases are served, and only ``hooks`` in which release something changed."""
    allowed = ("sglang_kvq/releases.py", "sglang_kvq/sglang/hooks.py")
    wrong = {
        name for name, text in texts() if name.startswith("sglang_kvq/") and name not in allowed and NUMBER.search(text)
    }
    assert not wrong, "say releases.OLD_TREE or another of its words instead"


def test_scripts_ask_for_the_release() -> None:
    for name in ("demo", "test", "launch/cpu_env.py", "launch/run_tests.py", ".ci/run"):
        assert not NUMBER.search(read(name)), f"{name}: take it from sglang_kvq.releases"


def test_releases_are_in_order_and_the_specifiers_say_the_same() -> None:
    known = sorted((*RELEASES, *EXCLUDED), key=Version)
    assert [int(release.rpartition(".")[2]) for release in known] == list(range(16, 16 + len(known))), "a gap"
    for release in known:
        matching = [s for s in releases.SUPPORTED if SpecifierSet(s).contains(release)]
        assert len(matching) == (release in RELEASES), release


def test_requirement_of_the_extra() -> None:
    extra = re.search(r'^sglang = \["(.*)"\]$', read("pyproject.toml"), re.MULTILINE)
    assert extra and extra[1] == releases.requirement()
    allowed = SpecifierSet(extra[1].removeprefix("sglang"))
    assert [release for release in (*RELEASES, *EXCLUDED) if allowed.contains(release)] == list(RELEASES)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("README.md", f"SGLang {releases.described()}"),
        ("README.md", f"SGLang releases {EXCLUDED[0]} to {EXCLUDED[-1]}"),
        ("Dockerfile", f"ARG BASE=docker.io/lmsysorg/sglang:v{NEWEST}\n"),
        ("docs/deploying.md", f"`--build-arg BASE=lmsysorg/sglang:v{OLDEST}`"),
        ("tests/sglang/memory/pool_users_reviewed.py", f"SGLang {releases.described('and')}"),
    ],
)
def test_text_that_cannot_ask(name: str, wanted: str) -> None:
    assert wanted in read(name)


def test_the_demo_takes_the_newest() -> None:
    """The demo's first lines are run as the shell would, by a Python that has nothing installed."""
    (line,) = (line for line in read("demo").splitlines() if line.startswith("sglang="))
    done = subprocess.run(
        ["bash", "-c", f'python3() {{ {Path(sys.executable)} -S "$@"; }}; {line}; echo $sglang'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == NEWEST, done.stderr


def test_workflows_take_the_releases_from_the_tests() -> None:
    """CI calls ``./test``, which runs the oldest and the newest release."""
    for path in (ROOT / ".github").rglob("*.y*ml"):
        assert not NUMBER.search(path.read_text()), f"{path.name}: ./test chooses the releases"
