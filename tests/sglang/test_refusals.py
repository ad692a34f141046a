"""Every kind of refusal as a user meets it: a whole command line leads to one message and a non-zero exit.

``test_checks`` tests each setting and model separately; here they first pass through SGLang's parser and resolution.
"""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_kvq.rotations import save_rotations
from sglang_kvq.rotations.storage.files import CONFIG_FILE, TENSOR_FILE
from sglang_kvq.rotations.storage.published import K_FILE, V_FILE, save_published
from sglang_kvq.sglang import checks, hooks
from tests.rotations.helpers import random_rotations
from tests.sglang.test_checks import MODELS


@pytest.fixture
def start(command_line):
    """``start(*argv)`` runs the command up to the point where it would spawn processes."""

    def go(*argv: str, model: str | None = None):
        server_args = command_line(*argv, model=model)
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
        checks.after_check_server_args(None, server_args)

    return go


def test_what_fits_is_not_refused(start, tmp_path):
    """The unchanged settings are accepted, so each test below fails for the reason that it names."""
    save_rotations(random_rotations(), tmp_path / "r", kv_heads=2)
    start("--kv-quant", "oscar", "--kv-quant-rotations", str(tmp_path / "r"))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--speculative-algorithm", "DFLASH"],
            "--speculative-algorithm DFLASH: this way of drafting is not supported",
        ),
        (["--speculative-algorithm", "NGRAM"], "--speculative-ngram-max-bfs-breadth 10: wider trees"),
        (["--enable-lmcache"], "--enable-lmcache: "),
        (
            ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mori"],
            "--disaggregation-mode prefill: ",
        ),
        (
            ["--attention-backend", "flashinfer"],
            "--attention-backend flashinfer: --kv-quant uses its own attention backend",
        ),
        (["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype fp8_e4m3: "),
        (["--page-size", "16"], "--page-size 16: pages hold 64 tokens"),
        (["--enable-mixed-chunk", "--pp-size", "2"], "--enable-mixed-chunk and --pp-size 2: not tried"),
        (["--kv-quant-sink", "100"], "--kv-quant-sink 100: must be a multiple"),
        (["--kv-quant-recent", "0"], "--kv-quant-recent 0: must be a multiple of the page size 64, at least 64"),
        (["--kv-quant-bf16-budget", "1.5"], "--kv-quant-bf16-budget 1.5: "),
        (["--kv-quant-rotations", "somewhere"], "uses no rotation files"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_setting(start, argv, text):
    with pytest.raises(SystemExit) as ended:
        start("--kv-quant", "hadamard", *argv)
    assert text in str(ended.value)


def test_unknown_method_lists_the_known(start, capsys):
    with pytest.raises(SystemExit) as ended:
        start("--kv-quant", "int3")
    assert ended.value.code != 0
    shown = capsys.readouterr().err
    assert "int3" in shown and "hadamard" in shown


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"k and v differ"}))
def test_model(start, model_folder, name):
    changes, text = MODELS[name]
    with pytest.raises(SystemExit, match=text):
        start("--kv-quant", "hadamard", model=model_folder(**changes))


# -- rotations ---------------------------------------------------------------------------------------------------------


def native(folder: Path, **shape) -> Path:
    save_rotations(random_rotations(**{"layers": 2, "heads": 2, **shape}), folder, kv_heads=shape.get("heads", 2))
    return folder


def published(folder: Path, **shape) -> Path:
    folder.mkdir()
    save_published(random_rotations(**{"layers": 2, "heads": 1, **shape}), folder)
    return folder


def missing_layer(folder: Path) -> None:
    document = torch.load(published(folder) / V_FILE, weights_only=True)
    del document["layers"][1]
    torch.save(document, folder / V_FILE)


def not_orthogonal(folder: Path) -> None:
    rotations = random_rotations(heads=1)
    rotations.k[1] *= 1.1
    folder.mkdir()
    save_published(rotations, folder)


def truncated(folder: Path) -> None:
    path = native(folder) / TENSOR_FILE
    path.write_bytes(path.read_bytes()[:-1000])


def wrong_hash(folder: Path) -> None:
    config = json.loads((native(folder) / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "sha256": "0" * 64}))


class Payload:
    def __reduce__(self):
        return Path.touch, (Path("this-must-never-be-made"),)


def with_code(folder: Path) -> None:
    (published(folder) / K_FILE).write_bytes(pickle.dumps(Payload()))


BAD_ROTATIONS = {
    "other head_dim": (lambda folder: native(folder, dim=128), "head_dim 128; the model has 2 layers"),
    "other heads": (lambda folder: native(folder, heads=4), "a model with 4 KV heads"),
    "too few layers": (lambda folder: native(folder, layers=1), "for 1 layers"),
    "too many layers": (lambda folder: published(folder, layers=3), "it has 3 layers, the model has 2"),
    "missing layer": (missing_layer, "layer 1 is missing"),
    "not orthogonal": (not_orthogonal, "k of layer 1, head 0 is not orthogonal"),
    "truncated": (truncated, "truncated or damaged"),
    "wrong hash": (wrong_hash, "differs from 0000"),
    "pickle": (with_code, "a pickle with code in it, which is never run"),
    "empty folder": (lambda folder: folder.mkdir(), "no rotations in this folder"),
}


@pytest.mark.parametrize(("make", "text"), BAD_ROTATIONS.values(), ids=BAD_ROTATIONS.keys())
def test_rotations(start, tmp_path, monkeypatch, make, text):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "rotations")
    with pytest.raises(SystemExit) as ended:
        start("--kv-quant", "oscar", "--kv-quant-rotations", str(tmp_path / "rotations"))
    assert str(tmp_path / "rotations") in str(ended.value) and text in str(ended.value)
    assert not Path("this-must-never-be-made").exists()


def test_model_without_rotations_is_told_both_ways_out(start):
    with pytest.raises(SystemExit, match=r"no rotations known.*kvq calibrate.*--kv-quant int4"):
        start("--kv-quant", "oscar")


# -- another SGLang ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(target="managers.scheduler.Scheduler.gone"), "not found"),
        (dict(params=("other",)), "expected \\(other\\)"),
    ],
    ids=["missing", "other parameters"],
)
def test_symbol_that_differs(start, monkeypatch, changes, text):
    entry = next(h for h in hooks.TABLE if h.target.endswith("Scheduler.get_init_info"))
    table, select = [replace(h, **changes) if h is entry else h for h in hooks.TABLE], hooks.for_release
    monkeypatch.setattr(hooks, "for_release", lambda version, process=None: select(version, process, table))
    with pytest.raises(SystemExit, match=f"cannot be used with SGLang.*\n.*managers.scheduler.Scheduler.*{text}"):
        start("--kv-quant", "hadamard")
