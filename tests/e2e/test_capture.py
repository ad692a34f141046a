"""Calibration on a running engine and transformers sum the same moments for the same tokens, within BF16 rounding."""

import json
import os
import subprocess
import sys

import torch

from sglang_kvq.rotations import load_rotations
from sglang_kvq.rotations.calibration.hf_attention import attention_hook
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, draw_contexts
from sglang_kvq.rotations.maths.moments import MomentSums
from tests.e2e.client import held_out_text

KV_HEADS, DIM = 3, 64


def test_engine_and_transformers_see_the_same_moments(servers, tmp_path):
    model = servers.shallow
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    (tmp_path / "corpus.txt").write_text(held_out_text())
    command = [
        "calibrate", str(model), "--text", str(tmp_path / "corpus.txt"), "--output", str(tmp_path / "out"),
        "--tokens", "1000", "--context", "500", "--positions", "500", "--engine", "sglang",
        "--engine-arg", "max_total_tokens=2048", "--engine-arg", "max_running_requests=2",
        "--engine-arg", "random_seed=0",
    ]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-m", "sglang_kvq.cli", *command],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "SGLANG_USE_CPU_ENGINE": str(int(not torch.cuda.is_available())),
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    rotations = load_rotations(tmp_path / "out", layers=layers, kv_heads=KV_HEADS, head_dim=DIM)
    assert len(rotations.meta.clip_k) == layers and rotations.meta.tokens == 1000
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sensitivity"] is None

    network, tokenizer = load_model(str(model), device="cpu", dtype="bfloat16")
    settings = CalibrationSettings(tokens=1000, context=500)
    sums = MomentSums(settings.sink)
    with torch.inference_mode(), attention_hook(network, lambda layer, q, k, v, scale: sums.add(layer, q, k, v)):
        for ids in draw_contexts(tokenize(tokenizer, held_out_text(), embedding_rows(network)), settings):
            network.base_model(ids[None])
    moments = sums.mean(layers, 2, shared=False)
    for eigenvalues, expected in ((rotations.k_eigenvalues, moments.qq), (rotations.v_eigenvalues, moments.vv)):
        expected = torch.linalg.eigvalsh(expected)
        error = (eigenvalues.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 0.03, error.amax(-1)
