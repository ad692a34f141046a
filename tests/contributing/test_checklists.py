"""Every file and heading that CONTRIBUTING.md names exists."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.contributing import checklists

HEADINGS = ("Add a method", "Add a statistic or code", "Add a kernel", "Support an SGLang release")


@pytest.mark.parametrize("heading", HEADINGS)
def test_files_of_a_checklist_exist(heading: str) -> None:
    files = checklists.files(heading)
    assert len(files) > 5 and len(files) == len(set(files))
    paths = [*files, *checklists.pytest_words(heading)]
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_item_names_one_file(heading: str) -> None:
    assert checklists.section(heading).count("- [ ]") == len(checklists.files(heading))


def test_paths_in_the_text_exist() -> None:
    """Paths in backticks exist, from the root or from the package, except those that commands write."""
    text = re.sub(r"--out \S+|\.venvs/[\w-]*|\.models/", "", checklists.TEXT)
    words = {word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()}
    paths = {word for word in words if re.fullmatch(r"[\w./-]+/[\w.-]*", word) and "NAME" not in word}
    assert len(paths) > 30
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "sglang_kvq"))] == []
