"""``kvq eval`` against real servers reports the divergence that the cache causes."""

from __future__ import annotations

import json

from tests.e2e.client import held_out_text
from tests.evaluation.conftest import main

CHUNKED = ("--chunked-prefill-size", "128")
ALIKE = ("--kv-quant-prefill-window", "0")


def test_divergence_of_a_quantized_server_from_a_plain_one(servers, tmp_path):
    text, out = tmp_path / "held_out.txt", tmp_path / "out"
    text.write_text(held_out_text())
    settings = ["--text", str(text), "--kl-lengths", "960x1", "--out", str(out), "--label", "small"]
    plain = servers(*CHUNKED)
    assert main(["--server", plain.url, "--reference-server", plain.url, *settings]) == 0
    quantized = servers("--kv-quant", "hadamard", *ALIKE, *CHUNKED)
    assert main(["--server", quantized.url, *settings]) == 0
    none, hadamard = json.loads((out / "accuracy_small.json").read_text())["rows"]
    print({row["method"]: row["kl"] for row in (none, hadamard)})
    assert (none["method"], none["allocated_bits"]) == ("none", 16)
    assert (hadamard["method"], hadamard["allocated_bits"]) == ("hadamard", 2.5)
    # A plain server differs from itself by rounding only, because batches and cached prefixes vary.
    assert 0 <= none["kl"] < 0.01 and none["top1_agreement"] > 0.95
    assert 5 * none["kl"] < hadamard["kl"] < 1
    assert hadamard["top1_agreement"] < none["top1_agreement"] and hadamard["perplexity"] > 1
