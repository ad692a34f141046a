"""``benchmarks/commands.py`` runs on a tiny model; ``kvq doctor`` is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import commands
from tests.rotations.helpers import tiny_model_folder


def test_rows_have_the_times_of_commands_and_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny_model_folder(tmp_path, tokens=9000)
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    run = commands.timed

    def timed(name: str, words: list, env: dict) -> tuple[dict, dict]:
        if words[0] == "doctor":  # runs every kernel in the interpreter; tests/sglang covers it
            return {"checks": [{"check": "kernels", "passed": True, "found": "all"}]}, {"case": name, "seconds": 1.0}
        return run(name, [*words, "--context", 512, "--held-out-length", 512], env)

    monkeypatch.setattr(commands, "timed", timed)
    out = tmp_path / "commands.json"
    commands.main(
        ["--model", str(model), "--text", str(text), "--tokens", "1024", "--device", "cpu", "--out", str(out)]
    )
    cold, warm, calibrate = json.loads(out.read_text())["rows"]
    assert (cold["case"], warm["case"], cold["kernels"]) == ("kvq doctor, cold", "kvq doctor, warm", "all")
    assert 0 < calibrate["moments_s"] < calibrate["in all_s"] <= calibrate["seconds"]
    assert calibrate["model"] == "model" and calibrate["tokens"] == 1024


def test_a_command_that_fails_ends_the_program(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="(?s)status 1.*Give a text file"):
        commands.timed("x", ["calibrate", tmp_path / "none", "--text", tmp_path, "--output", tmp_path / "out"], {})
