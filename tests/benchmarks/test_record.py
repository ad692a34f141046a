"""The command that a result names can be run."""

from __future__ import annotations

import argparse
import sys

import pytest

from benchmarks import record


@pytest.mark.parametrize(
    "file, words",
    [
        ("benchmarks/kernels.py", ["benchmarks/kernels.py"]),
        ("benchmarks/research/episodes/__main__.py", ["-m", "benchmarks.research.episodes"]),
    ],
)
def test_command(file: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(record.ROOT / file), "--out", "x.json"])
    assert record.command() == ["python", *words, "--out", "x.json"]


def test_command_of_a_module_that_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imports from the root is recorded as ``python -m``, because its path alone would not run."""
    from importlib.machinery import ModuleSpec

    file = str(record.ROOT / "benchmarks/research/episodes/recall.py")
    monkeypatch.setattr(sys, "argv", [file, "--limit", "2"])
    monkeypatch.setattr(
        sys.modules["__main__"], "__spec__", ModuleSpec("benchmarks.research.episodes.recall", None, origin=file)
    )
    assert record.command() == ["python", "-m", "benchmarks.research.episodes.recall", "--limit", "2"]


@pytest.mark.parametrize(("words", "flags"), [([], []), (["--", "--tp", "2", "--"], ["--tp", "2", "--"])])
def test_words_after_two_dashes_are_for_servers(words: list[str], flags: list[str], monkeypatch: pytest.MonkeyPatch):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    monkeypatch.setattr(sys, "argv", ["x", "--out", "y", *words])
    assert record.parse(parser) == (argparse.Namespace(out="y"), flags)
