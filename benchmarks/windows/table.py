"""Writes the tables of a sweep, and the page of all models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import ROOT
from benchmarks.windows.cases import BF16, Row
from benchmarks.windows.measure import KL
from sglang_kvq.cache.layout import CONTEXTS
from sglang_kvq.evaluation.tasks.base import short
from sglang_kvq.evaluation.tasks.statistics import paired_difference

RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results" / "windows.md"
#: The window of a server without flags; others are compared with it.
DEFAULT = (64, 256)
HEAD = """\
# Windows

`python -m benchmarks.windows --page` writes this page from the files named below.
[evaluation-reference.md](../evaluation-reference.md#windows) says how they are measured. `64 + 256` are the first 64
and the last 256 tokens in BF16, a server's default.

| column | |
|---|---|
| KL, top-1 | of the last tokens of each context; what lies between sink and window is read from records |
| less default | KL minus that of 64 + 256, paired by context: its error is smaller than that of two values |
| copies | share of random keys copied to the last token; every key asked for lies in the history of every window |
| copies, nats | negative log-likelihood of a token of the right key |
| bytes | of one request, its BF16 pages included, as a share of plain BF16 |

Programs and keys of 4K to 16K were measured by window with a server and Qwen2.5-Coder-1.5B-Instruct:
[accuracy_qwen2.5-coder-1.5b-instruct_windows](accuracy.md#qwen25-coder-15b-instruct).
"""


def table(rows: Sequence[Row]) -> str:
    """Returns a Markdown table for each method, with windows in rows."""
    parts = []
    bf16 = next((row for row in rows if row["case"] == BF16), None)
    rows = [row for row in rows if row["case"] != BF16]
    columns = list(
        dict.fromkeys(name for row in rows for name in row if f"{name}_se" in row and name not in ("kl", "top1"))
    )
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        default = next((row for row in mine if (row["sink"], row["recent"]) == DEFAULT), None)
        heads = ["sink + recent", "KL, nats", "less default", "top-1, %", *map(head, columns)]
        heads += [f"bytes at {short(context).upper()}, % of BF16" for context in CONTEXTS]
        lines = [heads, ["---"] * len(heads)]
        for row in sorted(mine, key=lambda row: (row["sink"], row["recent"])):
            cells = [
                f"{row['sink']} + {row['recent']}",
                with_error(row, "kl", 1, ".4f"),
                less_default(row, default),
                with_error(row, "top1", 100, ".1f"),
            ]
            cells += [cell(row, name) for name in columns]
            cells += [f"{100 * row[f'bytes_{short(context)}_share']:.1f}" for context in CONTEXTS]
            lines.append(cells)
        text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        parts.append(f"`{method}`, {mine[0]['bits']:.2f} bits per element:\n\n{text}")
    scores = [f"{head(name)} {cell(bf16, name)}" for name in columns if name in bf16] if bf16 else []
    if scores:
        parts.append(f"BF16: {'; '.join(scores)}.")
    return "\n\n".join(parts) + "\n"


def head(column: str) -> str:
    """Returns the title of a score's column."""
    return f"{column.removesuffix('_nats')}, nats" if column.endswith("_nats") else f"{column}, %"


def cell(row: Row, column: str) -> str:
    return with_error(row, column, 1, ".4f") if column.endswith("_nats") else with_error(row, column, 100, ".1f")


def with_error(row: Row, name: str, factor: float, form: str) -> str:
    if row.get(name) is None:
        return ""
    error = row.get(f"{name}_se")
    return format(factor * row[name], form) + ("" if error is None else f" ± {format(factor * error, form)}")


def less_default(row: Row, default: Row | None) -> str:
    """Returns KL minus the default window's, paired by context."""
    if default is None or row is default or "kl" not in row or "kl" not in default:
        return ""
    count = row[f"{KL}_used"]
    ours, theirs = ([kl for kl, _ in one[KL][:count]] for one in (row, default))
    mean, error = paired_difference(ours, theirs)
    return f"{mean:+.4f}" + ("" if error is None else f" ± {error:.4f}")


def page(files: Sequence[Path]) -> str:
    """Returns the page of all models, with one section for each file."""
    parts = [HEAD]
    for file in files:
        found = json.loads(file.read_text())
        rows = [row for row in found["rows"] if row["case"] != BF16]
        settings, used = rows[0]["settings"], rows[0]
        about = (
            f"{used[f'{KL}_used']} contexts of {settings['length']:,} tokens, of which the last {settings['measured']} "
            f"count; {' and '.join(text['file'] for text in settings['texts'])}."
        )
        for name in used:
            if name.endswith("_prompts_used"):
                prompts = used[name.removesuffix("_used")][: used[name]]
                about += f" {sum(asked for _, asked, *_ in prompts)} keys in {used[name]} prompts."
        source = f"[{file.name}](../../benchmarks/results/{file.name}), {found['device']}, {found['date']}."
        parts.append(f"## {file.stem.removeprefix('windows_')}\n\n{source} {about}\n\n{table(found['rows'])}")
    return "\n".join(parts)


def write_page() -> Path:
    """Writes the page from all results.

    Raises:
        SystemExit: there are no results.
    """
    files = sorted(RESULTS.glob("windows_*.json"))
    if not files:
        raise SystemExit(f"--page: no windows_*.json in {RESULTS.relative_to(ROOT)}. Measure a model first.")
    PAGE.write_text(page(files))
    return PAGE
