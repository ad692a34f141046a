"""Draws one figure with all workloads of a result file."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.bench_serving.tables import NAMES, bench_rows, methods_of

#: Colors as in the accuracy maps; color-blind readers can distinguish them.
COLORS = {"none": "#7f7f7f", "fp8": "#000000", "oscar": "#0072b2", "transform:2.5": "#d55e00"}
OTHERS = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def plot(out: Path) -> Path | None:
    """Draws output rate, time to the first token and goodput of each method; None without matplotlib or rows."""
    try:
        import matplotlib
    except ImportError:
        print(f"no plot: matplotlib is not installed. Elsewhere: python benchmarks/workloads.py --plot --out {out}")
        return None
    result = json.loads(out.read_text())
    rows = [row for row in bench_rows(result["rows"]) if "/" not in row["scenario"]]
    if not rows:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = methods_of(rows)
    titles = list(dict.fromkeys(row["title"] for row in rows))
    by = {(row["title"], row["method"]): row for row in rows}
    colors = dict(zip([name for name in methods if name not in COLORS], OTHERS * len(methods))) | COLORS
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    width = 0.8 / len(methods)
    for number, name in enumerate(methods):
        places = [at + (number - (len(methods) - 1) / 2) * width for at in range(len(titles))]
        found = [(place, by[title, name]) for place, title in zip(places, titles) if (title, name) in by]
        at, mine = [place for place, _ in found], [row for _, row in found]
        style = {"width": width * 0.95, "color": colors[name], "label": NAMES.get(name, name.replace(":", " "))}
        axes[0].bar(at, [row["output_tokens_per_s"] for row in mine], **style)
        middle = [row["ttft_p50_ms"] / 1e3 for row in mine]
        above = [max(0.0, row["ttft_p99_ms"] / 1e3 - half) for row, half in zip(mine, middle)]
        axes[1].bar(at, middle, yerr=[[0.0] * len(mine), above], ecolor="#555555", capsize=2, **style)
        axes[2].bar(at, [row["goodput_per_s"] for row in mine], **style)
    axes[0].set(ylabel="output tokens a second", title=f"{result['device']}, SGLang {result['versions'].get('sglang')}")
    axes[1].set(ylabel="s to the first token,\nmedian and 99th percentile", yscale="log")
    axes[2].set(ylabel="goodput, requests a second")
    axes[2].set_xticks(range(len(titles)), [title.replace(", ", "\n") for title in titles], fontsize="small")
    axes[0].legend(ncols=len(methods), fontsize="small", frameon=False)
    target = out.with_name(f"{out.stem}_workloads.png")
    figure.savefig(target, dpi=150)
    pyplot.close(figure)
    return target
