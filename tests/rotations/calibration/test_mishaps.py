"""If ``kvq calibrate`` or a related command fails midway, it prints one line and no traceback, and loses nothing."""

import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sglang_kvq.cli import app
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import load_rotations, save_rotations
from sglang_kvq.rotations.calibration import run, to_folder
from sglang_kvq.rotations.inspection import budgets
from sglang_kvq.rotations.inspection.budgets import BudgetDivergence, Measured
from sglang_kvq.rotations.inspection.recommend import FEW_TOKENS, recommendation
from tests.rotations.helpers import random_rotations, tiny_model_folder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"), tokens=1700)


def calibrate(model, output, *more, text=None):
    words = ["calibrate", model[0], "--text", text or model[1], "--output", output, "--device", "cpu"]
    return CliRunner().invoke(app, [*map(str, words), "--tokens", "1024", "--context", "512", *more])


def refused(result, match):
    with pytest.raises(KVQuantError, match=match) as caught:
        raise result.exception
    assert "\n" not in str(caught.value)


@contextmanager
def disk_with(size):
    """Limits the size of files, which simulates a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    "data, why",
    [
        (b"", "no text in it"),
        (b" \n\n", "no text in it"),
        (bytes(range(256)), "not UTF-8 text"),
        (b"w1 w2", "the corpus has 2 tokens, calibration needs 1024"),
        (b"\0" * 5000, "the corpus has 1 tokens"),
    ],
    ids=["empty", "blank", "binary", "short", "zeros"],
)
def test_texts(model, tmp_path, data, why):
    (tmp_path / "text").write_bytes(data)
    refused(calibrate(model, tmp_path / "out", text=tmp_path / "text"), why)


def test_texts_that_are_not_there_or_may_not_be_read(model, tmp_path, monkeypatch):
    refused(
        calibrate(model, tmp_path / "out", text=tmp_path / "none"), "--text .*none: No such file or directory. Give"
    )
    (tmp_path / "text").write_text("w1")
    real = Path.read_text

    def denied(path, *args, **kwargs):
        if path.name == "text":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", denied)
    refused(calibrate(model, tmp_path / "out", text=tmp_path / "text"), "--text .*text: Permission denied. Give")


@pytest.mark.parametrize("name", ["file/below", "x" * 300])
def test_outputs_that_cannot_be(model, tmp_path, name):
    (tmp_path / "file").write_text("")
    refused(calibrate(model, tmp_path / name), "cannot be written .*Choose another --output")


@pytest.mark.parametrize("command", ["calibrate", "convert"])
def test_overwriting_takes_rotations_only(model, tmp_path, command):
    """--overwrite with a wrong folder must not delete its content."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("years")
    save_rotations(random_rotations(), tmp_path / "rotations", kv_heads=2)
    for name, why in (("work", "replaces folders of rotations only, and this one holds thesis.tex"), ("file", "file")):
        if command == "calibrate":
            refused(calibrate(model, tmp_path / name, "--overwrite"), why)
        else:
            words = ["convert", str(tmp_path / "rotations"), str(tmp_path / name), "--overwrite"]
            refused(CliRunner().invoke(app, words), why)
    assert (tmp_path / "work" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "years"
    save_rotations(random_rotations(seed=1), tmp_path / "rotations", kv_heads=2, overwrite=True)


def test_a_full_disk(model, tmp_path):
    with disk_with(1000):
        refused(calibrate(model, tmp_path / "out", "--no-sensitivity"), "cannot write the checkpoint .*Free some space")
    save_rotations(random_rotations(), tmp_path / "rotations", kv_heads=2)
    for layout in ("safetensors", "pt"):
        with disk_with(1000):
            words = ["convert", str(tmp_path / "rotations"), str(tmp_path / layout), "--to", layout]
            refused(CliRunner().invoke(app, words), f"cannot write .*{layout}.*Free some space")
        assert not (tmp_path / layout).exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.partial", "rotations"]


def test_a_disk_that_is_full_at_the_end_keeps_what_was_measured(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("sglang_kvq.rotations.storage.files.save_file", lambda *args, **more: no_space())
        refused(calibrate(model, tmp_path / "out", "--no-sensitivity"), "No space left.*out.partial: the same command")
    seen = []
    monkeypatch.setattr(run, "check_turn", lambda *args: seen.append(args))
    assert calibrate(model, tmp_path / "out", "--no-sensitivity").exit_code == 0 and len(seen) == 1
    assert not (tmp_path / "out.partial").exists()


def no_space():
    raise OSError(28, "No space left on device")


def test_a_gpu_without_the_memory(model, tmp_path, monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(to_folder, "calibrate", out_of_memory)
    refused(calibrate(model, tmp_path / "out"), "--context 512: not enough GPU memory .*Lower it")


def test_a_gpu_without_the_memory_to_measure_budgets(model, tmp_path, monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(budgets, "divergences", out_of_memory)
    words = ["--composition", "transform", "--held-out-contexts", "1", "--held-out-length", "512", "--no-sensitivity"]
    refused(calibrate(model, tmp_path / "out", *words), "--held-out-length 512: not enough GPU memory .*are complete")
    assert load_rotations(tmp_path / "out", layers=2, kv_heads=2, head_dim=64).is_transform


def test_names_that_a_config_cannot_hold(model, tmp_path):
    """A folder with such a name would be written, and refused when it is read."""
    refused(calibrate(model, tmp_path / "out", "--base-model", "a\nb"), r"--base-model 'a\\nb': must be one line")
    assert not (tmp_path / "out").exists()


def test_the_current_folder_has_a_name(model, tmp_path, monkeypatch):
    monkeypatch.chdir(model[0])
    assert calibrate((".", model[1]), tmp_path / "out", "--no-sensitivity").exit_code == 0
    assert load_rotations(tmp_path / "out", layers=2, kv_heads=2, head_dim=64).meta.base_model == model[0].name


@pytest.fixture
def interruptible():
    """Makes SIGINT interrupt, as in a terminal; a shell's background jobs and their children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_say_what_is_kept(model, tmp_path, monkeypatch, number, status, interruptible):
    whole = tmp_path / "whole"
    assert calibrate(model, whole).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(run, "fisher_sums", lambda *args, **more: os.kill(os.getpid(), number))
        result = calibrate(model, tmp_path / "out")
    before = signal.getsignal(signal.SIGTERM)
    assert result.exit_code == status and before is signal.SIG_DFL
    last = result.stderr.splitlines()[-1]
    kept = f"{tmp_path}/out.partial, and the same command continues from there"
    assert last.startswith("interrupted") and kept in last
    assert calibrate(model, tmp_path / "out").exit_code == 0
    found, expected = (load_rotations(x, layers=2, kv_heads=2, head_dim=64) for x in (tmp_path / "out", whole))
    assert torch.equal(found.k, expected.k) and found.meta.sensitivity == expected.meta.sensitivity


def test_every_phase_has_lines_and_a_time(model, tmp_path):
    result = calibrate(model, tmp_path / "out", "--timings")
    lines = result.stderr.splitlines()
    phases = ["importing", "reading the text", "loading the model", "tokenizing", "looking at the model", "rotations"]
    for name in (*phases, "writing"):
        assert name in lines and any(line.startswith(f"{name}: 0.") or line.startswith(f"{name}: ") for line in lines)
    for name, steps in (("moments", 2), ("clips", 2), ("sensitivity", 2)):
        assert f"{name}: 0 of {steps}" in lines and any(x.startswith(f"{name}: {steps} of {steps} in ") for x in lines)
    table = [line.rsplit(None, 5)[0] for line in lines if line.endswith("CPU s")]
    assert table[-1] == "in all" and {*phases, "moments", "sensitivity", "writing"} < set(table)


@pytest.mark.parametrize("tokens", [128, FEW_TOKENS])
def test_a_recommendation_from_few_tokens_says_so(tokens):
    row = Measured("transform", 2.0, 2.0, 7.0, 0.001, 0.0001, 1.0, 0.0)
    for kl in (0.001, 9.0):
        budget = Measured("transform", 2.0, 2.0, 7.0, kl, 0.0001, 1.0, 0.0)
        text = recommendation(BudgetDivergence((budget,), row, 1, 512, tokens))
        assert ("It rests on 128 tokens only" in text and "--held-out-contexts 32 measures 4,096" in text) == (
            tokens == 128
        )
