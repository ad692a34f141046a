"""The command that a result names is one that runs."""

from __future__ import annotations

import sys

import pytest

from benchmarks import record


@pytest.mark.parametrize(
    "file, words",
    [
        ("benchmarks/kernels.py", ["benchmarks/kernels.py"]),
        ("benchmarks/episodes/__main__.py", ["-m", "benchmarks.episodes"]),
    ],
)
def test_command(file: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(record.ROOT / file), "--out", "x.json"])
    assert record.command() == ["python", *words, "--out", "x.json"]
