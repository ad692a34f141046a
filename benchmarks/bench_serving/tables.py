"""Formats rows of workloads as a short table for the terminal, and as the tables of docs/performance.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]
NAMES = {"none": "BF16", "fp8": "FP8"}
ORDER = ("none", "fp8", "oscar", "transform:2.5")
BENCH = "bench "


def bench_rows(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of workloads among all rows of a result file."""
    return [row for row in rows if str(row.get("scenario", "")).rpartition("/")[2].startswith(BENCH)]


def methods_of(rows: Sequence[Row]) -> list[str]:
    """Returns the methods of rows: those in ``ORDER`` first, then others by name."""
    found = {row["method"] for row in rows}
    return [*(name for name in ORDER if name in found), *sorted(found - {*ORDER})]


def heading(method: str) -> str:
    """Returns a column's heading, such as ``BF16 `--flag 1```: BF16 and FP8 are named as such, with their flags."""
    name, space, flags = method.partition(" ")
    if name not in NAMES:
        return f"`{method.replace(':', ' ')}`"
    return NAMES[name] + (f" `{flags}`" if space else "")


def least(row: Row, name: str) -> str:
    """Returns a percentile of the time to the first token in ms; prefixed with ≥ if its request still waits."""
    percent = int(name.removeprefix("ttft_p").removesuffix("_ms"))
    requests = row["completed"] + row["cut"]
    waits = row["waited"] > requests * (1 - percent / 100)
    return f"{'≥ ' if waits else ''}{row[name]:,.0f}"


def _tokens(row: Row, plain: Row | None) -> str:
    text = f"{row['output_tokens_per_s']:,.0f}"
    if plain is None or plain is row:
        return text
    return f"{text} ({row['output_tokens_per_s'] / plain['output_tokens_per_s']:.2f}x)"


def _running(row: Row, plain: Row | None) -> str:
    lost = row.get("lost_window_pages")
    return f"{row['decoding']}" + (f" ({lost:.0f} pages)" if lost else "")


#: Tables: a title, and a function from a row and BF16's row to a cell's text.
TABLES: tuple[tuple[str, Callable[[Row, Row | None], str]], ...] = (
    ("Output tokens a second, and relative to BF16", _tokens),
    (
        "Time to the first token in ms: median, 99th percentile",
        lambda row, plain: f"{least(row, 'ttft_p50_ms')}, {least(row, 'ttft_p99_ms')}",
    ),
    (
        "Time per later token in ms: median, 99th percentile",
        lambda row, plain: "" if row["tpot_p50_ms"] is None else f"{row['tpot_p50_ms']:.1f}, {row['tpot_p99_ms']:.1f}",
    ),
    ("Requests decoded at once, at most; window pages that they had lost, at most", _running),
    ("Goodput: requests a second within the limits", lambda row, plain: f"{row['goodput_per_s']:.2f}"),
)


def markdown(rows: Sequence[Row]) -> str:
    """Returns the tables of a result file's workloads; empty if it has none."""
    rows = bench_rows(rows)
    if not rows:
        return ""
    methods, parts = methods_of(rows), []
    workloads = list(dict.fromkeys((_model(row), row["title"]) for row in rows))
    by = {(_model(row), row["title"], row["method"]): row for row in rows}
    for title, cell in TABLES:
        lines = [["workload", *map(heading, methods)], ["---"] * (1 + len(methods))]
        for model, name in workloads:
            plain = by.get((model, name, "none"))
            cells = [by.get((model, name, method)) for method in methods]
            lines.append([f"{model}{name}", *("" if row is None else cell(row, plain) for row in cells)])
        parts.append(_table(title, lines))
    limits = {row["title"]: (row["ttft_limit_ms"], row["tpot_limit_ms"]) for row in rows}
    lines = [["workload", "first token", "later ones"], ["---"] * 3]
    lines += [[name, f"{ttft:,.0f} ms", f"{tpot:,.0f} ms"] for name, (ttft, tpot) in limits.items()]
    parts.append(_table("Limits of goodput", lines))
    return "\n\n".join(parts) + "\n"


def first_tokens(rows: Sequence[Row]) -> str:
    """Returns the table of ``benchmarks/first_tokens.py``, with times relative to BF16's."""
    by = {row["method"]: row for row in rows}
    lines = [["prompts at once", *map(heading, methods_of(rows))], ["---"] * (1 + len(by))]
    for name in (name for name in rows[0] if name.startswith("ttft_")):
        tokens, count = name.removeprefix("ttft_").removesuffix("_ms").split("x")
        cells = [f"{count} of {int(tokens):,} tokens"]
        for method in methods_of(rows):
            ratio = f" ({by[method][name] / by['none'][name]:.2f}x)" if method != "none" and "none" in by else ""
            cells.append(f"{by[method][name]:.1f}{ratio}")
        lines.append(cells)
    after = f" after {rows[0]['after']:,} cached tokens" if rows[0].get("after") else ""
    return _table(f"Time to the first token of short prompts{after} on an idle server, in ms", lines)


def _table(title: str, lines: Sequence[Sequence[str]]) -> str:
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _model(row: Row) -> str:
    """Returns the model's name and a comma if the scenario begins with a model; else nothing."""
    model, slash, _ = row["scenario"].rpartition("/")
    return f"{model}, " if slash else ""


HEAD = (
    f"{'workload':10} {'method':24} {'s':>6} {'out tok/s':>10} {'TTFT p50':>9} {'p99 ms':>10} {'TPOT p50':>9} "
    f"{'at once':>8} {'lost':>6} {'goodput':>8} {'done':>6} {'cut':>5}"
)


def line(row: Row) -> str:
    """Formats a row as a line of the terminal, to be printed below ``HEAD``."""
    tpot = math.nan if row["tpot_p50_ms"] is None else row["tpot_p50_ms"]
    lost = row.get("lost_window_pages")
    return (
        f"{row['workload']:10} {row['method'][:24]:24} {row['seconds']:6.1f} {row['output_tokens_per_s']:10.1f} "
        f"{least(row, 'ttft_p50_ms'):>9} {least(row, 'ttft_p99_ms'):>10} {tpot:9.1f} {row['decoding']:8} "
        f"{'-' if lost is None else f'{lost:.0f}':>6} {row['goodput_per_s']:8.2f} {row['completed']:6} {row['cut']:5}"
    )
