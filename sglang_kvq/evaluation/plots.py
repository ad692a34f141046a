"""The report's plots. Needs matplotlib (the ``eval`` extra); everything else works without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_kvq.evaluation import map_table
from sglang_kvq.evaluation.families import FAMILIES, Family, family_of, reference_of
from sglang_kvq.evaluation.frontier import LOWER_IS_BETTER, Point, Row, frontier, points, representative, select
from sglang_kvq.evaluation.map_rows import TASKS, is_map, rows_of
from sglang_kvq.evaluation.map_table import Cell
from sglang_kvq.evaluation.tasks.needle import short

MISSING = "no plots: matplotlib is not installed (pip install 'sglang-kvq[eval]'); later: kvq eval --report FILE"
#: Eight inches make 800 pixels of a page; twice as many dots for fine screens.
WIDTH, DOTS = 8.0, 160
ACROSS = 3


def draw(content: dict[str, Any], path: Path, with_map: bool = True) -> list[Path] | None:
    """Draws the plots that a report or map has values for, next to ``path`` (its JSON file); None without matplotlib.

    Args:
        with_map: False for a report whose model has a map file, which shows the same plot.
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

    Top-1 agreement says the same as KL and is only in the table. A task without a quantized method is left out.
    """
    chosen = [(task, cell) for task in TASKS if task != "top1" and (cell := representative(rows, task)) is not None]
    return [(task, cell) for task, cell in chosen if any(family_of(row["method"]) for row in select(rows, task, cell))]


def _map(content: dict[str, Any], target: Path) -> Path | None:
    """Plots quality against allocated bits: KL (logarithmic) large, every other task in a small panel below."""
    from matplotlib import pyplot

    rows = rows_of(content)
    shown = panels(rows)
    if not shown:
        return None
    large = [column for column in shown if column[0] == "kl"]
    small = [column for column in shown if column[0] != "kl"]
    down = -(-len(small) // ACROSS)
    heights = [3.8] * len(large) + [2.4] * down
    pyplot.rcParams.update({"font.size": 9})
    figure = pyplot.figure(figsize=(WIDTH, sum(heights) + 0.9), layout="constrained")
    grid = figure.add_gridspec(len(heights), ACROSS, height_ratios=heights)
    axes = [figure.add_subplot(grid[0, :]) for _ in large]
    axes += [figure.add_subplot(grid[len(large) + at // ACROSS, at % ACROSS]) for at in range(len(small))]
    legend: dict[str, Any] = {}
    for at, (one, (task, cell)) in enumerate(zip(axes, [*large, *small], strict=True)):
        legend |= _panel(one, select(rows, task, cell), task, cell, title=f"{content['model']}, {content['device']}, ")
        if at >= len(axes) - ACROSS or task == "kl":
            one.set_xlabel("allocated bits per element")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.savefig(target, dpi=DOTS)
    pyplot.close(figure)
    return target


def _panel(axes: Any, rows: Sequence[Row], task: str, cell: Cell, title: str) -> dict[str, Any]:
    """Plots one task; returns the handles of its legend by name."""
    factor = 1.0 if task in LOWER_IS_BETTER else 100.0
    legend: dict[str, Any] = {}
    found = points(rows)
    drawn: dict[Family, list[Point]] = {}
    for point in found:
        if family := family_of(point.method):
            drawn.setdefault(family, []).append(point)
        elif (line := reference_of(point.method)) and not (task in LOWER_IS_BETTER and point.score <= 0):
            name, color, style = line
            legend[name] = axes.axhline(factor * point.score, color=color, linestyle=style, linewidth=1)
    for family in sorted(drawn, key=list(FAMILIES.values()).index):
        legend[family.name] = _series(axes, family, drawn[family], factor, task in LOWER_IS_BETTER)
    best = frontier([point for of in drawn.values() for point in of], task in LOWER_IS_BETTER)
    (legend["frontier"],) = axes.step(
        [point.bits for point in best],
        [factor * point.score for point in best],
        where="post",
        color="#c8c8c8",
        linewidth=2.5,
        zorder=0,
    )
    context, chunk = cell
    where = ", ".join(filter(None, [short(context) if context else "", f"chunks of {chunk}" if chunk else ""]))
    if task in LOWER_IS_BETTER:
        axes.set_yscale("log")
    for family in drawn:
        if family.labelled:
            _label(axes, family, drawn[family], factor)
    if task == "kl":
        axes.set_ylabel("KL from BF16, nats per token")
        axes.set_title(f"{title}{where}", fontsize="medium")
    else:
        axes.set_ylabel("nats per token" if task in LOWER_IS_BETTER else "%")
        name = map_table.title(task).partition(",")[0]
        axes.set_title(f"{name}, {where}" if where else name, fontsize="small")
    axes.grid(alpha=0.25)
    return legend


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
        linestyle="none" if family.labelled else "-",
        linewidth=0.6,
        elinewidth=1,
        capsize=2,
        markersize=11 if family.marker == "*" else 7.5,
        markeredgecolor="white",
        markeredgewidth=0.4,
    )


def _label(axes: Any, family: Family, found: Sequence[Point], factor: float) -> None:
    """Writes names next to points, on the side away from the edge; points too close to each other share a label."""
    axes.autoscale_view()  # limits are computed only when something requests them
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
    """Plots the share of needles found, by length and depth, a panel per method."""
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if row.get("needle_grid")]
    if not rows:
        return None
    across = min(4, len(rows))
    down = -(-len(rows) // across)
    figure, grid = pyplot.subplots(
        down, across, figsize=(3.2 * across, 2.6 * down), squeeze=False, layout="constrained"
    )
    image: Any = None
    for axes, row in zip(grid.flat, rows):
        cells = row["needle_grid"]
        image = axes.imshow(cells["passed"], vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(
            range(len(cells["lengths"])), [str(n) for n in cells["lengths"]], rotation=45, fontsize="x-small"
        )
        axes.set_yticks(range(len(cells["depths"])), [f"{depth:g}%" for depth in cells["depths"]], fontsize="x-small")
        axes.set_title(f"{row['method']} ({row['needle']:.0%})", fontsize="small")
    for axes in list(grid.flat)[len(rows) :]:
        axes.axis("off")
    figure.colorbar(image, ax=grid, label="found", shrink=0.8)
    figure.suptitle(f"Needle by length (tokens) and depth: {report['model']}", fontsize="medium")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target
