"""README and docs/reference.md name all flags, methods, commands and packages of the code, and no others."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.methods import METHOD_NAMES, get_method
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def rows(heading: str, page: str = README) -> dict[str, list[str]]:
    """Returns the cells of a heading's first table, by the name in the first column."""
    section = page.split(f"## {heading}\n")[1].split("\n#")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in cells[2:]}


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}


def test_flags() -> None:
    from sglang_kvq.sglang import flags

    parser = argparse.ArgumentParser(add_help=False)
    flags.add_flags(parser)
    known = {action.option_strings[0]: action.default for action in parser._actions}
    written = {**rows("Flags", REFERENCE), **rows("Flags", (ROOT / "docs" / "sessions.md").read_text())}
    assert set(written) == set(known)
    for flag, default in known.items():
        if default is not None:
            assert written[flag][0].strip("`") == str(default)


def test_keywords_of_engine() -> None:
    """The table lists every flag with its type; other keywords of ``FIELDS`` are refused or unknown."""
    from sglang_kvq.sglang import flags
    from sglang_kvq.sglang.router import flags as episodic_flags

    parser = argparse.ArgumentParser(add_help=False)
    flags.add_flags(parser)
    options = {action.dest: action for action in parser._actions}
    written = rows("Keywords of Engine", REFERENCE)
    assert set(written) == set(options) == {*flags.FIELDS, *episodic_flags.FIELDS}
    for keyword, (kind, flag) in written.items():
        option = options[keyword]
        assert re.findall("`(.+?)`", flag)[0] == option.option_strings[0]
        type_ = option.type if isinstance(option.type, type) else str
        assert kind == "refused" or re.findall("`(.+?)`", kind)[0] == type_.__name__, keyword


def test_routes_and_fields_of_sessions() -> None:
    from sglang_kvq.sglang.router.routes import describe, routes
    from tests.sglang.router.session_model import CONFIG, Manager

    manager = Manager()
    api = routes(manager, CONFIG, (10.0, 100.0))
    known = {f"{method} {route.path.replace(':path', '')}" for route in api.routes for method in route.methods}
    assert {cell.strip("`") for cell in rows("Routes of sessions", REFERENCE)} == known
    fields = describe(manager.router.store.use("", "a"), CONFIG, (10.0, 100.0))
    assert {name for cell in rows("Fields of a session", REFERENCE) for name in re.findall(r"\w+", cell)} == set(fields)
    (shown,) = re.findall(r"```json\n(.+?)```", (ROOT / "docs" / "sessions.md").read_text(), re.DOTALL)
    assert {"read", "rebuilt"} <= set(json.loads(shown)) <= set(fields)


def test_commands() -> None:
    from sglang_kvq.cli import app

    written = {name for cells in rows("Commands", REFERENCE) for name in re.findall(r"kvq (\w+)", cells)}
    assert written == {command.name or command.callback.__name__ for command in app.registered_commands}


def test_methods() -> None:
    written = rows("Methods")
    assert set(written) == {*METHOD_NAMES, "none"}
    for name in METHOD_NAMES:
        for paper in re.findall(r"arXiv (\d+\.\d+)", get_method(name).paper):
            assert paper in written[name][-1]
    assert KVQuantConfig("int2").method in written


def test_packages() -> None:
    """The chain of data flow and the table below it name every package."""
    section = README.split("\n## How it works\n")[1].split("\n## ")[0]
    chain = re.search(r"^    (config → .*)$", section, re.MULTILINE)
    assert chain
    packages = {path.parent.name for path in (ROOT / "sglang_kvq").glob("*/__init__.py")} | {"kernels", "cli", "config"}
    packages -= {"rotation_zoo"}  # data, which the table names in its reader's row
    assert set(re.findall(r"\w+", chain[1])) == packages
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == packages


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
]


def test_the_index_of_docs_links_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs" / "README.md").read_text()))
    assert {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} - linked == {"README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text()):
        found = path.parent / target if target else path
        assert found.exists(), f"{page} links to {target}"
        if heading:
            assert heading in headings(found), f"{page} links to {target}#{heading}"
