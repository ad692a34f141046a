"""Functions shared by tasks that generate text: they compute scores and lengths of answers, and read problems."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.tasks.base import Outcome
from sglang_kvq.evaluation.tasks.statistics import mean_and_error


def score(name: str, style: str, solved: Sequence[dict[str, Any]], warnings: Sequence[str] = ()) -> Outcome:
    """Returns a task's outcome: the share of problems that passed, and ``answer_lengths``."""
    items = [int(one["passed"]) for one in solved]
    value, se = mean_and_error(items)
    return Outcome(
        value,
        se,
        len(items),
        {name: value, f"{name}_se": se, f"{name}_n": len(items), **answer_lengths(name, solved)},
        {"style": style, "items": items, "tokens": [one["tokens"] for one in solved], "problems": solved},
        list(warnings),
    )


def answer_lengths(column: str, asked: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Returns ``COLUMN_tokens``, the mean length of answers, and ``COLUMN_cut``, the share that the limit cut off.

    Each has its standard error under ``_se``. An answer that was cut off counts with the tokens that it had, so the
    mean is a lower bound if any answer was cut off. Coarser caches make some models give longer answers, and an answer
    that was cut off looks like a wrong one.

    Args:
        column: name of the score's column.
        asked: answers with ``tokens`` and ``complete``.
    """
    tokens, tokens_se = mean_and_error([one["tokens"] for one in asked])
    cut, cut_se = mean_and_error([float(not one["complete"]) for one in asked])
    names = ("tokens", "tokens_se", "cut", "cut_se")
    return {f"{column}_{name}": value for name, value in zip(names, (tokens, tokens_se, cut, cut_se))}


def read_json_lines(path: Path, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """Reads the objects of a .jsonl file, which may be gzipped. A number in one of ``fields`` becomes text.

    Raises:
        KVQuantError: the file is not readable or empty, or one of ``fields`` is missing or neither text nor a number.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        objects = json_lines(data.decode())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise KVQuantError(
            f"{path}: not readable as JSON lines ({error}). Give a file of one JSON object a line."
        ) from error
    for number, one in enumerate(objects, 1):
        if not isinstance(one, dict) or not all(isinstance(one.get(name), str | int | float) for name in fields):
            raise KVQuantError(f"{path}: object {number} lacks text in one of the fields {', '.join(fields)}.")
        one.update((name, str(one[name])) for name in fields)
    if not objects:
        raise KVQuantError(f"{path}: no objects in it.")
    return objects


def json_lines(text: str) -> list[Any]:
    """Parses JSON lines. Only a line feed ends a line, because a string may contain U+2028 or U+0085 unescaped.

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
