"""The table in docs/notes/episodes.md of searches that find the evidence has the measured figures."""

from __future__ import annotations

import json
import re

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "notes" / "episodes.md").read_text()
MODELS = {"Qwen2.5": "qwen2.5-coder-0.5b-instruct", "SmolLM2": "smollm2-135m-instruct"}
COLUMNS = [(dataset, x) for dataset in ("locomo", "locomo_6k", "longchat", "needles") for x in (4, 6)]


def test_recall_is_as_measured() -> None:
    measured = {
        (label, row["pieces"], row["ranking"], row["neighbours"], row["dates"], row["dataset"], row["compression"]): row
        for label, model in MODELS.items()
        for row in json.loads((ROOT / "benchmarks" / "results" / f"recall_{model}.json").read_text())["rows"]
    }
    section = PAGE[PAGE.index("## Finding the evidence") : PAGE.index("## Gain kept")]
    lines = [
        [cell.strip(" *") for cell in line.strip("| \n").split("|")] for line in section.splitlines() if "|" in line
    ]
    table = [line for line in lines if line[0] in MODELS]
    assert len(table) >= 12
    for label, pieces, ranking, beside, *cells in table:
        pieces, _, dates = pieces.partition(", ")
        assert len(cells) == len(COLUMNS)
        for (dataset, compression), cell in zip(COLUMNS, cells):
            shown_dates = "turn" not in pieces if not dates else dates == "dates"
            pieces_of_row = "" if ranking == "recent" else pieces
            row = measured[label, pieces_of_row, ranking, beside, shown_dates, dataset, compression]
            shown, error = map(float, re.fullmatch(r"([\d.]+) ± ([\d.]+)", cell).groups())  # type: ignore[union-attr]
            assert abs(100 * row["recall"] - shown) <= 0.051 and abs(100 * row["recall_se"] - error) <= 0.051


def test_the_served_search_is_the_one_that_was_chosen() -> None:
    for model in MODELS.values():
        found = json.loads((ROOT / "benchmarks" / "results" / f"recall_{model}.json").read_text())
        assert found["chosen"] == {"pieces": "2 pages", "ranking": "fused", "neighbours": "none"}
