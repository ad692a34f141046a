"""Rotation folders survive a round trip, and every way to be wrong gives an error that names the value and the fix."""

import hashlib
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import Rotations, load_rotations, save_rotations
from sglang_kvq.rotations.base import ORTHOGONALITY_TOLERANCE, TRANSFORM_TENSORS, check_rotations
from sglang_kvq.rotations.maths.transform import FLOOR, coding_basis
from sglang_kvq.rotations.storage import files
from sglang_kvq.rotations.storage.files import CONFIG_FILE, TENSOR_FILE, convert_rotations, load_once
from sglang_kvq.rotations.storage.published import K_FILE, V_FILE, save_published
from tests.rotations.helpers import random_rotations, random_transform

GEOMETRY = dict(layers=2, kv_heads=2, head_dim=64)


@pytest.fixture
def native(tmp_path):
    save_rotations(random_rotations(), tmp_path / "native", kv_heads=2)
    return tmp_path / "native"


@pytest.fixture
def published(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    save_published(random_rotations(heads=1), folder)
    return folder


def assert_same(a: Rotations, b: Rotations):
    for name in ("k", "v", "k_eigenvalues", "v_eigenvalues"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("heads", [1, 2], ids=["per-layer", "per-head"])
def test_native_round_trip(tmp_path, heads):
    rotations = random_rotations(heads=heads)
    save_rotations(rotations, tmp_path / "r", kv_heads=2)
    loaded = load_rotations(tmp_path / "r", **GEOMETRY)
    assert_same(loaded, rotations)
    digest = hashlib.sha256((tmp_path / "r" / TENSOR_FILE).read_bytes()).hexdigest()
    assert loaded.meta == replace(rotations.meta, source=str(tmp_path / "r"), sha256=digest)
    assert loaded.granularity == ("per-head" if heads > 1 else "per-layer")
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [CONFIG_FILE, TENSOR_FILE]


@pytest.mark.parametrize("heads", [1, 2], ids=["per-layer", "per-head"])
def test_published_round_trip_and_conversion(tmp_path, heads):
    rotations = random_rotations(heads=heads)
    save_rotations(rotations, tmp_path / "a", kv_heads=2)
    convert_rotations(tmp_path / "a", tmp_path / "b", to="pt")
    assert_same(load_rotations(tmp_path / "b", **GEOMETRY), rotations)
    convert_rotations(tmp_path / "b", tmp_path / "c", to="safetensors", kv_heads=2)
    assert_same(load_rotations(tmp_path / "c", **GEOMETRY), rotations)


def test_published_layout_is_the_documented_one(published):
    document = torch.load(published / K_FILE, weights_only=True)
    assert set(document) == {"format_version", "objective", "source_grouping", "layers"}
    assert document["source_grouping"] == "layer" and list(document["layers"]) == [0, 1]
    assert document["layers"][1]["rotation"].shape == (64, 64)
    assert document["layers"][1]["eigenvalues"].shape == (64,)


def test_hash_of_published_files_is_that_of_both(published):
    data = (published / K_FILE).read_bytes() + (published / V_FILE).read_bytes()
    assert load_rotations(published, **GEOMETRY).meta.sha256 == hashlib.sha256(data).hexdigest()


def test_hash_is_not_copied_into_another_file(native, tmp_path):
    loaded = load_rotations(native, **GEOMETRY)
    save_rotations(replace(loaded, k=loaded.v, v=loaded.k), tmp_path / "other", kv_heads=2)
    assert load_rotations(tmp_path / "other", **GEOMETRY).meta.sha256 != loaded.meta.sha256


@pytest.fixture
def reads(monkeypatch):
    """Lists the folders whose tensors were read and checked, with one entry for each time."""
    found, original = [], files._load
    monkeypatch.setattr(files, "_load", lambda place, *model: found.append(place) or original(place, *model))
    return found


def test_kept_rotations_are_read_again_only_when_they_change(native, published, reads):
    first = load_once(native, **GEOMETRY)
    assert load_once(native / TENSOR_FILE, **GEOMETRY) is first and reads == [native]
    for folder in (published, native):
        load_once(folder, **GEOMETRY)
    assert reads == [native, published, native]
    with pytest.raises(KVQuantError, match="head_dim"):
        load_once(native, **{**GEOMETRY, "head_dim": 128})

    save_rotations(random_rotations(seed=1), native, kv_heads=2, overwrite=True)
    assert_same(load_once(native, **GEOMETRY), random_rotations(seed=1))
    (native / TENSOR_FILE).write_bytes(b"damaged")
    for _ in range(2):
        with pytest.raises(KVQuantError, match="truncated or damaged"):
            load_once(native, **GEOMETRY)


def test_a_link_that_points_elsewhere_is_another_folder(native, published, tmp_path, reads):
    link = tmp_path / "current"
    link.symlink_to(native)
    before = load_once(link, **GEOMETRY)
    link.unlink()
    link.symlink_to(published)
    after = load_once(link, **GEOMETRY)
    assert before.k.shape[1] == 2 and after.k.shape[1] == 1 and after.meta.source == str(link)


def test_a_file_of_the_folder_is_a_location(native, published):
    load_rotations(native / TENSOR_FILE, **GEOMETRY)
    load_rotations(published / V_FILE, **GEOMETRY)


def test_conversion_of_shared_rotations_needs_the_heads(published, tmp_path):
    with pytest.raises(KVQuantError, match="--kv-heads"):
        convert_rotations(published, tmp_path / "out", to="safetensors")


@pytest.mark.parametrize("heads", [1, 2], ids=["per layer", "per head"])
@pytest.mark.parametrize("to", ["safetensors", "pt"])
def test_conversion_refuses_heads_that_contradict_the_source(heads, to, tmp_path):
    source = tmp_path / "source"
    save_rotations(random_rotations(heads=heads), source, kv_heads=2)
    with pytest.raises(KVQuantError, match=f"--kv-heads 4: {source} is for a model with 2 KV heads. Leave"):
        convert_rotations(source, tmp_path / "out", to=to, kv_heads=4)
    convert_rotations(source, tmp_path / "out", to=to, kv_heads=2)


def test_existing_output_is_kept(native):
    before = (native / TENSOR_FILE).read_bytes()
    with pytest.raises(KVQuantError, match="--overwrite"):
        save_rotations(random_rotations(seed=1), native, kv_heads=2)
    assert (native / TENSOR_FILE).read_bytes() == before
    save_rotations(random_rotations(seed=1), native, kv_heads=2, overwrite=True)
    assert_same(load_rotations(native, **GEOMETRY), random_rotations(seed=1))


def test_only_folders_of_rotations_are_replaced(native):
    (native / "notes").mkdir()
    with pytest.raises(KVQuantError, match="folders of rotations only, and this one holds notes"):
        save_rotations(random_rotations(seed=1), native, kv_heads=2, overwrite=True)
    assert_same(load_rotations(native, **GEOMETRY), random_rotations())


def test_the_current_folder_and_links_are_replaced(native, tmp_path, monkeypatch):
    monkeypatch.chdir(native)
    save_rotations(random_rotations(seed=1), ".", kv_heads=2, overwrite=True)
    assert_same(load_rotations(native, **GEOMETRY), random_rotations(seed=1))
    (tmp_path / "link").symlink_to(native)
    save_rotations(random_rotations(seed=2), tmp_path / "link", kv_heads=2, overwrite=True)
    assert_same(load_rotations(native, **GEOMETRY), random_rotations(seed=2))
    assert sorted(path.name for path in native.parent.iterdir() if path.name.startswith(".")) == []


def test_an_interrupted_replacement_keeps_the_old_rotations(native, monkeypatch):
    rename = Path.rename

    def interrupted(self, target):
        if Path(target) == native.resolve() and self.name.startswith(".") and not self.name.endswith(".old"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_rotations(random_rotations(seed=1), native, kv_heads=2, overwrite=True)
    assert_same(load_rotations(native, **GEOMETRY), random_rotations())


def test_failed_save_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("sglang_kvq.rotations.storage.schema.json.dumps", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_rotations(random_rotations(), tmp_path / "r", kv_heads=2)
    assert list(tmp_path.iterdir()) == []


def refuse(location, *words, **geometry):
    with pytest.raises(KVQuantError) as caught:
        load_rotations(location, **{**GEOMETRY, **geometry})
    for word in (str(location).split("/")[-1], *words):
        assert word in str(caught.value), str(caught.value)


def test_missing_folder(tmp_path):
    refuse(tmp_path / "nothing", "no such folder", "kvq calibrate", "--kv-quant int4")


def test_empty_folder(tmp_path):
    refuse(tmp_path, "no rotations in this folder", "kvq calibrate")


@pytest.mark.parametrize("name", [TENSOR_FILE, CONFIG_FILE])
def test_half_a_native_folder(native, name):
    (native / name).unlink()
    refuse(native, f"{name} is missing")


@pytest.mark.parametrize("name", [K_FILE, V_FILE])
def test_half_a_published_folder(published, name):
    (published / name).unlink()
    refuse(published, f"{name} is missing")


@pytest.mark.parametrize("other", [dict(layers=3), dict(kv_heads=4), dict(head_dim=128)], ids=str)
def test_other_geometry(native, published, other):
    refuse(native, str(*other.values()), "kvq calibrate", **other)
    if "kv_heads" not in other:  # the published layout shares a layer's rotation and does not record heads
        refuse(published, "kvq calibrate", **other)


def test_shared_rotations_remember_their_heads(tmp_path):
    save_rotations(random_rotations(heads=1), tmp_path / "r", kv_heads=2)
    refuse(tmp_path / "r", "2 KV heads", "org/tiny", "has 4", kv_heads=4)


def test_missing_layer(published):
    document = torch.load(published / V_FILE, weights_only=True)
    del document["layers"][0]
    torch.save(document, published / V_FILE)
    refuse(published, "layer 0 is missing", V_FILE)


@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("value, word", [(float("nan"), "NaN or infinity"), (0.5, "not orthogonal")])
def test_bad_values_name_layer_and_head(published, tensor, value, word):
    rotations = random_rotations(heads=2)
    getattr(rotations, tensor)[1, 0, 3, 5] += value
    save_published(rotations, published)
    refuse(published, word, f"{tensor} of layer 1, head 0")
    with pytest.raises(KVQuantError, match=word):
        save_rotations(rotations, published.parent / "never", kv_heads=2)


def balanced_rotations() -> Rotations:
    """Returns rotations whose key matrices are not orthogonal; those of queries undo them."""
    rotations = random_rotations(heads=2)
    scale = torch.logspace(-1, 1, rotations.k.shape[-1])
    return replace(rotations, k=rotations.k * scale, q=rotations.k / scale)


def test_queries_matrices_come_back(tmp_path):
    rotations = balanced_rotations()
    save_rotations(rotations, tmp_path / "out", kv_heads=2)
    assert json.loads((tmp_path / "out" / CONFIG_FILE).read_text())["format_version"] == 2
    loaded = load_rotations(tmp_path / "out", **GEOMETRY)
    assert torch.equal(loaded.q, rotations.q) and torch.equal(loaded.k, rotations.k)
    worker = loaded.for_worker(range(1, 2), 2, 1, 1)
    assert torch.equal(worker.queries[0, 0], rotations.q[1, 1]) and torch.equal(worker.k[0, 0], rotations.k[1, 1])


def test_queries_matrices_that_change_scores(tmp_path):
    rotations = balanced_rotations()
    rotations.q[1, 0, 3, 5] += 0.1
    with pytest.raises(KVQuantError, match="k of layer 1, head 0 is not the inverse of q's transpose"):
        save_rotations(rotations, tmp_path / "never", kv_heads=2)
    with pytest.raises(KVQuantError, match="q has shape"):
        save_rotations(replace(rotations, q=rotations.q[:, :1]), tmp_path / "never", kv_heads=2)
    assert not (tmp_path / "never").exists()


def test_the_published_layout_has_no_place_for_queries_matrices(tmp_path):
    with pytest.raises(KVQuantError, match="--composition oscar or offset"):
        save_published(balanced_rotations(), tmp_path)
    assert not list(tmp_path.iterdir())


# -- transform coding


def test_transform_codings_parts_come_back(tmp_path):
    rotations = random_transform()
    save_rotations(rotations, tmp_path / "out", kv_heads=2)
    config = json.loads((tmp_path / "out" / CONFIG_FILE).read_text())
    assert config["format_version"] == 3 and config["importance"] == rotations.meta.importance
    loaded = load_rotations(tmp_path / "out", **GEOMETRY)
    assert loaded.is_transform and not random_rotations().is_transform
    for name in ("k", "q", "v", "o", "k_mean", "k_energies", "v_energies"):
        assert torch.equal(getattr(loaded, name), getattr(rotations, name)), name
        assert getattr(loaded, name).dtype == torch.float32
    assert loaded.meta == replace(rotations.meta, source=str(tmp_path / "out"), sha256=loaded.meta.sha256)


def test_a_worker_gets_its_own_outputs_and_means(tmp_path):
    """A worker's means are in the basis of rotated keys: subtracting them before or after rotation is the same."""
    rotations = random_transform(layers=3, heads=4)
    worker = rotations.for_worker(range(1, 3), kv_heads_total=4, head_start=2, head_count=2)
    assert torch.equal(worker.o, rotations.o[1:, 2:]) and worker.o.is_contiguous()
    keys = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        for head in range(2):
            mean, k = rotations.k_mean[1 + layer, 2 + head], rotations.k[1 + layer, 2 + head]
            left = keys @ worker.k[layer, head] - worker.k_mean[layer, head]
            torch.testing.assert_close(left, (keys - mean) @ k, atol=1e-3 * float(left.abs().max()), rtol=0)
            assert torch.equal(worker.k_mean[layer, head], rotations.whole().k_mean[1 + layer, 2 + head])
    assert random_rotations().for_worker(range(2), 2, 0, 2).k_mean is None


@pytest.mark.parametrize("reader", ["q", "o"])
def test_matrices_that_change_attention_name_layer_and_head(tmp_path, reader):
    rotations = random_transform()
    getattr(rotations, reader)[1, 0, 3, 5] += 0.1
    with pytest.raises(KVQuantError, match=f"of layer 1, head 0 is not the inverse of {reader}'s transpose"):
        save_rotations(rotations, tmp_path / "never", kv_heads=2)


def test_the_worst_basis_that_calibration_makes_is_exact_enough():
    """Keys are largest where queries are smallest, as far as ``FLOOR`` allows.

    Every channel is then equally energetic, and mixes directions that are coded coarsely with finely coded ones.
    """
    u = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    asked = torch.where(torch.arange(64) < 32, 1.0, FLOOR).double()
    basis = coding_basis((u / asked @ u.mT)[None, None], (u * asked @ u.mT)[None, None])
    sigma = basis.energies.sqrt()
    k, q = (basis.encode / sigma[..., None, :]).float(), (basis.decode * sigma[..., :, None]).mT.float()
    one = torch.eye(64, dtype=torch.float64)
    off = float((q.double() @ k.double().mT - one).abs().max())
    assert 1e-6 < off < 2.0**-23 / FLOOR**0.5 < ORTHOGONALITY_TOLERANCE
    flat = random_transform(layers=1, heads=1)
    check_rotations(replace(flat, k=k, q=q), layers=1, kv_heads=1, head_dim=64)


ENERGIES = [
    (lambda x: x.flip(-1), "not positive and descending"),
    (lambda x: x * 0, "not positive and descending"),
    (lambda x: x / 0, "NaN or infinity"),
]


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("change, message", ENERGIES, ids=["rising", "zero", "infinite"])
def test_energies_are_checked(tmp_path, part, change, message):
    rotations = random_transform()
    energies = getattr(rotations, f"{part}_energies")
    energies[1, 1] = change(energies[1, 1])
    with pytest.raises(KVQuantError, match=f"{part}_energies of layer 1, head 1 .*{message}"):
        save_rotations(rotations, tmp_path / "never", kv_heads=2)


@pytest.mark.parametrize("name", ["q", *TRANSFORM_TENSORS])
def test_transform_coding_is_whole_or_not_at_all(tmp_path, name):
    whole = random_transform()
    with pytest.raises(KVQuantError, match=f"; {name} is missing. .*--composition transform"):
        check_rotations(replace(whole, **{name: None}), **GEOMETRY)
    if name in ("k_mean", "k_energies", "v_energies"):
        with pytest.raises(KVQuantError, match=f"{name} has shape"):
            check_rotations(replace(whole, **{name: getattr(whole, name)[:, :1]}), **GEOMETRY)


def test_a_file_without_one_of_its_tensors(tmp_path):
    save_rotations(random_rotations(), tmp_path / "r", kv_heads=2)
    config = json.loads((tmp_path / "r" / CONFIG_FILE).read_text())
    (tmp_path / "r" / CONFIG_FILE).write_text(json.dumps({**config, "format_version": 3}))
    refuse(tmp_path / "r", "there is no tensor q", "format_version 3")


@pytest.mark.parametrize(
    "importance",
    [None, {"k": [1.0, 2.0]}, {"k": [1.0], "v": [1.0, 1.0]}, {"k": [1.0, 0.0], "v": [1.0, 1.0]},
     {"k": [1.0, 1.0], "v": [1.0, float("nan")]}],
    ids=str,
)  # fmt: skip
def test_importances_are_checked(tmp_path, importance):
    rotations = random_transform()
    with pytest.raises(KVQuantError, match="importance.*Recreate.*--composition transform"):
        save_rotations(
            replace(rotations, meta=replace(rotations.meta, importance=importance)), tmp_path / "x", kv_heads=2
        )


def test_the_published_layout_has_no_place_for_transform_coding(tmp_path):
    save_rotations(random_transform(), tmp_path / "r", kv_heads=2)
    with pytest.raises(KVQuantError, match="energies .*no place for. .*--composition oscar or offset"):
        convert_rotations(tmp_path / "r", tmp_path / "pt", to="pt")
    assert not (tmp_path / "pt").exists()
    convert_rotations(tmp_path / "r", tmp_path / "copy", to="safetensors")
    copied, original = (load_rotations(tmp_path / name, **GEOMETRY) for name in ("copy", "r"))
    assert torch.equal(copied.o, original.o) and copied.meta.importance == original.meta.importance


def test_conversion_keeps_what_was_measured(tmp_path):
    save_rotations(random_transform(), tmp_path / "r", kv_heads=2)
    config = json.loads((tmp_path / "r" / CONFIG_FILE).read_text())
    (tmp_path / "r" / CONFIG_FILE).write_text(json.dumps({**config, "divergence": {"budgets": [1.5]}}))
    convert_rotations(tmp_path / "r", tmp_path / "copy", to="safetensors")
    copied = json.loads((tmp_path / "copy" / CONFIG_FILE).read_text())
    assert copied == {**config, "divergence": {"budgets": [1.5]}}


def test_the_folder_of_a_model_is_called_so(tmp_path):
    (tmp_path / CONFIG_FILE).write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(
        KVQuantError, match=f"^{tmp_path}: the folder of a model, not of rotations. Make rotations with"
    ):
        load_rotations(tmp_path, **GEOMETRY)


def test_float32_rounding_is_orthogonal_enough(published):
    rotations = random_rotations(heads=1)
    save_published(replace(rotations, k=rotations.k + 1e-6), published)
    load_rotations(published, **GEOMETRY)


def test_truncated_tensors(native):
    data = (native / TENSOR_FILE).read_bytes()
    (native / TENSOR_FILE).write_bytes(data[: len(data) // 2])
    refuse(native, "truncated or damaged")


def test_altered_tensors(native):
    data = bytearray((native / TENSOR_FILE).read_bytes())
    data[-1] ^= 1
    (native / TENSOR_FILE).write_bytes(data)
    refuse(native, "sha256", "Fetch both again")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_config_of_something_else(native, text):
    (native / CONFIG_FILE).write_text(text)
    refuse(native, "not the config.json of rotations")


def test_newer_format(native, published):
    config = json.loads((native / CONFIG_FILE).read_text())
    (native / CONFIG_FILE).write_text(json.dumps({**config, "format_version": 4}))
    refuse(native, "format_version 4", "reads 1, 2, 3", "Update sglang-kvq")
    torch.save({**torch.load(published / K_FILE, weights_only=True), "format_version": 3}, published / K_FILE)
    refuse(published, "format_version 3", "reads versions 1 and 2", "Update sglang-kvq")


class Payload:
    def __reduce__(self):
        return print, ("this must never run",)


@pytest.mark.parametrize("content", ["pickle with code", "truncated"])
def test_pickle_is_refused(published, content, capsys):
    if content == "truncated":
        data = (published / K_FILE).read_bytes()
        (published / K_FILE).write_bytes(data[: len(data) // 2])
    else:
        (published / K_FILE).write_bytes(pickle.dumps(Payload()))
    refuse(published, "not loadable as plain tensors", K_FILE)
    assert "must never run" not in capsys.readouterr().out


@pytest.mark.parametrize("document", [{}, {"layers": {}}, {"layers": {0: {}, 1: {}}}, [1]], ids=str)
def test_published_file_of_something_else(published, document):
    torch.save(document, published / K_FILE)
    refuse(published, K_FILE)


CLIPS = [
    ((0.9,) * 3, "clip_k has 3 values, the rotations have 2 layers"),
    ((0.9, 1.2), r"clip_k of layer 1 is 1\.2; .*from 0\.5 to 1"),
    (0.2, r"clip_k is 0\.2"),
    ((0.9, "high"), "clip_k of layer 1 is 'high'"),
]


@pytest.mark.parametrize("clip, message", CLIPS, ids=str)
def test_clips_are_checked(native, clip, message):
    rotations = random_rotations()
    with pytest.raises(KVQuantError, match=message):
        save_rotations(replace(rotations, meta=replace(rotations.meta, clip_k=clip)), native.parent / "x", kv_heads=2)
    config = json.loads((native / CONFIG_FILE).read_text())
    (native / CONFIG_FILE).write_text(json.dumps({**config, "clip_k": clip}))
    with pytest.raises(KVQuantError, match=message):
        load_rotations(native, **GEOMETRY)


@pytest.mark.parametrize("name", ["errors", "importance"])
def test_each_layer_has_one_error_and_one_importance(native, name):
    config = json.loads((native / CONFIG_FILE).read_text())
    (native / CONFIG_FILE).write_text(json.dumps({**config, name: {"k": [0.5, 0.5], "v": [0.5] * 3}}))
    with pytest.raises(KVQuantError, match=rf"{name}\['v'\] has 3 values, the rotations have 2 layers"):
        load_rotations(native, **GEOMETRY)


@pytest.mark.parametrize(
    "table", [[1], {"k": {"2": [1.0]}}, {"q": {"2": [1.0, 2.0]}}, {"k": {"2": [1.0, None]}}], ids=str
)
def test_sensitivities_are_checked(native, table):
    config = json.loads((native / CONFIG_FILE).read_text())
    (native / CONFIG_FILE).write_text(json.dumps({**config, "sensitivity": table}))
    with pytest.raises(KVQuantError, match="sensitivity.*[Rr]ecreate"):
        load_rotations(native, **GEOMETRY)


def test_what_was_measured_per_layer_round_trips(tmp_path):
    rotations = random_rotations()
    measured = dict(
        clip_k=(0.86, 0.9), clip_v=0.92, seed=3, errors={"k": [0.25, 0.5], "v": [0.1, 0.2]},
        sensitivity={part: {"2": [0.5, 1e-05], "4": [0.01, 0.0]} for part in "kv"}, sensitivity_unit="nats",
    )  # fmt: skip
    rotations = replace(rotations, meta=replace(rotations.meta, **measured))
    save_rotations(rotations, tmp_path / "r", kv_heads=2)
    loaded = load_rotations(tmp_path / "r", **GEOMETRY)
    assert loaded.meta == replace(rotations.meta, source=str(tmp_path / "r"), sha256=loaded.meta.sha256)
    assert loaded.meta.clips(2) == ((0.86, 0.9), (0.92, 0.92))
    assert '"clip_k": [0.86, 0.9]' in (tmp_path / "r" / CONFIG_FILE).read_text()


@pytest.mark.parametrize("heads", [1, 4])
def test_for_worker_slices_layers_and_heads(heads):
    rotations = random_rotations(layers=3, heads=heads)
    worker = rotations.for_worker(range(1, 3), kv_heads_total=4, head_start=2, head_count=2)
    expected = rotations.k[1:, 2:4] if heads == 4 else rotations.k[1:].expand(2, 2, 64, 64)
    assert torch.equal(worker.k, expected) and worker.k.is_contiguous() and worker.v.is_contiguous()


def test_for_worker_refuses_what_is_not_there():
    rotations = random_rotations(layers=2, heads=2)
    for layers, total, start, count in [(range(1, 3), 2, 0, 2), (range(2), 2, 1, 2), (range(2), 4, 0, 2)]:
        with pytest.raises(KVQuantError):
            rotations.for_worker(layers, total, start, count)
