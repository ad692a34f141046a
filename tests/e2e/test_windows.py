"""A model with sliding windows in a whole server: answers against plain BF16's, prefix hits, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import ON_GPU
from tests.gpu.__main__ import main


@pytest.mark.skipif(ON_GPU, reason="python -m tests.gpu serves it there, beside all others")
@pytest.mark.timeout(1500)
def test_a_model_with_windows(tmp_path: Path):
    """A plain and an ``int4`` server agree where windows hold everything, and are close where a history is read."""
    out = tmp_path / "windows.json"
    logs = ("--logs", str(tmp_path / "logs"))
    code = main(
        ["--device", "cpu", "--only", "mellum", "--minutes", "22", "--lanes", "1", "--out", str(out), *logs],
    )
    rows = json.loads(out.read_text())["rows"]
    assert code == 0 and len(rows) == 11, [row for row in rows if not row["passed"]]
