"""Damaged and odd rotation folders are loaded and shown, or refused in one line, never with a traceback."""

import copy
import hashlib
import json
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import Rotations, load_rotations, save_rotations
from sglang_kvq.rotations.identity import LayerNumbers
from sglang_kvq.rotations.inspection import tables
from sglang_kvq.rotations.resolve import resolve_formats
from sglang_kvq.rotations.storage.card import model_card
from sglang_kvq.rotations.storage.files import read_rotations
from sglang_kvq.rotations.storage.hub import TENSOR_FILE
from sglang_kvq.rotations.storage.schema import CONFIG_FILE
from tests import pairs
from tests.rotations.helpers import random_rotations, random_transform
from tests.rotations.published_files import PER_HEAD, SHARED, document

SETTINGS = settings(
    deadline=None, max_examples=150 if pairs.everything else 50, suppress_health_check=list(HealthCheck)
)
GEOMETRY = dict(layers=2, kv_heads=2, head_dim=64)
MODEL = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_size=256)

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 5) | st.sampled_from([10**25, 10**400, -1, 0.5, 1e308, "k", "2", ""])
    | st.floats() | st.text(max_size=5)
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3))
TENSORS = st.builds(
    lambda shape, dtype, fill: torch.full(shape, fill).to(dtype),
    st.lists(st.sampled_from([0, 1, 2, 3, 64]), max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64,
                     torch.bool]),
    st.sampled_from([0.0, 1.0, float("nan"), float("inf")]),
)  # fmt: skip


def survives(folder: Path) -> None:
    """Checks that a folder is loaded and shown, or refused in at most one line."""
    for read in (
        lambda: read_rotations(folder),
        lambda: (load_rotations(folder, **GEOMETRY, numbers=LayerNumbers((0, 1), 2)), 2),
    ):
        refusal = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                show(*read())
        except KVQuantError as error:
            refusal = str(error)
        assert len(refusal.splitlines()) <= 1


def show(rotations: Rotations, kv_heads: int | None) -> None:
    """Runs everything that commands print about rotations, and resolves a server's formats from them."""
    with Console(width=80).capture():
        Console(width=80).print(*tables.report(rotations, kv_heads, None, verbose=True))
    (json.dumps(tables.to_json(rotations, kv_heads, None)) + model_card(rotations, kv_heads)).encode()
    for bits in (None,) if rotations.is_transform else (None, "auto:3"):
        resolve_formats(KVQuantConfig("transform" if rotations.is_transform else "oscar", bits=bits), rotations, MODEL)


def places(value, path=()):
    """Yields the paths of all values in nested lists and dicts."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if not (isinstance(value, list) and key > 2):
            yield from places(inner, (*path, key))


def changed(value, path, new, remove):
    """Returns a copy of nested lists and dicts with ``new`` at ``path``, or without that entry."""
    if not path:
        return new
    value = copy.copy(value)
    if len(path) > 1:
        value[path[0]] = changed(value[path[0]], path[1:], new, remove)
    elif remove:
        del value[path[0]]
    else:
        value[path[0]] = new
    return value


@pytest.fixture(scope="module")
def natives(tmp_path_factory):
    """Returns a folder with rotations in our layout, one subfolder per version."""
    root = tmp_path_factory.mktemp("natives")
    save_rotations(random_rotations(), root / "1", kv_heads=2)
    save_rotations(random_rotations(balanced=True), root / "2", kv_heads=2)
    save_rotations(random_transform(), root / "3", kv_heads=2)
    measured = {"k": [0.5, 1e-5], "v": [0.25, 2e-5]}
    more = {
        "sensitivity": {part: {"2": [0.5, 0.1], "4": [0.1, 0.01]} for part in "kv"}, "errors": measured,
        "clip_k": [0.9, 0.8], "tokens": 5, "corpus": "a text", "seed": 1, "revision": "main",
        "divergence": {"contexts": 2, "length": 64, "tokens": 5, "budgets": [], "reference": {"bits": 4}},
    }  # fmt: skip
    for folder in root.iterdir():
        config = json.loads((folder / CONFIG_FILE).read_text()) | more
        (folder / CONFIG_FILE).write_text(json.dumps(config))
    return root


@SETTINGS
@given(st.data())
def test_any_config(natives, data):
    source = natives / data.draw(st.sampled_from("123"))
    config = json.loads((source / CONFIG_FILE).read_text())
    path = data.draw(st.sampled_from([p for p in places(config) if p != ("sha256",)]))
    text = json.dumps(changed(config, path, data.draw(VALUES), data.draw(st.booleans())))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(shutil.copytree(source, Path(made) / "rotations"))
        (folder / CONFIG_FILE).write_text(text)
        survives(folder)


@SETTINGS
@given(st.data())
def test_any_tensor_in_a_safetensors_file(natives, data):
    source = natives / data.draw(st.sampled_from("123"))
    tensors = load_file(source / TENSOR_FILE)
    name = data.draw(st.sampled_from(sorted(tensors)))
    if data.draw(st.booleans()):
        tensors[name] = data.draw(TENSORS)
    else:
        change = data.draw(st.sampled_from([lambda x: x[:1], lambda x: x[:, :1], lambda x: x * 1e30, lambda x: x.half(),
                                            lambda x: -x, lambda x: x * 1e-30, lambda x: x.flatten()]))  # fmt: skip
        tensors[name] = change(tensors[name]).contiguous()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(shutil.copytree(source, Path(made) / "rotations"))
        save_file(tensors, folder / TENSOR_FILE)
        config = json.loads((folder / CONFIG_FILE).read_text())
        config["sha256"] = hashlib.sha256((folder / TENSOR_FILE).read_bytes()).hexdigest()
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        survives(folder)


@SETTINGS
@given(st.data())
def test_any_document_in_a_pt_file(data):
    heads = data.draw(st.sampled_from([None, 2]))
    content = document([0, 1], heads=heads, version=data.draw(st.sampled_from([1, 2])))
    changes = data.draw(st.integers(1, 3))
    other = content
    for _ in range(changes):
        path = data.draw(st.sampled_from(list(places(other))[1:] or [()]))
        other = changed(other, path, data.draw(VALUES | TENSORS), data.draw(st.booleans()))
        if not isinstance(other, dict):
            break
    names = PER_HEAD if heads else SHARED
    with tempfile.TemporaryDirectory() as made:
        pair = [content, other] if data.draw(st.booleans()) else [other, content]
        for name, each in zip(names, pair):
            torch.save(each, Path(made) / name)
        survives(Path(made))


@SETTINGS
@given(st.data())
def test_any_bytes(natives, data):
    """Bytes are flipped, cut and inserted in every kind of file."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(shutil.copytree(natives / "1", Path(made) / "rotations"))
        if data.draw(st.booleans()):
            (folder / TENSOR_FILE).unlink()
            (folder / CONFIG_FILE).unlink()
            for name in SHARED:
                torch.save(document([0, 1]), folder / name)
        file = data.draw(st.sampled_from(sorted(folder.iterdir())))
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            start = data.draw(st.integers(0, min(len(content), 4000)))
            content[start : start + data.draw(st.sampled_from([0, 1, 4, 100_000]))] = data.draw(st.binary(max_size=6))
        file.write_bytes(content)
        if file.name == TENSOR_FILE:
            config = json.loads((folder / CONFIG_FILE).read_text())
            config["sha256"] = hashlib.sha256(content).hexdigest()
            (folder / CONFIG_FILE).write_text(json.dumps(config))
        survives(folder)
