"""Draws the report's plots. This needs matplotlib (the ``eval`` extra); the rest of ``kvq eval`` does not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kvq.evaluation.report.page import title
from sglang_kvq.evaluation.report.rows import (
    LOWER_IS_BETTER,
    TASKS,
    Cell,
    Point,
    Row,
    frontier,
    is_map,
    points,
    representative,
    rows_of,
    select,
)
from sglang_kvq.evaluation.tasks.base import short

MISSING = "no plots: matplotlib is not installed (pip install 'sglang-kvq[eval]'); later: kvq eval --report FILE"
#: A plot's width in inches, and dots per inch. A page shows it in 800 pixels; the other dots are for fine screens.
WIDTH, DOTS = 8.0, 160
ACROSS = 3
#: Least range of an axis in bits, in percent, and as a factor on a logarithmic axis. Less would show noise as a trend.
LEAST_BITS, LEAST_PERCENT, LEAST_FACTOR = 2.0, 20.0, 10.0


@dataclass(frozen=True)
class Family:
    """Methods that differ only in width, calibration or chunks, or that need no calibration.

    Attributes:
        name: text in the legend.
        color, marker: in matplotlib's notation; unique to the family.
        labeled: True if the points are different methods and get labels, False for one method at several widths.
    """

    name: str
    color: str
    marker: str
    labeled: bool = False


#: Hues that color-blind readers can distinguish (Okabe and Ito); two have a lighter shade for mixed precision.
FAMILIES = {
    "fixed": Family("hadamard, int2, int4", "#7f7f7f", "s", labeled=True),
    "kivi": Family("kivi", "#e69f00", "D"),
    "turboquant": Family("turboquant", "#cc79a7", "^"),
    "oscar": Family("oscar", "#0072b2", "o"),
    "oscar auto": Family("oscar auto", "#56b4e9", "P"),
    "oscar-lloyd-max": Family("oscar-lloyd-max", "#009e73", "v"),
    "oscar-lloyd-max auto": Family("oscar-lloyd-max auto", "#8fd19e", "X"),
    "transform": Family("transform", "#d55e00", "*"),
    "other": Family("other", "#000000", "h", labeled=True),
}
#: Methods drawn as horizontal lines: name, color and line style.
REFERENCES = {"none": ("BF16", "#000000", ":"), "fp8": ("FP8", "#000000", "--")}


def family_of(method: str) -> Family:
    """Returns the family of a quantized method, given its name from ``specs.method_of``.

    ``oscar:auto:2.6`` is in ``oscar auto``; a name from ``--name`` is in ``other``.
    """
    head, _, width = method.split(" ")[0].partition(":")
    if head in ("hadamard", "int2", "int4"):
        return FAMILIES["fixed"]
    name = f"{head} auto" if width.startswith("auto") and f"{head} auto" in FAMILIES else head
    return FAMILIES.get(name, FAMILIES["other"])


def draw(content: dict[str, Any], path: Path, with_map: bool = True) -> list[Path] | None:
    """Draws the plots that a report or map has values for, next to ``path``, its JSON file.

    Args:
        with_map: False for a report whose model has a map file, which shows the same plot.

    Returns:
        The plots' paths; None without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    found = [_map(content, path.with_suffix(".png"))] if with_map else []
    if not is_map(content):
        found.append(_needles(content, path.with_name(f"{path.stem}_needle.png")))
    return [plot for plot in found if plot]


def panels(rows: Sequence[Row]) -> list[tuple[str, Cell]]:
    """Returns the tasks that a map shows, each in its representative context and chunk size; KL comes first.

    Top-1 agreement and perplexity show the same as KL, so they are only in the table. A task that no quantized method
    measured is left out.
    """
    tasks = [task for task in TASKS if task not in ("top1", "perplexity")]
    chosen = [(task, cell) for task in tasks if (cell := representative(rows, task)) is not None]
    return [column for column in chosen if any(point.quantized for point in points(select(rows, *column)))]


def _map(content: dict[str, Any], target: Path) -> Path | None:
    """Plots quality against allocated bits: KL (logarithmic) large, every other task in a small panel below."""
    from matplotlib import pyplot

    rows = rows_of(content)
    shown = panels(rows)
    if not shown:
        return None
    large = [column for column in shown if column[0] == "kl"]
    small = [column for column in shown if column[0] != "kl"]
    heights = [3.8] * len(large) + [2.4] * -(-len(small) // ACROSS)
    pyplot.rcParams.update({"font.size": 9})
    figure = pyplot.figure(figsize=(WIDTH, sum(heights) + 0.9), layout="constrained")
    grid = figure.add_gridspec(len(heights), ACROSS, height_ratios=heights)
    axes = [figure.add_subplot(grid[0, :]) for _ in large]
    axes += [figure.add_subplot(grid[len(large) + at // ACROSS, at % ACROSS]) for at in range(len(small))]
    legend: dict[str, Any] = {}
    for at, (one, (task, cell)) in enumerate(zip(axes, [*large, *small], strict=True)):
        legend |= panel(one, select(rows, task, cell), task)
        where = ", ".join(filter(None, [short(cell[0]) if cell[0] else "", f"chunks of {cell[1]}" if cell[1] else ""]))
        if task == "kl":
            one.set_ylabel("KL from BF16, nats per token")
            one.set_title(f"{content['model']}, {content['device']}, {where}", fontsize="medium")
        else:
            one.set_ylabel("nats per token" if task in LOWER_IS_BETTER else "%")
            one.set_title(", ".join(filter(None, [title(task).partition(",")[0], where])), fontsize="small")
        if at >= len(axes) - ACROSS or task == "kl":
            one.set_xlabel("allocated bits per element")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.savefig(target, dpi=DOTS)
    pyplot.close(figure)
    return target


def panel(axes: Any, rows: Sequence[Row], task: str) -> dict[str, Any]:
    """Plots one task; returns its legend's handles by name."""
    logarithmic = task in LOWER_IS_BETTER
    factor = 1.0 if logarithmic else 100.0
    legend: dict[str, Any] = {}
    drawn: dict[Family, list[Point]] = {}
    for point in points(rows):
        if point.quantized:
            drawn.setdefault(family_of(point.method), []).append(point)
        elif not (logarithmic and point.score <= 0):
            name, color, style = REFERENCES[re.split("[: ]", point.method)[0]]
            legend[name] = axes.axhline(factor * point.score, color=color, linestyle=style, linewidth=1)
    for family in sorted(drawn, key=list(FAMILIES.values()).index):
        legend[family.name] = _series(axes, family, drawn[family], factor, logarithmic)
    best = frontier([point for of in drawn.values() for point in of], logarithmic)
    (legend["frontier"],) = axes.step(
        [point.bits for point in best],
        [factor * point.score for point in best],
        where="post",
        color="#c8c8c8",
        linewidth=2.5,
        zorder=0,
    )
    if logarithmic:
        axes.set_yscale("log")
    _widen(axes, logarithmic)
    for family in drawn:
        if family.labeled:
            _label(axes, family, drawn[family], factor)
    axes.grid(alpha=0.25)
    return legend


def _widen(axes: Any, logarithmic: bool) -> None:
    """Widens axes below the least range, with the values in their middle; percentages stay within 0 and 100."""
    axes.autoscale_view()  # limits are computed only when something requests them
    low, high = axes.get_xlim()
    missing = max(0.0, LEAST_BITS - (high - low)) / 2
    axes.set_xlim(low - missing, high + missing)
    low, high = axes.get_ylim()
    if logarithmic:
        missing = max(1.0, LEAST_FACTOR / (high / low)) ** 0.5
        axes.set_ylim(low / missing, high * missing)
    elif high - low < LEAST_PERCENT:
        low = min(max((low + high - LEAST_PERCENT) / 2, 0.0), 100 - LEAST_PERCENT)
        axes.set_ylim(low - 2, low + LEAST_PERCENT + 2)  # markers on the edge are drawn whole


def _series(axes: Any, family: Family, found: Sequence[Point], factor: float, logarithmic: bool) -> Any:
    """Plots a family's points with error bars; joins them by a thin line if they are one method at several widths."""
    found = sorted(found, key=lambda point: point.bits)
    scores = [factor * point.score for point in found]
    errors = [factor * (point.se or 0.0) for point in found]
    # The lower halves of error bars must not reach zero on a logarithmic axis.
    lower = [min(error, 0.9 * score) if logarithmic else error for error, score in zip(errors, scores, strict=True)]
    return axes.errorbar(
        [point.bits for point in found],
        scores,
        yerr=[lower, errors],
        fmt=family.marker,
        color=family.color,
        linestyle="none" if family.labeled else "-",
        linewidth=0.6,
        elinewidth=1,
        capsize=2,
        markersize=11 if family.marker == "*" else 7.5,
        markeredgecolor="white",
        markeredgewidth=0.4,
    )


def _label(axes: Any, family: Family, found: Sequence[Point], factor: float) -> None:
    """Writes names next to points, on the side away from the edge; points too close to each other share a label."""
    into_axes = axes.transData + axes.transAxes.inverted()
    labels: list[tuple[float, float, list[Point]]] = []
    for point in sorted(found, key=lambda point: (point.bits, point.score)):
        across, up = into_axes.transform((point.bits, factor * point.score))
        if labels and abs(labels[-1][0] - across) < 0.1 and abs(labels[-1][1] - up) < 0.06:
            labels[-1][2].append(point)
        else:
            labels.append((across, up, [point]))
    for across, _, points_there in labels:
        axes.annotate(
            ", ".join(point.method for point in points_there),
            (points_there[0].bits, factor * points_there[-1].score),
            xytext=(6, 3) if across < 0.6 else (-6, 3),
            ha="left" if across < 0.6 else "right",
            textcoords="offset points",
            fontsize="x-small",
            color=family.color,
        )


def _needles(report: dict[str, Any], target: Path) -> Path | None:
    """Plots the share of needles found, by length and depth, with a panel per method."""
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if row.get("needle_grid")]
    if not rows:
        return None
    across = min(4, len(rows))
    down = -(-len(rows) // across)
    size = (3.2 * across, 2.6 * down)
    figure, grid = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    image: Any = None
    for axes, row in zip(grid.flat, rows):
        cells = row["needle_grid"]
        image = axes.imshow(cells["passed"], vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(cells["lengths"])), list(map(str, cells["lengths"])), rotation=45, fontsize="x-small")
        axes.set_yticks(range(len(cells["depths"])), [f"{depth:g}%" for depth in cells["depths"]], fontsize="x-small")
        axes.set_title(f"{row['method']} ({row['needle']:.0%})", fontsize="small")
    for axes in list(grid.flat)[len(rows) :]:
        axes.axis("off")
    figure.colorbar(image, ax=grid, label="found", shrink=0.8)
    figure.suptitle(f"Needle by length (tokens) and depth: {report['model']}", fontsize="medium")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target
