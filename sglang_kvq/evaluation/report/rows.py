"""Makes rows of results, one per task, context, method, calibration and chunk size, and points from these rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_kvq.evaluation.specs import REFERENCE, method_of, spec_of
from sglang_kvq.evaluation.tasks import KINDS
from sglang_kvq.evaluation.tasks.base import short
from sglang_kvq.evaluation.tasks.statistics import mean_and_error

#: Tasks, in the order of a table's columns.
TASKS = ("kl", "top1", "perplexity", *KINDS, "exact_keys_nats", "needle", "humaneval", "gsm8k", "math")
#: Tasks of separate problems, which have no context length.
PROBLEMS = ("humaneval", "gsm8k", "math")
#: Tasks for which lower values are better.
LOWER_IS_BETTER = ("kl", "perplexity", "exact_keys_nats")
#: Columns of every row. ``spec`` distinguishes calibrations; ``bf16_chunk`` is the chunk size of ``bf16_score``.
#: ``difference`` from BF16 is paired by problem. ``tokens`` is the mean length of answers, ``cut`` the share of those
#: that the limit cut off.
COLUMNS = (
    *("task", "context", "method", "allocated_bits", "chunk", "score", "score_se", "bf16_score", "bf16_chunk"),
    *("spec", "calibration", "seed", "rotations_sha256", "difference", "difference_se"),
    *("tokens", "tokens_se", "tokens_difference", "tokens_difference_se", "cut", "cut_se"),
)
Row = dict[str, Any]
#: Context and chunk size. None means a task without contexts, or a server that does not chunk prompts.
Cell = tuple[int | None, int | None]


def is_map(content: dict[str, Any]) -> bool:
    """Returns whether a result file is a map, and not a report."""
    return str(content.get("name", "")).startswith("precise_")


def rows_of(content: dict[str, Any]) -> list[Row]:
    """Returns the rows of a report (``accuracy_<model>.json``), or those of a map."""
    if is_map(content):
        return [{**dict.fromkeys(COLUMNS), **row} for row in content["rows"]]
    return add_reference([row for measured in content["rows"] for row in _rows(measured, content["settings"])])


def _rows(measured: dict[str, Any], settings: dict[str, Any]) -> Iterator[Row]:
    """Yields the rows of one method in a report."""
    label, server = measured["method"], measured.get("server") or {}
    seed = re.search(r"seed (\d+)$", measured["calibration"] or "")
    of_method = {
        "method": method_of(label),
        "allocated_bits": measured["allocated_bits"],
        "chunk": server.get("chunk"),
        "spec": spec_of(label),
        "calibration": measured["calibration"],
        "seed": int(seed[1]) if seed and measured["seed"] is None else measured["seed"],
        "rotations_sha256": (server.get("kv_quant") or {}).get("rotations_sha256"),
    }
    for task, context, source, column in _columns(measured, settings):
        if source.get(column) is not None:
            values = {"score": source[column], "score_se": source[f"{column}_se"]}
            if context is None:
                values["difference"] = source.get(f"{column}_vs_none")
                values["difference_se"] = source.get(f"{column}_vs_none_se")
                values["tokens_difference"] = source.get(f"{column}_tokens_vs_none")
                values["tokens_difference_se"] = source.get(f"{column}_tokens_vs_none_se")
            for name in ("tokens", "tokens_se", "cut", "cut_se"):
                values[name] = source.get(f"{column}_{name}")
            yield {**dict.fromkeys(COLUMNS), "task": task, "context": context, **of_method, **values}


def _columns(
    measured: dict[str, Any], settings: dict[str, Any]
) -> Iterator[tuple[str, int | None, dict[str, Any], str]]:
    """Yields task, context, and the dict and column in which a report has the value."""
    for length, found in (measured.get("kl_by_length") or {}).items():
        for task, column in (("kl", "kl"), ("top1", "top1_agreement"), ("perplexity", "perplexity")):
            yield task, int(length), found, column
    for task in (*KINDS, "needle"):
        for length in settings.get(task, {}).get("lengths", ()):
            yield task, length, measured, f"{task}_{short(length)}"
            yield f"{task}_nats", length, measured, f"{task}_{short(length)}_nats"
    for task in PROBLEMS:
        yield task, None, measured, task


def add_reference(rows: Sequence[Row]) -> list[Row]:
    """Adds BF16's score to rows without one, from the nearest chunk size: the size changes only BF16's rounding."""
    bf16: dict[Any, dict[int | None, float]] = {}
    for row in rows:
        if row["spec"] == REFERENCE:
            bf16.setdefault((row["task"], row["context"]), {})[row["chunk"]] = row["score"]
    done = []
    for row in rows:
        known = bf16.get((row["task"], row["context"]), {})
        if row["bf16_score"] is None and known:
            near = min(known, key=lambda chunk: abs(_inverse(chunk) - _inverse(row["chunk"])))
            row = {**row, "bf16_score": known[near], "bf16_chunk": near}
        done.append(row)
    return done


def _inverse(chunk: int | None) -> float:
    """Returns a chunk size's inverse; 0 if prompts are not chunked."""
    return 1 / chunk if chunk else 0.0


def place(row: Row) -> tuple[Any, ...]:
    """Returns the sort key of a row."""
    return TASKS.index(row["task"]), _size(row["chunk"]), row["context"] or 0, -row["allocated_bits"], row["spec"]


def _size(chunk: int | None) -> float:
    return float("inf") if chunk is None else chunk


@dataclass(frozen=True)
class Point:
    """A method in one task, context and chunk size.

    Attributes:
        bits: allocated bits per element, averaged over its calibrations.
        score, se: for several calibrations, their mean and its standard error. For one, its score and standard error
            between contexts or problems.
        calibrations: number of different calibrations.
        difference: from BF16 paired by problem, and its standard error; None for several calibrations.
    """

    method: str
    bits: float
    score: float
    se: float | None
    calibrations: int = 1
    difference: tuple[float, float] | None = None

    @property
    def quantized(self) -> bool:
        """False for BF16 and FP8, which methods are compared with."""
        return re.split(r"[: ]", self.method)[0] not in (REFERENCE, "fp8")


def points(rows: Iterable[Row], by: str = "method") -> list[Point]:
    """Returns a point per method, or per spec, in the rows' order, from rows of one task, context and chunk size."""
    named: dict[str, dict[Any, Row]] = {}
    for row in rows:
        # Rotations measured under two names are one calibration.
        which = row["rotations_sha256"] or (row["calibration"], row["seed"])
        named.setdefault(row[by], {}).setdefault(which, row)
    return [_point(name, list(calibrated.values())) for name, calibrated in named.items()]


def _point(name: str, rows: Sequence[Row]) -> Point:
    if len(rows) == 1:
        (row,) = rows
        paired = None if row["difference"] is None else (row["difference"], row["difference_se"] or 0.0)
        return Point(name, row["allocated_bits"], row["score"], row["score_se"], difference=paired)
    score, se = mean_and_error([row["score"] for row in rows])
    return Point(name, sum(row["allocated_bits"] for row in rows) / len(rows), score, se, len(rows))


def frontier(found: Iterable[Point], lower_is_better: bool) -> list[Point]:
    """Returns the points that no other point matches with fewer bits or beats with equal bits, sorted by bits.

    Quality improves strictly from point to point. Of points with equal bits and scores, only the first is returned.
    """
    sign = 1 if lower_is_better else -1
    best: list[Point] = []
    for point in sorted(found, key=lambda point: (point.bits, sign * point.score)):
        if not best or sign * point.score < sign * best[-1].score:
            best.append(point)
    return best


def select(rows: Iterable[Row], task: str, cell: Cell) -> list[Row]:
    """Returns the rows of a task in one (context, chunk)."""
    return [row for row in rows if row["task"] == task and (row["context"], row["chunk"]) == cell]


def cells(rows: Iterable[Row], task: str) -> list[Cell]:
    """Returns the (context, chunk) pairs of a task's rows: small chunks first, then short contexts."""
    found = {(row["context"], row["chunk"]) for row in rows if row["task"] == task}
    return sorted(found, key=lambda cell: (_size(cell[1]), cell[0] or 0))


def representative(rows: Sequence[Row], task: str) -> Cell | None:
    """Returns the (context, chunk) that represents a task in a plot or table; None if it was not measured.

    Among the pairs with most methods, those with the smallest chunks are chosen, because prompts then read most from
    the cache. Among these, the longest context is chosen in which BF16 reaches half of its best score: if BF16 fails,
    methods cannot differ.
    """
    found = {cell: select(rows, task, cell) for cell in cells(rows, task)}
    if not found:
        return None
    count = {cell: len({row["method"] for row in of}) for cell, of in found.items()}
    most = [cell for cell in found if count[cell] == max(count.values())]
    most = [cell for cell in most if cell[1] == most[0][1]]
    if task not in LOWER_IS_BETTER:
        scores = {cell: _reference_score(found[cell]) for cell in most}
        most = [cell for cell in most if scores[cell] >= max(scores.values()) / 2]
    return max(most, key=lambda cell: cell[0] or 0)


def _reference_score(rows: Iterable[Row]) -> float:
    """Returns BF16's score in one (context, chunk), from its own row or a row compared with it; 0 if it is unknown."""
    known = [row["score"] for row in rows if row["method"] == REFERENCE]
    return next(iter([*known, *(row["bf16_score"] for row in rows if row["bf16_score"] is not None)]), 0.0)
