"""Prose keeps the rules of CONTRIBUTING that a program can check: beginnings of docstrings, and words to avoid."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: A docstring or ``#:`` comment that begins like this describes a clause, not a thing or an action.
BEGINNINGS = re.compile(r"(Of|What|Which|Whether|That|As|How)\b")
#: A function's docstring says what it does; only a command's help, which typer shows, gives orders.
ORDERS = re.compile(
    r"(Add|Append|Ask|Begin|Build|Check|Choose|Collect|Compute|Convert|Create|Divide|Drop|Fetch|Fill|Find|Forget|Go|"
    r"Have|Keep|Load|Look|Make|Move|Open|Parse|Prepare|Print|Publish|Put|Raise|Read|Refuse|Remove|Replace|Restore|"
    r"Return|Rewrite|Run|Save|Say|See|Send|Serve|Set|Show|Start|Store|Take|Tell|Try|Update|Use|Warn|Wrap|Write)\b"
)
#: Words with a plainer equivalent; *beside* is fine for two things side by side, so only comparisons are found.
AVOIDED = re.compile(
    r"(?<![-\w])(as ever|anew|hardly|alike|likewise|taken off|the same of|"
    r"(?:faster|slower|better|worse|more|less) beside)\b",
    re.IGNORECASE,
)
ROOTS = ("sglang_kvq", "launch", "tests", "benchmarks")
FOLDERS = sorted({path.parent.relative_to(ROOT) for name in ROOTS for path in (ROOT / name).rglob("*.py")})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yields line numbers and texts of docstrings and ``#:`` comments, and True for a function's docstring."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                is_command = is_function and "typer." in ast.unparse(node.args)
                yield getattr(node, "lineno", 1), text, is_function and not is_command
    lines = source.splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith("#:") and not (number and lines[number - 1].strip().startswith("#:")):
            yield number + 1, line.strip().removeprefix("#:").strip(), False


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_docstrings(folder: Path) -> None:
    found = []
    for path in sorted((ROOT / folder).glob("*.py")):
        for line, text, is_function in prose(path):
            if BEGINNINGS.match(text) or AVOIDED.search(text) or (is_function and ORDERS.match(text)):
                found.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages(page: Path) -> None:
    rules = page.read_text().split("### English\n")[-1].split("\n## ")[0] if page.name == "CONTRIBUTING.md" else ""
    text = page.read_text().replace(rules, "") if rules else page.read_text()
    found = [line for line in text.splitlines() if AVOIDED.search(line)]
    assert not found, "\n".join(found)


def test_guides_are_short():
    """Pages that docs/README.md lists as concepts or guides have at most 200 lines; longer ones hide their subject."""
    index = (ROOT / "docs" / "README.md").read_text()
    guides = index.split("\n## Concepts\n")[1].split("\n## Reference\n")[0]
    names = re.findall(r"\]\(([\w-]+\.md)\)", guides)
    lengths = {name: len((ROOT / "docs" / name).read_text().splitlines()) for name in names}
    assert len(names) >= 15 and {name: length for name, length in lengths.items() if length > 200} == {}
