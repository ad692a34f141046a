"""An interrupted calibration resumes with the same numbers as an uninterrupted one, or says why it cannot."""

from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from sglang_kvq.cli import app
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration import checkpoint as checkpoint_module
from sglang_kvq.rotations.calibration.checkpoint import Checkpoint, discard, fingerprint
from sglang_kvq.rotations.calibration.run import calibrate
from sglang_kvq.rotations.calibration.settings import CalibrationSettings
from tests.rotations.helpers import tiny_llama, tiny_model_folder

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = CalibrationSettings(
    tokens=1536, context=512, clip_grid=(0.86, 1.0), clip_contexts=2, sensitivity_contexts=2, sensitivity_draws=1
)


@pytest.fixture(autouse=True)
def every_context_is_kept(monkeypatch):
    monkeypatch.setattr(checkpoint_module, "INTERVAL", 0.0)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(97, (1600,), generator=torch.Generator().manual_seed(0))


def keep(folder):
    return lambda *run: Checkpoint(folder, fingerprint(*run))


def same(a, b):
    for name in ("k", "v", "k_eigenvalues", "v_eigenvalues"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.meta == b.meta


@pytest.mark.parametrize("stop", [("moments", 2), ("clips", 0), ("clips", 1), ("sensitivity", 1)], ids=str)
def test_it_goes_on_where_it_stopped(ids, tmp_path, stop):
    whole = calibrate(tiny_llama(), ids, SETTINGS)
    seen = []

    def interrupt(name, done, total):
        if (name, done) == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_llama(), ids, SETTINGS, interrupt, checkpoint=keep(tmp_path / "p"))
    model = tiny_llama()
    model.base_model.register_forward_pre_hook(lambda *_: seen.append("body"))
    same(calibrate(model, ids, SETTINGS, checkpoint=keep(tmp_path / "p")), whole)
    left = {("moments", 2): 1 + 2, ("clips", 0): 2, ("clips", 1): 1}.get(stop, 0)
    with_gradients = 1 if stop[0] == "sensitivity" else 2
    turned = 2  # a few tokens at the first and at the farthest position
    assert seen.count("body") == turned + left + with_gradients  # finished work is not repeated


@pytest.mark.parametrize("other", ["model", "rope", "positions", "text", "settings"])
def test_another_run_is_refused_and_told_apart(ids, tmp_path, other):
    folder, model, settings = tmp_path / "p", tiny_llama(), SETTINGS
    Checkpoint(folder, fingerprint(model, ids, settings)).save("moments", 1, {"x": torch.ones(1)}, last=True)
    if other == "model":
        model.model.layers[0].self_attn.k_proj.weight.data += 1
    if other == "rope":
        model = tiny_llama()
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}
        model = type(model)(model.config)
        model.load_state_dict(tiny_llama().state_dict())
    if other == "positions":
        model.config.max_position_embeddings *= 2
    if other == "text":
        ids = ids + 1
    if other == "settings":
        settings = CalibrationSettings(tokens=1024, context=512)
    named = {"rope": "model", "positions": "model"}.get(other, other)
    with pytest.raises(KVQuantError, match=f"{folder.name}: .*another {named} left.*--restart"):
        Checkpoint(folder, fingerprint(model, ids, settings))


def test_a_damaged_checkpoint_is_refused(ids, tmp_path):
    run = fingerprint(tiny_llama(), ids, SETTINGS)
    Checkpoint(tmp_path, run).save("moments", 1, {"x": torch.ones(1)}, last=True)
    path = tmp_path / "moments.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(KVQuantError, match="moments.safetensors: not the state.*--restart"):
        Checkpoint(tmp_path, run)


def test_only_its_own_files_are_deleted(ids, tmp_path):
    for kept in ([], ["notes.txt"]):
        folder = tmp_path / f"p{len(kept)}"
        Checkpoint(folder, fingerprint(tiny_llama(), ids, SETTINGS)).save("moments", 1, {}, last=True)
        (folder / "tmpabc.tmp").touch()  # a write that was killed
        for name in kept:
            (folder / name).touch()
        discard(folder)
        assert folder.exists() == bool(kept) and [p.name for p in folder.glob("*")] == kept
    discard(tmp_path / "none")


def test_a_failed_write_keeps_the_one_before(ids, tmp_path, monkeypatch):
    kept = Checkpoint(tmp_path, fingerprint(tiny_llama(), ids, SETTINGS))
    kept.save("moments", 1, {"x": torch.ones(1)}, last=True)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    with pytest.raises(KVQuantError, match="No space left on device.*--output"):
        kept.save("moments", 2, {"x": torch.zeros(1)}, last=True)
    assert [p.name for p in tmp_path.iterdir()] == ["moments.safetensors"]
    with safe_open(tmp_path / "moments.safetensors", "pt") as file:
        assert file.metadata()["done"] == "1"


def test_sums_are_written_at_most_every_20_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "INTERVAL", 20.0)
    kept, held = Checkpoint(tmp_path, {}), []
    for second in (100, 119, 120, 139):
        monkeypatch.setattr(checkpoint_module, "time", SimpleNamespace(monotonic=lambda now=second: now))
        kept.save("moments", second, {}, last=False)
        held.append(kept.load("moments")[0])
    assert held == [100, 100, 120, 120]


def test_the_command_says_how_to_go_on(tmp_path, monkeypatch):
    model, text = tiny_model_folder(tmp_path, tokens=2000)
    arguments = [
        "calibrate", str(model), "--text", str(text), "--output", str(tmp_path / "out"), "--tokens", "1024",
        "--context", "512", "--device", "cpu", "--no-sensitivity",
    ]  # fmt: skip
    original = checkpoint_module.Checkpoint.save

    def interrupted(self, name, done, state, *, last):
        original(self, name, done, state, last=last)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module.Checkpoint, "save", interrupted)
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130 and not (tmp_path / "out").exists()
    assert "interrupted" in result.output and "out.partial, and the same command continues" in result.output
    result = CliRunner().invoke(app, [*arguments, "--seed", "3"])
    assert isinstance(result.exception, KVQuantError) and "--restart" in str(result.exception)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and (tmp_path / "out").is_dir() and not (tmp_path / "out.partial").exists()
