"""``python -m tests.gpu`` under pytest, on a machine with a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.__main__ import main


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_every_family_and_case(tmp_path: Path):
    out = tmp_path / "gpu.json"
    code = main(["--out", str(out)])
    failed = [row for row in json.loads(out.read_text())["rows"] if not row["passed"]]
    assert code == 0 and not failed, failed
