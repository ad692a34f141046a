"""The benchmark of copies to host memory runs without a GPU, and reports no speed for a wrong copy."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import host_rows
from sglang_kvq.cache.host_pages import HostLayout


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Sets the command's arguments and returns its output path."""
    out = tmp_path / "host_rows.json"
    words = ["--device", "cpu", "--pages", "3", "--layers", "4", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["host_rows.py", *words])
    return out


def test_rows_of_both_directions_and_formats(command):
    host_rows.main()
    result = json.loads(command.read_text())
    assert result["name"] == "host_rows" and result["versions"] and result["commit"]
    assert [row["case"] for row in result["rows"]] == [
        f"{way}, {name}, 3 pages" for name in ("2.25 bits", "mixed widths") for way in ("backup", "load")
    ]
    for row in result["rows"]:
        assert row["gb_per_s"] > 0 and row["torch_gb_per_s"] > 0 and row["whole_gb_per_s"] > 0
    two, mixed = (result["rows"][i]["page_bytes"] for i in (0, 2))
    assert two == 4 * 8 * 64 * 2 * 128 * 2.25 / 8 and mixed == 4 * 8 * 64 * 2 * 128 * (2.25 * 2 + 4.25 + 3.25) / 4 / 8


@pytest.mark.parametrize("way, old", [("backup", "backup"), ("load", "load_layer")])
def test_a_wrong_copy_has_no_speed(way, old, command, monkeypatch):
    copy = getattr(HostLayout, old)

    def wrong(self, pool, *given):
        copy(self, pool, *given)
        if way == "backup":
            given[1][given[2][-1], 5] ^= 1
        else:
            pool.records[given[0]][given[3][-1], 0, 5] ^= 1

    monkeypatch.setattr(HostLayout, old, wrong)
    with pytest.raises(SystemExit, match=f"{way}: .* no speed for a wrong result"):
        host_rows.main()
    assert not command.exists()


def test_a_gpu_that_is_not_there_is_named(command, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["host_rows.py"])
    with pytest.raises(SystemExit):
        host_rows.main()
    assert "--device cuda: there is no GPU. Use --device cpu" in capsys.readouterr().err
