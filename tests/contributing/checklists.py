"""The checklists of CONTRIBUTING.md, read from its text."""

from __future__ import annotations

import re
import shlex

from tests.conftest import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: A file to edit: the first thing of an item. The rest of the item says what to do there.
ITEM = re.compile(r"^- \[ \] `([^`\s]+)`:", re.MULTILINE)


def section(heading: str) -> str:
    """The text below a heading of the second level."""
    (found,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return found


def files(heading: str) -> list[str]:
    """The files that a checklist names, in its order; ``NAME`` in one stands for what is added."""
    return ITEM.findall(section(heading))


def pytest_words(heading: str) -> list[str]:
    """What the section's line ``Tests: `pytest ...` `` runs."""
    (command,) = re.findall(r"^Tests: `pytest ([^`]+)`", section(heading), re.MULTILINE)
    return shlex.split(command)
