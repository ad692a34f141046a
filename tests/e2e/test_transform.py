"""Transform coding from calibration to answers: files, widths, folding and records in one server."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_kvq.rotations.calibration.settings import CalibrationSettings
from sglang_kvq.rotations.calibration.to_folder import calibrate_to_folder
from tests.e2e.client import Client, coarse_kl, held_out_text

#: Chunks this short make most of a prompt attend to a stored prefix, quantized without a window of prefills.
CHUNKED = ("--chunked-prefill-size", "128")
#: Tokens that sinks and window hold completely.
COVERED = 64 + 256


@pytest.fixture(scope="module")
def rotations(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrates quickly, on the part of its source that ``held_out_text`` leaves out."""
    folder = tmp_path_factory.mktemp("calibrated")
    text = folder / "text.txt"
    text.write_text(held_out_text(everything=True).replace(held_out_text(), "")[-120_000:])
    settings = CalibrationSettings(tokens=2048, context=512, composition="transform", sensitivity_contexts=0)
    calibrate_to_folder(str(model), [text], folder / "transform", settings, device="cpu")
    return folder / "transform"


@pytest.fixture
def client(servers, rotations) -> Client:
    flags = ("--kv-quant", "transform", "--kv-quant-rotations", str(rotations), "--kv-quant-bits", "4")
    return Client(servers(*flags, "--kv-quant-prefill-window", "0", *CHUNKED))


@pytest.fixture(scope="module")
def ids(model) -> list[int]:
    return AutoTokenizer.from_pretrained(model)(held_out_text()).input_ids


def divergences(client: Client, plain: Client, prompt: list[int]) -> list[float]:
    """Returns the KL from plain BF16's distribution after each token of a prompt."""
    want, got = plain.distributions(prompt, 32), client.distributions(prompt, 64)
    return [coarse_kl(p, q) for p, q in zip(want, got)]


@pytest.fixture
def plain(servers) -> Client:
    """Returns a client of the server that ``test_bf16`` leaves running."""
    return Client(servers())


def test_four_bits_answer_as_plain_bf16_does(plain, client, ids):
    """Within windows the bases cancel and the keys' common mean has no effect: only rounding remains; then 4 bits."""
    covered = divergences(client, plain, ids[:COVERED])
    history = divergences(client, plain, ids[:832])[512:]
    means = [sum(kl) / len(kl) for kl in (covered, history)]
    print(f"KL {means[0]:.5f} nats per token in windows, {means[1]:.5f} over 4-bit history")
    assert means[0] < 0.002 and max(covered) < 0.05
    assert means[1] < 0.01
    first, second = (each.generate(ids[:300], 20)["output_ids"] for each in (client, plain))
    same = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), 20)
    assert same >= 5, f"only {same} tokens of a greedy answer agree"


def test_server_info_tells_the_widths_of_every_layer(client, rotations):
    state = client.state()
    assert state["method"] == "transform" and state["rotations"] == str(rotations)
    assert state["v_rotation_folded"] is True
    assert 3.9 < state["record_bits_per_element"] <= 4
    assert len(state["keys"]) == len(state["values"]) == len(state["layer_bits"]) == 30
    for described, (bits, _) in zip(state["keys"], state["layer_bits"]):
        assert sum(map(int, described.removesuffix(" bits").split("+"))) / 4 == bits
    assert len(set(state["keys"])) > 1, "every layer has what it needs"
