"""Reads the checklists of CONTRIBUTING.md from its text."""

from __future__ import annotations

import re
import shlex

from tests.conftest import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: Matches an item's beginning, the file to edit. The rest of the item says what to do there.
ITEM = re.compile(r"^- \[ \] `([^`\s]+)`:", re.MULTILINE)


def section(heading: str) -> str:
    """Returns the text below a heading of the second level."""
    (found,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return found


def files(heading: str) -> list[str]:
    """Returns the files that a checklist names, in its order; ``NAME`` marks the name of the addition."""
    return ITEM.findall(section(heading))


def pytest_words(heading: str) -> list[str]:
    """Returns the words after ``pytest`` in the section's line ``Tests: `pytest ...` ``."""
    (command,) = re.findall(r"^Tests: `pytest ([^`]+)`", section(heading), re.MULTILINE)
    return shlex.split(command)
