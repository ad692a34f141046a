"""Shared by tasks of separate problems: the score, and reading problems."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.tasks.base import Outcome
from sglang_kvq.evaluation.tasks.statistics import mean_and_error


def score(name: str, style: str, solved: Sequence[dict[str, Any]], warnings: Sequence[str] = ()) -> Outcome:
    """Returns the share of problems with ``passed``; answers without ``complete`` were cut off."""
    items = [int(one["passed"]) for one in solved]
    value, se = mean_and_error(items)
    cut = sum(not one["complete"] for one in solved)
    return Outcome(
        value,
        se,
        len(items),
        {name: value, f"{name}_se": se, f"{name}_n": len(items)},
        {"style": style, "items": items, "cut_off_answers": cut, "problems": solved},
        list(warnings),
    )


def read_json_lines(path: Path, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """Reads the objects of a .jsonl file, which may be gzipped.

    Raises:
        KVQuantError: the file is not readable or empty, or a line lacks one of ``fields``.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        objects = json_lines(data.decode())
    except (OSError, EOFError, ValueError) as error:
        raise KVQuantError(
            f"{path}: not readable as JSON lines ({error}); give a file of one JSON object a line."
        ) from error
    for number, one in enumerate(objects, 1):
        if not isinstance(one, dict) or any(name not in one for name in fields):
            raise KVQuantError(f"{path}: object {number} lacks one of the fields {', '.join(fields)}.")
    if not objects:
        raise KVQuantError(f"{path}: no objects in it.")
    return objects


def json_lines(text: str) -> list[Any]:
    """The values of JSON lines. Only line feeds end a line: a string may hold U+2028 or U+0085 as they are.

    Raises:
        ValueError: a line that is not JSON; its number is in the message.
    """
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return found
