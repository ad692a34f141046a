"""Finds in SGLang's source where a batch is planned, and which switches may change that.

A backend plans in ``init_forward_metadata*``. Our backend also writes to the cache there, so SGLang must call it for
each step. Code that captures a plan in a CUDA graph, replays one or leaves one out would silently repeat an old plan.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PLANS = "init_forward_metadata"
#: Matches part of the name of a switch (variable or flag) that may decide how plans are made.
_TELLING = re.compile(r"METADATA|GLUE|GRAPH|CAPTURE|REPLAY|(^|_)PLAN(_|$)", re.IGNORECASE)
#: Matches part of the comment above such a variable.
_SAYS = re.compile(r"metadata prep|attention metadata|attention-metadata|init_forward_metadata", re.IGNORECASE)
_VARIABLE = re.compile(r"^    (SGL\w+) = Env")


@dataclass(frozen=True, order=True)
class Plan:
    """A place in the source that plans a batch.

    Attributes:
        path: the file, below ``sglang/srt``.
        what: ``function: method``: the innermost function, and the method that it names. A ``?`` follows a method that
            is named in a string.
        line: the first place in the function.
    """

    path: str
    what: str
    line: int


def plans(root: Path, skip: tuple[str, ...], also: Iterable[str] = ()) -> list[Plan]:
    """Returns every distinct plan in the files below ``root``.

    Args:
        skip: beginnings of paths that are not read, except the files in ``also``.
    """
    found: dict[tuple[str, str], int] = {}
    for path in sorted(root.rglob("*.py")):
        name, source = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8-sig")
        if _PLANS not in source or (name.startswith(skip) and name not in also):
            continue
        reader = _Reader()
        reader.visit(ast.parse(source))
        for what, line in reader.found:
            found.setdefault((name, what), line)
    return sorted(Plan(*key, line) for key, line in found.items())


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self._functions = ["module"]

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def _note(self, name: str, mark: str, node: ast.expr) -> None:
        if name.startswith(_PLANS):
            self.found.append((f"{self._functions[-1]}: {name}{mark}", node.lineno))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node.attr, "", node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier():
            self._note(node.value, "?", node)


def variables(root: Path, paths: Iterable[str]) -> set[str]:
    """Returns environment variables that these files read, and those of SGLang's list that seem to concern plans."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8-sig"))):
            match node:
                case ast.Attribute(value=ast.Name(id="envs"), attr=name):
                    found.add(name)
                case ast.Constant(value=str(name)) if re.fullmatch(r"SGL(ANG)?_[A-Z0-9_]+", name):
                    found.add(name)
    comment = ""
    for line in (root / "environ.py").read_text().splitlines():
        if line.lstrip().startswith("#"):
            comment += line
        elif match := _VARIABLE.match(line):
            if _TELLING.search(match[1]) or _SAYS.search(comment):
                found.add(match[1])
            comment = ""
        else:
            comment = ""
    return found


def flags(names: Iterable[str]) -> set[str]:
    """Returns those of ``names``, which are SGLang's flags, that seem to concern plans."""
    return {name for name in names if _TELLING.search(name)}
