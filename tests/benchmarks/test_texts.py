"""Texts that calibration and measurement use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import texts


def test_no_character_is_in_both_parts():
    text = "".join(map(chr, range(33, 133)))
    seen, held_out = texts.split(text, 0.8)
    assert seen + held_out == text and len(held_out) == 20


def test_every_fourth_module_and_no_tests(tmp_path):
    for n in range(9):
        (tmp_path / f"m{n}.py").write_text(f"x = {n}")
    for folder in ("test", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("assert False")
    assert texts.modules(tmp_path) == "x = 0\nx = 4\nx = 8"


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no Python modules"):
        texts.modules(tmp_path)
    with pytest.raises(SystemExit, match="no_such_package is not installed: pip install"):
        texts.package("no_such_package")


def test_the_command_writes_four_texts(tmp_path):
    (tmp_path / "valid.txt").write_text("a" * 80 + "b" * 20)
    command = [sys.executable, "-m", "benchmarks.texts", tmp_path / "valid.txt", tmp_path / "out"]
    root = Path(texts.__file__).parent.parent
    printed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    found = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert found["wikitext2_valid_first80.txt"] == "a" * 80 and found["wikitext2_valid_last20.txt"] == "b" * 20
    assert len(found) == 4 and all(name in printed for name in found)
    assert len(found["python_stdlib.txt"]) == len(found["python_sklearn.txt"]) == texts.MOST
