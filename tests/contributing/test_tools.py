"""Hooks and the workflow run what ./test runs."""

from __future__ import annotations

import re

import yaml

from launch.run_tests import LINTERS
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
