"""The accuracy map as text: a block of Markdown that a page holds between two markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.families import family_of
from sglang_kvq.evaluation.frontier import LOWER_IS_BETTER, Point, Row, cells, frontier, points, representative, select
from sglang_kvq.evaluation.map_rows import TASKS
from sglang_kvq.evaluation.tasks.needle import short

TITLES = {
    "kl": "KL, nats",
    "top1": "top-1, %",
    "exact_keys_nats": "exact_keys, nats",
    "humaneval": "HumanEval, %",
    "gsm8k": "GSM8K, %",
}
END = "<!-- end of map -->"
Cell = tuple[int | None, int | None]


def begin(name: str) -> str:
    """Returns the first line of a block; ``name`` is the map's, ``precise_<model>``."""
    return f"<!-- map: {name} -->"


def block(content: dict[str, Any], link: str, plot: str | None, page: str) -> str:
    """Returns a map's block, markers included.

    Args:
        link, plot: paths of the JSON and of the plot, relative to the page; None if there is no plot.
        page: the page's path in the repository, for the command that rewrites the block.
    """
    rows = content["rows"]
    chosen = [(task, cell) for task in TASKS if (cell := representative(rows, task)) is not None]
    parts = [begin(content["name"])]
    if plot:
        parts.append(f"![Quality against allocated bits, {content['model']}]({plot})")
    parts += [table(rows, chosen), _how(content, chosen, link, page)]
    others = [(task, [cell for cell in cells(rows, task) if cell != of]) for task, of in chosen]
    folded = [
        f"**{title(task)}**\n\n{table(rows, [(task, cell) for cell in more], short_titles=True)}"
        for task, more in others
        if more
    ]
    if folded:
        text = "\n\n".join(folded)
        parts.append(
            f"<details><summary>Other contexts and chunk sizes ({len(folded)} tasks)</summary>\n\n{text}\n\n</details>"
        )
    return "\n\n".join([*parts, END]) + "\n"


def title(task: str) -> str:
    return TITLES.get(task, f"{task}, %")


def table(rows: Sequence[Row], columns: Sequence[tuple[str, Cell]], short_titles: bool = False) -> str:
    """Returns a table with a row per method and a column per task and (context, chunk); the frontier is bold.

    Args:
        short_titles: show only contexts and chunks, if all columns are of one task.
    """
    found = {column: {point.method: point for point in points(select(rows, *column))} for column in columns}
    best = {column: _best(_quantized(of.values()), column[0]) for column, of in found.items()}
    bits: dict[str, float] = {}
    for of in found.values():
        for method, point in of.items():
            bits.setdefault(method, point.bits)
    first = found[columns[0]]
    worst = float("inf")

    def order(method: str) -> tuple[float, float, str]:
        sign = 1 if columns[0][0] in LOWER_IS_BETTER else -1
        return -bits[method], sign * first[method].score if method in first else worst, method

    heads = [_heading(task, cell, short_titles) for task, cell in columns]
    lines = ["| " + " | ".join(["method", "bits", *heads]) + " |", "|---" * (2 + len(heads)) + "|"]
    for method in sorted(bits, key=order):
        values = [_value(of.get(method), column[0], method in best[column]) for column, of in found.items()]
        lines.append("| " + " | ".join([f"`{method}`", f"{bits[method]:.2f}", *values]) + " |")
    return "\n".join(lines)


def _quantized(found: Iterable[Point]) -> list[Point]:
    return [point for point in found if family_of(point.method)]


def _best(found: Sequence[Point], task: str) -> set[str]:
    """Returns the methods on the frontier, including those that share a point on it."""
    corners = {(point.bits, point.score) for point in frontier(found, task in LOWER_IS_BETTER)}
    return {point.method for point in found if (point.bits, point.score) in corners}


def _heading(task: str, cell: Cell, short_title: bool) -> str:
    context, chunk = cell
    where = short(context) if context else ""
    if short_title:
        return f"{where or 'all'}, chunks of {chunk or 'any size'}"
    name, _, unit = title(task).partition(", ")
    return f"{name} {where}, {unit}" if where else title(task)


def _value(point: Point | None, task: str, best: bool) -> str:
    """Formats score ± standard error, with the number of calibrations in brackets."""
    if point is None:
        return ""
    factor, form = (1, ".4f") if task in LOWER_IS_BETTER else (100, ".1f")
    text = format(factor * point.score, form)
    text = f"**{text}**" if best else text
    text += "" if point.se is None else f" ± {format(factor * point.se, form)}"
    return text + (f" ({point.calibrations})" if point.calibrations > 1 else "")


def _how(content: dict[str, Any], chosen: Sequence[tuple[str, Cell]], link: str, page: str) -> str:
    chunks = dict.fromkeys(cell[1] for _, cell in chosen)
    words = [f"{title(task).partition(',')[0]}: chunks of {cell[1] or 'any size'}" for task, cell in chosen]
    where = f"Prompts in chunks of {next(iter(chunks)) or 'any size'}" if len(chunks) == 1 else "; ".join(words)
    dirty = " with uncommitted changes" if content["dirty"] else ""
    commits = ", ".join(sha[:10] for sha in content["commit"].split(", "))
    return (
        "Bold: on the frontier, which no method of fewer bits matches and none of as many bits beats. In brackets: the "
        "number of calibrations behind mean and standard error; without it, the error is the task's own. "
        f"{where}. "
        f"{content['device']}, SGLang {content['versions'].get('sglang', 'unknown')}, {content['date']}, "
        f"commit {commits}{dirty}. From [{content['name']}.json]({link}) by "
        f"`kvq eval --report benchmarks/results/{content['name']}.json --out {page}`."
    )


def replace(text: str, name: str, new: str) -> str:
    """Replaces a map's block in a page by a new one.

    Raises:
        KVQuantError: the page has no such block.
    """
    pattern = re.compile(re.escape(begin(name)) + r".*?" + re.escape(END) + r"\n", re.DOTALL)
    if not pattern.search(text):
        raise KVQuantError(
            f"the page has no place for {name}: put the lines {begin(name)} and {END} where its table belongs."
        )
    return pattern.sub(lambda _: new, text, count=1)


def blocks(text: str) -> dict[str, str]:
    """Returns all maps' blocks of a page by name, markers included."""
    found = re.finditer(rf"<!-- map: (\S+) -->.*?{re.escape(END)}\n", text, re.DOTALL)
    return {match[1]: match[0] for match in found}
