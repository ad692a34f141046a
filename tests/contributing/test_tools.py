"""Hooks and the workflow run what ./test runs."""

from __future__ import annotations

import re

import yaml

from tests.conftest import ROOT

HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())


def test_hooks_are_the_linters_of_test_in_its_versions() -> None:
    assert [hook["id"] for hook in HOOKS] == ["ruff", "ruff-format", "mypy"]
    (ruff,) = set(re.findall(r'"(ruff[^"]*)"', (ROOT / "pyproject.toml").read_text()))
    assert [hook.get("additional_dependencies") for hook in HOOKS] == [[ruff], [ruff], None]


def test_the_workflow_runs_test() -> None:
    commands = [step["run"] for step in WORKFLOW["jobs"]["test"]["steps"] if "run" in step]
    assert commands[-1] == "./test"
