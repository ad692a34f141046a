"""Rows of the accuracy map, from reports: one per task, context, method, calibration and chunk size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from sglang_kvq.evaluation.frontier import Row
from sglang_kvq.evaluation.specs import REFERENCE, method_of, spec_of
from sglang_kvq.evaluation.tasks import KINDS
from sglang_kvq.evaluation.tasks.needle import short

#: Tasks, in the order of a table's columns.
TASKS = ("kl", "top1", *KINDS, "exact_keys_nats", "needle", "humaneval", "gsm8k")
#: Columns of every row. ``spec`` distinguishes calibrations; ``bf16_chunk`` is the chunk size of ``bf16_score``.
COLUMNS = (
    *("task", "context", "method", "allocated_bits", "chunk", "score", "score_se", "bf16_score", "bf16_chunk"),
    *("spec", "calibration", "seed", "rotations_sha256"),
)
_WITH_LENGTHS = (*KINDS, "needle")


def is_map(content: dict[str, Any]) -> bool:
    """Returns whether a result file is a map, and not a report."""
    return str(content.get("name", "")).startswith("precise_")


def rows_of(content: dict[str, Any]) -> list[Row]:
    """Returns the map's rows of a report (``accuracy_<model>.json``), or the rows of a map unchanged."""
    if is_map(content):
        return list(content["rows"])
    rows = [row for measured in content["rows"] for row in _rows(measured, content["settings"])]
    return add_reference(rows)


def _rows(measured: dict[str, Any], settings: dict[str, Any]) -> Iterator[Row]:
    """Yields the rows of one method in a report."""
    label, server = measured["method"], measured.get("server") or {}
    seed = re.search(r"seed (\d+)$", measured["calibration"] or "")
    of_method = {
        "allocated_bits": measured["allocated_bits"],
        "chunk": server.get("chunk"),
        "spec": spec_of(label),
        "calibration": measured["calibration"],
        "seed": int(seed[1]) if seed and measured["seed"] is None else measured["seed"],
        "rotations_sha256": (server.get("kv_quant") or {}).get("rotations_sha256"),
    }
    for task, context, score, se in _scores(measured, settings):
        whole = {"task": task, "context": context, "method": method_of(label), "score": score, "score_se": se}
        yield {name: (whole | of_method).get(name) for name in COLUMNS}


def _scores(measured: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[str, int | None, float, float]]:
    """Yields task, context (None if the task has no choice of it), score and its standard error."""
    for length, found in (measured.get("kl_by_length") or {}).items():
        yield "kl", int(length), found["kl"], found["kl_se"]
        yield "top1", int(length), found["top1_agreement"], found["top1_agreement_se"]
    for task in _WITH_LENGTHS:
        for length in settings.get(task, {}).get("lengths", ()):
            column = f"{task}_{short(length)}"
            for name, found in ((task, column), (f"{task}_nats", f"{column}_nats")):
                if measured.get(found) is not None:
                    yield name, length, measured[found], measured[f"{found}_se"]
    for task in ("humaneval", "gsm8k"):
        if measured.get(task) is not None:
            yield task, None, measured[task], measured[f"{task}_se"]


def add_reference(rows: Sequence[Row]) -> list[Row]:
    """Adds BF16's score to rows: with the same chunks, or else the nearest size, which only changes BF16's rounding."""
    bf16: dict[Any, dict[int | None, float]] = {}
    for row in rows:
        if row["spec"] == REFERENCE:
            bf16.setdefault((row["task"], row["context"]), {})[row["chunk"]] = row["score"]
    done = []
    for row in rows:
        known = bf16.get((row["task"], row["context"]), {})
        near = row["chunk"] if row["chunk"] in known else min(known, key=partial(_apart, row["chunk"]), default=None)
        done.append({**row, "bf16_score": known.get(near), "bf16_chunk": near})
    return done


def _apart(a: int | None, b: int | None) -> float:
    """Returns the distance between two chunk sizes; None is a whole prompt."""
    return abs((1 / a if a else 0.0) - (1 / b if b else 0.0))


def add_reference_where_missing(rows: Sequence[Row]) -> list[Row]:
    """Fills in BF16's score from other sources where a source has none."""
    return [filled if row["bf16_score"] is None else row for row, filled in zip(rows, add_reference(rows), strict=True)]


def place(row: Row) -> tuple[Any, ...]:
    """Returns the sort key of a row."""
    chunk = float("inf") if row["chunk"] is None else row["chunk"]
    return (TASKS.index(row["task"]), chunk, row["context"] or 0, -row["allocated_bits"], row["spec"])
