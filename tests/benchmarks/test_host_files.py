"""The benchmark of stored pages runs on a CPU, and reports no speed for a wrong page."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import host_files
from sglang_kvq.sglang.hicache.stores import READERS


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Sets the command's arguments and returns its output path."""
    out = tmp_path / "host_files.json"
    words = ["--pages", "5", "--layers", "2", "--folder", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["host_files.py", *words])
    return out


def test_rows_of_one_reader_and_of_those_that_serve(command):
    host_files.main()
    rows = json.loads(command.read_text())["rows"]
    assert [(row["readers"], row["direct"]) for row in rows] == [(1, False), (1, True), (READERS, True)]
    assert all(row[name] > 0 for row in rows for name in ("disk_gb_per_s", "memory_gb_per_s"))
    assert all(row["step_us_beside_p99"] >= row["step_us_beside"] > 0 and row["pages"] == 5 for row in rows)
    assert not list(command.parent.glob("*/*.bin")), "the files are removed"


def test_a_wrong_page_has_no_speed(command, monkeypatch):
    read = host_files.Files.read

    def wrong(self):
        read(self)
        self.rows[self.pages + 3, 7] ^= 1

    monkeypatch.setattr(host_files.Files, "read", wrong)
    with pytest.raises(SystemExit, match="differs .* no speed for a wrong result"):
        host_files.main()
    assert not command.exists()


def test_a_lost_file_has_no_speed(command, monkeypatch):
    forget = host_files.forget_files

    def lose(folder):
        next(folder.glob("page3_*.bin")).unlink()
        forget(folder)

    monkeypatch.setattr(host_files, "forget_files", lose)
    with pytest.raises(SystemExit, match="not all came back; no speed for a wrong result"):
        host_files.main()
    assert not command.exists()


@pytest.mark.parametrize("words", [["--pages", "0"], ["--layers", "-1"], ["--readers", "4", "0"]], ids=" ".join)
def test_impossible_numbers_are_named(command, monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", [*sys.argv, *words])
    with pytest.raises(SystemExit):
        host_files.main()
    assert f"{words[0]} {words[-1]}: it must be at least 1." in capsys.readouterr().err and not command.exists()
