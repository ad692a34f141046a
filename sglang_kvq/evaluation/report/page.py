"""Formats results as Markdown: the tables of one report or map, and the page of several."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.files import read
from sglang_kvq.evaluation.report.rows import (
    LOWER_IS_BETTER,
    PROBLEMS,
    TASKS,
    Cell,
    Point,
    Row,
    cells,
    frontier,
    is_map,
    points,
    representative,
    rows_of,
    select,
)
from sglang_kvq.evaluation.tasks.base import short

TITLES = {
    "kl": "KL, nats",
    "top1": "top-1, %",
    "perplexity": "perplexity",
    "exact_keys_nats": "exact_keys, nats",
    "humaneval": "HumanEval, %",
    "gsm8k": "GSM8K, %",
    "math": "MATH, %",
}
LEGEND = """\
- *bits*: allocated bits per stored element, scales and offsets included. The first and the most recent tokens of a
  request are BF16.
- ±: one standard error, between contexts for KL and perplexity, between cases or problems for scores. A number in
  brackets counts the calibrations (texts, seeds) of which a value is the mean; its error is that between them.
- A signed number in brackets: the difference from `none` (BF16), paired by problem.
- Bold: on the frontier, which no method of fewer bits matches and none of as many bits beats.
- The KL of `none` compares two runs of the same server: it is the noise of the measurement.
"""
INTRODUCTION = f"""# Accuracy

Written by `kvq eval --report` from the files in benchmarks/results.

{LEGEND}"""


def page(files: Sequence[Path], target: Path) -> str:
    """Returns a page of reports and maps (``accuracy_*.json``, ``precise_*.json``) that shows the plots next to them.

    Raises:
        KVQuantError: a file is neither a report nor a map.
    """
    models: dict[str, list[str]] = {}
    for path in sorted(files, key=lambda path: not path.name.startswith("precise_")):
        content = read(path)
        if not {"model", "rows", "settings", "device", "commit", "command"} <= content.keys():
            raise KVQuantError(f"{path}: not a report of kvq eval (accuracy_<model>.json or precise_<model>.json).")
        plots = [
            plot for plot in (path.with_suffix(".png"), path.with_name(f"{path.stem}_needle.png")) if plot.exists()
        ]
        link = _relative(path, target.parent)
        part = section(content, [_relative(plot, target.parent) for plot in plots])
        models.setdefault(content["model"], []).append(f"### [{path.stem}]({link}), {content['device']}\n\n{part}")
    return "\n".join([INTRODUCTION, *("\n".join([f"## {model}\n", *models[model]]) for model in sorted(models))])


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def section(content: dict[str, Any], plots: Sequence[str] = ()) -> str:
    """Returns plots, table, and description of a report or map. A map merges the calibrations of a method.

    Args:
        plots: links.
    """
    rows, by = rows_of(content), "method" if is_map(content) else "spec"
    chosen = {task: cell for task in TASKS if (cell := representative(rows, task)) is not None}
    others = {task: [cell for cell in cells(rows, task) if cell != chosen[task]] for task in chosen}
    more = [
        f"**{title(task)}**\n\n{table(rows, [(task, cell) for cell in found], by, short_titles=True)}"
        for task, found in others.items()
        if found
    ]
    origins = {row["spec"]: _origin(row) for row in rows if row["calibration"] not in (None, "fixed", "none")}
    origins = {} if is_map(content) else origins  # the rows of a map's file name them
    commands = "\n".join(f"    {command}" for command in content["command"].split("; "))
    origin_lines = "\n".join(f"- `{spec}`: rotations: {origin}" for spec, origin in origins.items())
    parts = [
        *(f"![{Path(link).stem}]({link})" for link in plots),
        table(rows, list(chosen.items()), by) if chosen else "",
        lengths(rows, list(chosen.items()), by),
        _how(content, chosen),
        "\n".join(f"- `{row['method']}`: {note}" for row in content["rows"] for note in _notes(row)),
        _folded(f"Other contexts and chunk sizes ({len(more)} tasks)", *more) if more else "",
        _folded("Commands and rotations", commands, origin_lines),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def title(task: str) -> str:
    return TITLES.get(task, f"{task}, %")


def _folded(heading: str, *parts: str) -> str:
    """Returns text that is collapsed until the reader opens it."""
    text = "\n\n".join(filter(None, parts))
    return f"<details><summary>{heading}</summary>\n\n{text}\n\n</details>"


def _origin(row: Row) -> str:
    return str(row["calibration"]) + ("" if row["seed"] is None else f", seed {row['seed']}")


def _notes(row: dict[str, Any]) -> list[str]:
    return [*row.get("warnings", []), *([f"**not measured**: {row['error']}"] if row.get("error") else [])]


def table(
    rows: Sequence[Row], columns: Sequence[tuple[str, Cell]], by: str = "method", short_titles: bool = False
) -> str:
    """Returns a table with a row per method and a column per task and (context, chunk); the frontier is bold.

    Args:
        by: ``method``, or ``spec`` for a row per calibration.
        short_titles: show only contexts and chunks, if all columns are of one task.
    """
    found = {column: {point.method: point for point in points(select(rows, *column), by)} for column in columns}
    best = {column: _best(of.values(), column[0]) for column, of in found.items()}
    bits = {point.method: point.bits for of in reversed(found.values()) for point in of.values()}
    first = found[columns[0]]

    def order(method: str) -> tuple[float, float, str]:
        sign = 1 if columns[0][0] in LOWER_IS_BETTER else -1
        return -bits[method], sign * first[method].score if method in first else float("inf"), method

    lines = [["method", "bits", *(_heading(task, cell, short_titles) for task, cell in columns)]]
    lines.append(["---"] * len(lines[0]))
    for method in sorted(bits, key=order):
        values = [_value(of.get(method), column[0], method in best[column]) for column, of in found.items()]
        lines.append([f"`{method}`", f"{bits[method]:.2f}", *values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def lengths(rows: Sequence[Row], columns: Sequence[tuple[str, Cell]], by: str = "method") -> str:
    """Returns a table of the answers' lengths, for the tasks that generate; empty if no row has any.

    A cell has the mean tokens of an answer ± standard error, its difference from BF16 paired by problem, and the share
    of answers that the limit cut off. For several calibrations, it has only their means.
    """
    found = {column: [row for row in select(rows, *column) if row["tokens"] is not None] for column in columns}
    found = {column: of for column, of in found.items() if of}
    if not found:
        return ""
    bits = {row[by]: row["allocated_bits"] for of in reversed(found.values()) for row in of}
    lines = [["method", *(_heading(task, cell, False).removesuffix(", %") for task, cell in found)]]
    lines.append(["---"] * len(lines[0]))
    for method in sorted(bits, key=lambda name: (-bits[name], name)):
        lines.append([f"`{method}`", *(_length([row for row in of if row[by] == method]) for of in found.values())])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Tokens of an answer (difference from `none`), and the share that the limit cut off:\n\n{text}"


def _length(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    tokens, cut = (sum(row[name] for row in rows) / len(rows) for name in ("tokens", "cut"))
    text = f"{tokens:.1f}"
    if len(rows) == 1:
        (row,) = rows
        text += "" if row["tokens_se"] is None else f" ± {row['tokens_se']:.1f}"
        if row["tokens_difference"] is not None:
            text += f" ({row['tokens_difference']:+.1f} ± {row['tokens_difference_se'] or 0.0:.1f})"
    return f"{text}, {100 * cut:.1f}% cut"


def _best(found: Iterable[Point], task: str) -> set[str]:
    """Returns the methods on the frontier, including those that share a point on it."""
    quantized = [point for point in found if point.quantized]
    corners = {(point.bits, point.score) for point in frontier(quantized, task in LOWER_IS_BETTER)}
    return {point.method for point in quantized if (point.bits, point.score) in corners}


def _heading(task: str, cell: Cell, short_title: bool) -> str:
    context, chunk = cell
    where = short(context) if context else ""
    if short_title:
        return f"{where or 'all'}, chunks of {chunk or 'any size'}"
    name, comma, unit = title(task).partition(", ")
    return f"{name} {where}{comma}{unit}" if where else title(task)


def _value(point: Point | None, task: str, best: bool) -> str:
    """Formats score ± standard error, and in brackets the difference from BF16 or the number of calibrations."""
    if point is None:
        return ""
    factor, form = (1, ".2f" if task == "perplexity" else ".4f") if task in LOWER_IS_BETTER else (100, ".1f")
    text = format(factor * point.score, form)
    text = f"**{text}**" if best else text
    text += "" if point.se is None else f" ± {format(factor * point.se, form)}"
    if point.difference:
        text += f" ({factor * point.difference[0]:+.1f} ± {factor * point.difference[1]:.1f})"
    return text + (f" ({point.calibrations})" if point.calibrations > 1 else "")


def _how(content: dict[str, Any], chosen: dict[str, Cell]) -> str:
    """Describes the measurement in words, from the file's settings and header."""
    settings, words = content["settings"], []
    if kl := settings.get("kl"):
        texts = ", ".join(text["file"] for text in kl["texts"])
        share = f" after its first {kl['skip']:.0%}" if kl["skip"] else ""
        counts = " and ".join(f"{count} contexts of {length} tokens" for length, count in kl["contexts"])
        words.append(f"KL, top-1 agreement and perplexity: {counts} from {texts}{share}, from token {kl['first']} on.")
    counted = {
        task: next((f"{row[f'{task}_n']} problems, " for row in content["rows"] if row.get(f"{task}_n")), "")
        for task in PROBLEMS
    }
    if "humaneval" in settings:
        words.append(f"HumanEval: pass@1, {counted['humaneval']}greedy.")
    if "gsm8k" in settings:
        words.append(f"GSM8K: {counted['gsm8k']}{settings['gsm8k']['shots']} worked examples, greedy.")
    if "math" in settings:
        words.append(f"MATH: {counted['math']}greedy.")
    if needle := settings.get("needle"):
        words.append(f"Needle: {len(needle['depths'])} depths, {needle['trials']} per cell.")
    chunks: dict[int | None, list[str]] = {}
    for task, (_, chunk) in chosen.items():
        chunks.setdefault(chunk, []).append(task)
    for chunk, tasks in chunks.items():
        words.append(f"Chunks of {chunk or 'any size'}" + (f": {', '.join(tasks)}." if len(chunks) > 1 else "."))
    dirty = " with uncommitted changes" if content["dirty"] else ""
    commits = ", ".join(sha[:10] for sha in content["commit"].split(", "))
    version = content["versions"].get("sglang", "unknown")
    words.append(f"{content['device']}, SGLang {version}, {content['date']}, commit {commits}{dirty}.")
    return " ".join(words)
