"""Pre-commit hooks and the workflow run what ./test runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from launch import run_tests
from launch.progress import StepFailed
from launch.run_tests import BOTH, LINTERS, NIGHTLY_PACKAGES, container_job, plan
from sglang_kvq.releases import NEWEST, OLDEST
from tests import nightly
from tests.conftest import ROOT

HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())


def test_hooks_are_the_linters_of_test() -> None:
    names = {" ".join(word for word in words if not word.startswith("--")) for words in LINTERS}
    assert {hook["name"] for hook in HOOKS} == names


def test_hooks_have_the_versions_of_test() -> None:
    (ruff,) = set(re.findall(r'"(ruff[^"]*)"', (ROOT / "pyproject.toml").read_text()))
    assert {hook["id"]: hook.get("additional_dependencies") for hook in HOOKS} == {
        "ruff": [ruff],
        "ruff-format": [ruff],
        "mypy": None,
    }


def test_the_workflow_runs_test() -> None:
    commands = [step["run"] for step in WORKFLOW["jobs"]["test"]["steps"] if "run" in step]
    assert commands[-1] == "./test"


def test_every_night_everything_runs() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["all"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert "./test --all" in commands and commands[-1].endswith("python -m tests.mutations")


def test_the_container_is_tested_as_root_where_its_tools_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests.os, "geteuid", lambda: 0)
    monkeypatch.setattr(run_tests.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    install, tests = container_job(["-x"]).commands
    assert install[:2] == ("pip", "install") and tests[:3] == ("pytest", "tests/container", "-x")
    assert any(word.startswith("kubernetes-validate") for word in install)
    monkeypatch.setattr(run_tests.os, "geteuid", lambda: 1000)
    with pytest.raises(StepFailed, match="needs root"):
        container_job([])
    monkeypatch.setattr(run_tests.shutil, "which", lambda tool: None if tool == "podman" else tool)
    with pytest.raises(StepFailed, match="podman: not found. Run apt-get install podman"):
        container_job([])


def collected(words: tuple[str, ...]) -> set[Path]:
    """Returns the test files in a job's paths, without those that it ignores."""
    ignored = {ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
    paths = [ROOT / word for word in words if word.startswith("tests")]
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    return {file for file in files if ignored.isdisjoint({file, *file.parents})}


def test_every_test_is_in_one_job_of_the_newest_release() -> None:
    jobs = [job for job in plan([]) if job.version == NEWEST and job.commands[0][0] == "pytest"]
    files = [file for job in jobs for file in collected(job.commands[0])]
    assert len(files) == len(set(files)) and set(files) == set((ROOT / "tests").rglob("test_*.py"))
    (oldest,) = (job for job in plan([]) if job.version == OLDEST)
    assert collected(oldest.commands[0]) == {file for folder in BOTH for file in (ROOT / folder).rglob("test_*.py")}


@pytest.mark.parametrize("pattern", nightly.NIGHTLY)
def test_what_runs_at_night_is_shown_by_tests_of_every_day(pattern: str) -> None:
    shown = [path.rstrip(".") for path in re.findall(r"tests/[\w/.]+", nightly.NIGHTLY[pattern])]
    assert shown and [path for path in shown if not (ROOT / path).exists() or nightly.is_nightly(path)] == []
    file, _, test = (part.split(".*")[0] for part in pattern.partition("::"))
    named = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(file, str(path))]
    assert named and any(re.search(test, path.read_text()) for path in named)


def test_quick_jobs_exist_and_start_no_server() -> None:
    files = [file for job in plan([], quick=True) for words in job.commands for file in collected(words)]
    assert len(files) > 30 and len(files) == len(set(files))
    assert not any(ROOT / "tests/e2e" in file.parents for file in files)


def test_nightly_servers_have_what_moves_their_pages() -> None:
    """Nightly jobs install what moves pages in the newest release's environment, with or without test names."""
    for words in ([], ["tests/e2e/test_disaggregation.py"]):
        (servers,) = (job for job in plan(words, everything=True) if NIGHTLY_PACKAGES in job.commands)
        first, tests = servers.commands
        assert first == NIGHTLY_PACKAGES and tests[1].startswith("tests/e2e") and servers.version == NEWEST
        assert not any(NIGHTLY_PACKAGES in job.commands for job in plan(words))


def test_words_of_a_command_line() -> None:
    """Options go to every job; paths go to the jobs where they belong, and then no linter runs."""
    assert all("-x" in words for job in plan(["-x"], everything=True) for words in job.commands if "--all" in words)
    unit, oldest, newest = plan(["tests/cache", "tests/sglang/test_flags.py"])
    assert "tests/cache" in unit.commands[0] and unit.version == newest.version == NEWEST
    assert "tests/cache" not in newest.commands[0] and oldest.version == OLDEST
    assert [job.title for job in plan(["tests/cache"])] == [unit.title]
    assert [job.version for job in plan(["tests/sglang"], quick=True)] == [NEWEST]
