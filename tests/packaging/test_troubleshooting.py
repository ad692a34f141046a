"""Every message that docs/troubleshooting.md quotes still occurs in the sources."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
#: Messages quoted in tables whose first column is headed "message"; "…" replaces any text.
QUOTES = [
    quote
    for table in re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for quote in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
]


@cache
def texts() -> str:
    """Returns every string of the package, one per line; "…" replaces the values of an f-string."""
    nodes = [n for path in (ROOT / "sglang_kvq").rglob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    strings = [n.values if isinstance(n, ast.JoinedStr) else [n] for n in nodes if isinstance(n, ast.expr)]
    joined = ("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts) for parts in strings)
    return "\n".join(text.replace("\n", " ") for text in joined)


@pytest.mark.parametrize("quote", QUOTES)
def test_the_message_is_in_the_sources(quote: str) -> None:
    assert re.search(".*".join(map(re.escape, quote.split("…"))), texts()), quote


def test_every_table_of_messages_is_read() -> None:
    assert len(QUOTES) == len(re.findall(r"^\| `", PAGE, re.MULTILINE)) - 4  # four are messages of other programs


def test_who_has_no_rotations_is_sent_to_int4() -> None:
    """docs/methods.md and README recommend it without calibration; ``hadamard`` is a baseline."""
    none_needed = re.compile(r"--(kv-quant|method) .*needs? (none|no rotations)\b")
    advice = [line for line in texts().splitlines() if none_needed.search(line)]
    assert advice and all("int4" in line and "hadamard" not in line for line in advice), advice
