"""``kvq plan`` of a model on the hub fetches only its config and the headers of its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sglang_kvq.cli import app
from tests import preloaded_cli
from tests.conftest import ROOT
from tests.rotations.hub_server import REPOSITORY, hub_server


def plan(model: str, cache: Path, endpoint: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | {
        "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "SGLANG_USE_CPU_ENGINE": "1",
    }  # fmt: skip
    done = preloaded_cli.run(["plan", "--json", "--gpu", "h100", model], environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_weights_are_those_of_the_headers(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = ROOT / "benchmarks" / "models" / "qwen3-8b" / "config.json"
    (folder / "config.json").write_bytes(config.read_bytes())
    save_file({"lm_head.weight": torch.zeros(300_000, dtype=torch.bfloat16)}, folder / "model.safetensors")
    with hub_server({"main": ("a" * 40, folder)}) as (endpoint, _):
        hub = plan(REPOSITORY, tmp_path / "cache", endpoint)
    here = json.loads(CliRunner().invoke(app, ["plan", "--json", "--gpu", "h100", str(folder)]).stdout)
    assert hub["weights"] == {"total": 600_000, "experts": 0, "lookup": 0, "source": "headers on the hub"}
    assert hub["rows"] == [{**row, "rotations": ours["rotations"]} for row, ours in zip(here["rows"], hub["rows"])]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
