"""Points of the accuracy map: merges a method's calibrations and finds the methods that no other one beats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_kvq.evaluation.specs import REFERENCE
from sglang_kvq.evaluation.stats import mean_and_error

#: Tasks for which lower values are better.
LOWER_IS_BETTER = ("kl", "exact_keys_nats")
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A method in one task, context and chunk size.

    Attributes:
        bits: allocated bits per element, averaged over its calibrations.
        score, se: for several calibrations, their mean and its standard error. For one, its score and standard error
            between contexts or problems.
        calibrations: number of different calibrations.
    """

    method: str
    bits: float
    score: float
    se: float | None
    calibrations: int


def points(rows: Iterable[Row]) -> list[Point]:
    """Returns a point per method, in the rows' order, from rows of one task, context and chunk size."""
    by_method: dict[str, dict[Any, Row]] = {}
    for row in rows:
        # Rotations measured under two names are one calibration.
        which = row["rotations_sha256"] or (row["calibration"], row["seed"])
        by_method.setdefault(row["method"], {}).setdefault(which, row)
    return [_point(method, list(calibrated.values())) for method, calibrated in by_method.items()]


def _point(method: str, rows: Sequence[Row]) -> Point:
    score, se = mean_and_error([row["score"] for row in rows])
    bits = sum(row["allocated_bits"] for row in rows) / len(rows)
    return Point(method, bits, score, se if len(rows) > 1 else rows[0]["score_se"], len(rows))


def frontier(found: Iterable[Point], lower_is_better: bool) -> list[Point]:
    """Returns the points that no other one matches with fewer bits or beats with as many, by their bits.

    Quality improves strictly along them. Of points equal in both, the first stays.
    """
    sign = 1 if lower_is_better else -1
    best: list[Point] = []
    for point in sorted(found, key=lambda point: (point.bits, sign * point.score)):
        if not best or sign * point.score < sign * best[-1].score:
            best.append(point)
    return best


def select(rows: Iterable[Row], task: str, cell: tuple[int | None, int | None]) -> list[Row]:
    """Returns the rows of a task in one (context, chunk)."""
    return [row for row in rows if row["task"] == task and (row["context"], row["chunk"]) == cell]


def cells(rows: Iterable[Row], task: str) -> list[tuple[int | None, int | None]]:
    """Returns the (context, chunk) pairs of a task's rows: small chunks first, then short contexts."""
    found = {(row["context"], row["chunk"]) for row in rows if row["task"] == task}
    return sorted(found, key=lambda cell: (_size(cell[1]), cell[0] or 0))


def _size(chunk: int | None) -> float:
    return float("inf") if chunk is None else chunk


def representative(rows: Sequence[Row], task: str) -> tuple[int | None, int | None] | None:
    """Returns the (context, chunk) that represents a task in a plot or table; None if it was not measured.

    Among the pairs with most methods it takes the smallest chunks, in which prompts read most from the cache. Of these
    it takes the longest context in which BF16 reaches half of its best score: where BF16 fails, methods cannot differ.
    """
    found = {cell: select(rows, task, cell) for cell in cells(rows, task)}
    if not found:
        return None
    count = {cell: len({row["method"] for row in of}) for cell, of in found.items()}
    most = [cell for cell in found if count[cell] == max(count.values())]
    chunk = min((cell[1] for cell in most), key=_size)
    most = [cell for cell in most if cell[1] == chunk]
    if task not in LOWER_IS_BETTER:
        scores = {cell: reference_score(found[cell]) for cell in most}
        least = max((score for score in scores.values() if score is not None), default=0.0) / 2
        most = [cell for cell in most if (scores[cell] or 0.0) >= least]
    return max(most, key=lambda cell: cell[0] or 0)


def reference_score(rows: Iterable[Row]) -> float | None:
    """Returns BF16's score in one (context, chunk): from its own row, or else from a row compared with it."""
    own, noted = None, None
    for row in rows:
        own = row["score"] if row["method"] == REFERENCE else own
        noted = row["bf16_score"] if noted is None else noted
    return noted if own is None else own
