"""The report's pictures. Needs matplotlib (the ``eval`` extra); everything else works without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MISSING = "no plots: matplotlib is not installed (pip install 'sglang-kvq[eval]'); later: kvq eval --report FILE"


def draw(report: dict[str, Any], path: Path) -> list[Path] | None:
    """The plots that a report has values for, beside ``path`` (its JSON file); None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    found = [_divergence(report, path.with_suffix(".png")), _needles(report, path.with_name(f"{path.stem}_needle.png"))]
    return [plot for plot in found if plot]


def _divergence(report: dict[str, Any], target: Path) -> Path | None:
    """KL (logarithmic) against allocated bits, a point per method."""
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if row.get("kl") and row["kl"] > 0 and row["method"] != "none"]
    noise = next((row["kl"] for row in report["rows"] if row["method"] == "none" and row.get("kl")), None)
    if not rows:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 5))
    # Lower halves of error bars must not reach zero on a logarithmic axis.
    for index, row in enumerate(sorted(rows, key=lambda row: row["kl"])):
        error = row.get("kl_se") or 0.0
        bars = [[min(error, 0.9 * row["kl"])], [error]]
        style: dict[str, Any] = {
            "fmt": "osD^v<>P*X"[index % 10],
            "capsize": 3,
            "label": f"{row['method']}: {row['kl']:.4f}",
        }
        axes.errorbar([row["allocated_bits"]], [row["kl"]], yerr=bars, **style)
    if noise and noise > 0:
        axes.axhline(noise, color="grey", linestyle=":", label=f"none, run twice: {noise:.4f}")
    axes.set_yscale("log")
    axes.set(
        xlabel="allocated bits per element",
        ylabel="KL from BF16, nats per token",
        title=f"{report['model']}, {report['device']}",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(target, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return target


def _needles(report: dict[str, Any], target: Path) -> Path | None:
    """Share found, by length and depth, a panel per method."""
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if row.get("needle_grid")]
    if not rows:
        return None
    across = min(4, len(rows))
    down = -(-len(rows) // across)
    figure, panels = pyplot.subplots(
        down, across, figsize=(3.2 * across, 2.6 * down), squeeze=False, layout="constrained"
    )
    image: Any = None
    for axes, row in zip(panels.flat, rows):
        grid = row["needle_grid"]
        image = axes.imshow(grid["passed"], vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(grid["lengths"])), [str(n) for n in grid["lengths"]], rotation=45, fontsize="x-small")
        axes.set_yticks(range(len(grid["depths"])), [f"{depth:g}%" for depth in grid["depths"]], fontsize="x-small")
        axes.set_title(f"{row['method']} ({row['needle']:.0%})", fontsize="small")
    for axes in list(panels.flat)[len(rows) :]:
        axes.axis("off")
    figure.colorbar(image, ax=panels, label="found", shrink=0.8)
    figure.suptitle(f"Needle by length (tokens) and depth: {report['model']}", fontsize="medium")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target
