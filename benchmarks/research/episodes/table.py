"""Prints gains kept, from result files of the oracle, as the tables of docs/notes/episodes.md.

python -m benchmarks.research.episodes.table benchmarks/results/episodes_*.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_kvq.sessions.config import ALIASES

#: If the full cache gains less than this over none, in nats per answer token, there is too little gain to keep.
LEAST_GAIN = 0.2


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Yields Markdown lines of one file: the gain of the full cache, then every policy's share of it."""
    rows = result["rows"]
    exact = [row for row in rows if row["kv_quant"] == "none"]
    ends = {(row["dataset"], row["policy"]): row for row in exact if row["compression"] is None}
    data_sets = list(dict.fromkeys(row["dataset"] for row in rows))
    gains = {d: ends[d, "full"]["logprob"] - ends[d, "none"]["logprob"] for d in data_sets}
    shown = [d for d in data_sets if gains[d] >= LEAST_GAIN]
    yield f"| {result['model']} | " + " | ".join(data_sets) + " |"
    yield "|---" * (len(data_sets) + 1) + "|"
    for name, of in (
        ("conversations, questions", lambda row: f"{row['conversations']}, {row['questions']}"),
        ("tokens of history", lambda row: f"{row['history_tokens']:,.0f}"),
        ("nats per answer token, full cache", lambda row: f"{row['logprob']:.2f}"),
    ):
        yield f"| {name} | " + " | ".join(of(ends[d, "full"]) for d in data_sets) + " |"
    yield "| gained over no history | " + " | ".join(f"{gains[d]:.2f}" for d in data_sets) + " |"
    yield ""
    compressions = sorted({row["compression"] for row in exact if row["compression"]})
    yield "| policy | by | pages | " + " | ".join(f"{d} {c:g}x" for d in shown for c in compressions) + " |"
    yield "|---" * (3 + len(shown) * len(compressions)) + "|"
    named: dict[tuple[str, str | None, str], dict[tuple[str, float | None], Any]] = {}
    for row in rows:
        name = ALIASES.get(row["policy"], row["policy"]), row["matching"], row["kv_quant"]
        named.setdefault(name, {})[row["dataset"], row["compression"]] = row
    for (policy, matching, kv_quant), of in sorted(named.items(), key=lambda item: item[0][2] != "none"):
        if policy in ("full", "none") and kv_quant == "none":
            continue
        # A full cache has no compression.
        cells = [_gain(of.get((d, c)) or of.get((d, None))) for d in shown for c in compressions]
        pages = "BF16" if kv_quant == "none" else f"`{kv_quant}`"
        yield f"| `{policy}` | {matching or ''} | {pages} | " + " | ".join(cells) + " |"


def _gain(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['gain_kept']:.2f} ± {row['gain_kept_se']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        print("\n".join(tables(json.loads(file.read_text()))), end="\n\n")


if __name__ == "__main__":
    main()
