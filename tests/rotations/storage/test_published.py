"""Every layout in which OSCAR's authors publish rotations: which file is read, in which order, and what is refused."""

import hashlib
import shutil

import pytest
import torch

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import load_rotations
from sglang_kvq.rotations.identity import LayerNumbers, layer_numbers
from sglang_kvq.rotations.resolve import resolve_rotations
from sglang_kvq.rotations.storage.files import convert_rotations, load_once, read_rotations
from tests.rotations.published_files import HADAMARD, PER_HEAD, PLAIN, SHARED, document, real_files, rotation, write

GEOMETRY = dict(layers=2, kv_heads=2, head_dim=64)
#: A hybrid of 6 layers, every third of which uses full attention, and the keyword arguments for its rotations.
HYBRID = dict(**GEOMETRY, numbers=LayerNumbers((2, 5), 6))
HYBRID_CONFIG = dict(
    architectures=["Qwen3NextForCausalLM"], num_hidden_layers=6, full_attention_interval=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, hidden_size=128, vocab_size=512, rope_theta=1e4,
)  # fmt: skip


def rotations_of(folder, name, keys):
    layers = torch.load(folder / name, weights_only=True)["layers"]
    return torch.stack([layers[key]["rotation"] for key in keys])


# -- real files

REAL = {
    "qwen3-8b": (SHARED, range(36), dict(layers=36, kv_heads=8, head_dim=128)),
    "qwen3-4b-thinking-2507": (SHARED, range(36), dict(layers=36, kv_heads=8, head_dim=128)),
    "qwen3.5-4b": (
        PLAIN, range(3, 32, 4),
        dict(layers=8, kv_heads=4, head_dim=256, numbers=LayerNumbers(tuple(range(3, 32, 4)), 32)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", REAL)
def test_real_files_are_read_whole_and_in_order(model):
    names, keys, geometry = REAL[model]
    folder = real_files(model)
    loaded = load_rotations(folder, **geometry)
    for name, r in zip(names, (loaded.k, loaded.v)):
        assert torch.equal(r[:, 0], rotations_of(folder, name, keys))
    assert loaded.meta.files == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    read, _ = read_rotations(folder)
    assert torch.equal(read.k, loaded.k) and read.k_eigenvalues.shape == loaded.k.shape[:3]


def test_a_real_hybrids_config_takes_its_file():
    """The layers with full attention come from Qwen3.5-4B's config."""
    text = dict(
        num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4, head_dim=256, hidden_size=2560,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8,
    )  # fmt: skip
    folder = real_files("qwen3.5-4b")
    found = resolve_rotations(KVQuantConfig("oscar", rotations=str(folder)), "Qwen/Qwen3.5-4B", {"text_config": text})
    assert torch.equal(found.v[:, 0], rotations_of(folder, PLAIN[1], range(3, 32, 4)))


# -- layers by their numbers


@pytest.mark.parametrize("keys", [[2, 5], ["2", "5"], [5, 2], [0, 1], ["1", "0"], range(6)], ids=str)
def test_a_hybrids_layers_are_taken_by_number(tmp_path, keys):
    """Keys may be the model's layer numbers, numbers of the layers that have a cache, or all of the model's layers."""
    write(tmp_path, SHARED, keys)
    wanted = [0, 1] if sorted(map(int, keys)) == [0, 1] else [2, 5]
    wanted = [str(i) for i in wanted] if isinstance(keys[0], str) else wanted
    for found in (
        load_rotations(tmp_path, **HYBRID),
        resolve_rotations(KVQuantConfig("oscar", rotations=str(tmp_path)), "org/model", HYBRID_CONFIG),
    ):
        assert torch.equal(found.k[:, 0], rotations_of(tmp_path, SHARED[0], wanted))
        assert torch.equal(found.v[:, 0], rotations_of(tmp_path, SHARED[1], wanted))


@pytest.mark.parametrize("keys, problem", [
    ([2], "layer 5 is missing (1 of 2 layers are); the file has layers [2]"),
    ([2, 4], "layer 5 is missing"),
    ([1, 2], "layer 5 is missing"),
    ([1, 2, 5], "it has 3 layers, the model has 2"),
    (range(7), "it has 7 layers, the model has 2"),
    ([2, -5], "-5 is not a layer number"),
    ([2, "5x"], "'5x' is not a layer number"),
    ([2, 5.0], "5.0 is not a layer number"),
    ([2, True], "True is not a layer number"),
    ([2, "\u0665"], "'\u0665' is not a layer number"),
    (["2", 2, 5], "the entry of layer 2 is damaged"),
], ids=str)  # fmt: skip
def test_other_layers_are_refused(tmp_path, keys, problem):
    content = document(range(7))
    entries = {key: {**content["layers"][i], "layer_id": key} for i, key in enumerate(keys)}
    for name in SHARED:
        torch.save({**content, "layers": entries}, tmp_path / name)
    with pytest.raises(KVQuantError) as caught:
        load_rotations(tmp_path, **HYBRID)
    assert str(tmp_path / SHARED[0]) in str(caught.value) and problem in str(caught.value)


def test_numbers_of_a_config():
    assert layer_numbers(HYBRID_CONFIG) == ((2, 5), 6)
    assert layer_numbers({"num_hidden_layers": 3}) == ((0, 1, 2), 3)


def test_keys_and_values_of_other_layers_are_refused(tmp_path):
    write(tmp_path, SHARED, [2, 5])
    torch.save(document([2, 4]), tmp_path / SHARED[1])
    with pytest.raises(KVQuantError, match="different layers"):
        read_rotations(tmp_path)


def test_a_hybrids_file_is_inspected_and_converted(tmp_path):
    write(tmp_path / "a", PLAIN, ["2", "5"])
    convert_rotations(tmp_path / "a", tmp_path / "b", to="safetensors", kv_heads=2)
    loaded = load_rotations(tmp_path / "b", **HYBRID)
    assert torch.equal(loaded.k[:, 0], rotations_of(tmp_path / "a", PLAIN[0], ["2", "5"]))


# -- which of several files


@pytest.mark.parametrize(
    "names", [SHARED, PLAIN, HADAMARD, PER_HEAD, ("k_rotation_ktk_r_h.pt", "v_rotation_vtv_r_h.pt")]
)
def test_every_name_is_read(tmp_path, names):
    write(tmp_path, names, [0, 1])
    assert list(load_rotations(tmp_path, **GEOMETRY).meta.files) == list(names)


@pytest.mark.parametrize("beside", [SHARED, PLAIN, HADAMARD], ids=lambda names: names[0])
def test_matrices_per_head_go_before_shared_ones(tmp_path, beside):
    """Shared matrices cost Qwen3-30B-A3B a quarter of its GPQA score."""
    write(tmp_path, beside, [0, 1])
    write(tmp_path, PER_HEAD, [0, 1], heads=2, version=2, seed=5)
    loaded = load_rotations(tmp_path, **GEOMETRY)
    assert loaded.granularity == "per-head" and list(loaded.meta.files) == list(PER_HEAD)
    assert torch.equal(loaded.k, rotations_of(tmp_path, PER_HEAD[0], [0, 1])) and loaded.k_eigenvalues is None


@pytest.mark.parametrize("missing", PER_HEAD)
def test_half_of_the_files_per_head_is_not_replaced_by_shared_ones(tmp_path, missing):
    write(tmp_path, SHARED, [0, 1])
    write(tmp_path, PER_HEAD, [0, 1], heads=2, version=2)
    (tmp_path / missing).unlink()
    with pytest.raises(KVQuantError, match=f"{missing} is missing"):
        load_rotations(tmp_path, **GEOMETRY)


def test_a_config_of_version_2_wants_matrices_per_head(tmp_path):
    write(tmp_path, SHARED, [0, 1])
    (tmp_path / "config.json").write_text('{"format_version": 1}')
    assert load_rotations(tmp_path, **GEOMETRY).granularity == "per-layer"
    (tmp_path / "config.json").write_text('{"format_version": 2}')
    with pytest.raises(
        KVQuantError, match=r"a matrix for each KV head, layer 0 has shape \[64, 64\].*older shared file"
    ):
        load_rotations(tmp_path, **GEOMETRY)
    write(tmp_path, SHARED, [0, 1], heads=2)
    loaded = load_rotations(tmp_path, **GEOMETRY)
    assert loaded.granularity == "per-head" and set(loaded.meta.files) == {*SHARED, "config.json"}


@pytest.mark.parametrize("config, problem", [
    ("{", "not valid JSON"), ("[" * 100_000, "not valid JSON"), ("[]", "not a JSON object"),
    ('{"format_version": "2"}', "format_version '2'; .* reads versions 1 and 2"),
    ('{"format_version": 3}', "format_version 3; .* reads versions 1 and 2"),
    ('{"format_version": 2, "sha256": "0", "geometry": {}}', "describes rotations.safetensors, which is missing"),
], ids=lambda text: text[:30])  # fmt: skip
def test_another_config_beside_published_files(tmp_path, config, problem):
    write(tmp_path, PER_HEAD, [0, 1], heads=2, version=2)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(KVQuantError, match=f"config.json: .*{problem}"):
        load_rotations(tmp_path, **GEOMETRY)


@pytest.mark.parametrize("part", [0, 1])
def test_a_file_of_version_2_with_shared_matrices_is_refused(tmp_path, part):
    write(tmp_path, PER_HEAD, [0, 1], heads=2, version=2)
    torch.save(document([0, 1], version=2), tmp_path / PER_HEAD[part])
    with pytest.raises(KVQuantError, match=f"{PER_HEAD[part]}: format_version 2 means a matrix for each KV head"):
        load_rotations(tmp_path, **GEOMETRY)


def test_several_pairs_are_refused_until_one_is_named(tmp_path):
    write(tmp_path, SHARED, [0, 1])
    write(tmp_path, HADAMARD, [0, 1], seed=7)
    with pytest.raises(KVQuantError, match=f"several pairs .*{HADAMARD[0]}, {SHARED[0]}.*--kv-quant-rotations"):
        load_rotations(tmp_path, **GEOMETRY)
    for names in (SHARED, HADAMARD):
        for name in names:
            assert list(load_rotations(tmp_path / name, **GEOMETRY).meta.files) == list(names)
    (tmp_path / "no-rotations.pt").touch()
    with pytest.raises(KVQuantError, match="no-rotations.pt: its name is not one of rotations"):
        load_rotations(tmp_path / "no-rotations.pt", **GEOMETRY)


def test_a_new_file_per_head_is_noticed(tmp_path):
    write(tmp_path, SHARED, [0, 1])
    assert load_once(tmp_path, **GEOMETRY).granularity == "per-layer"
    write(tmp_path, PER_HEAD, [0, 1], heads=2, version=2)
    assert load_once(tmp_path, **GEOMETRY).granularity == "per-head"


# -- MLA


def test_latents_are_refused(tmp_path):
    for folder in (tmp_path / "c_kv_rcov_phblock_g128", tmp_path / "rotations"):
        folder.mkdir()
        with pytest.raises(KVQuantError):
            load_rotations(folder, **GEOMETRY)
        torch.save(rotation(64), folder / "layer_0.pt")
        (folder / "config.json").write_text("{}")
        with pytest.raises(
            KVQuantError, match=f"{folder.name}: these rotations are of MLA's latents .*without --kv-quant"
        ):
            load_rotations(folder, **GEOMETRY)


# -- tensors

BAD_TENSORS = {
    "no tensor": (lambda r: [[1.0]], "is not a tensor (list)"),
    "missing": (lambda r: None, "is not a tensor (NoneType)"),
    "FP8": (lambda r: r.to(torch.float8_e4m3fn), "has dtype torch.float8_e4m3fn"),
    "integers": (lambda r: r.round().int(), "has dtype torch.int32"),
    "complex": (lambda r: r.to(torch.complex64), "has dtype torch.complex64"),
    "sparse": (lambda r: r.to_sparse(), "is not a dense CPU tensor"),
    "meta": (lambda r: r.to("meta"), "is not a dense CPU tensor"),
    "quantized": (lambda r: torch.quantize_per_tensor(r, 0.1, 0, torch.qint8), "is not a dense CPU tensor"),
    "empty": (lambda r: r[:0], "is empty"),
    "expanded": (lambda r: torch.ones(1).expand(64, 64), "more than the file holds"),
    "a row": (lambda r: r[0], "expected [D, D] or [heads, D, D]"),
    "not square": (lambda r: r[:32].clone(), "expected [D, D] or [heads, D, D]"),
    "four dimensions": (lambda r: r[None, None], "expected [D, D] or [heads, D, D]"),
}


@pytest.mark.parametrize("change, problem", BAD_TENSORS.values(), ids=BAD_TENSORS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_are_checked(tmp_path, change, problem):
    write(tmp_path, SHARED, [0, 1])
    content = document([0, 1])
    content["layers"][0]["rotation"] = change(content["layers"][0]["rotation"])
    torch.save(content, tmp_path / SHARED[1])
    with pytest.raises(KVQuantError) as caught:
        load_rotations(tmp_path, **GEOMETRY)
    assert f"{SHARED[1]}: rotation of layer 0 " in str(caught.value) and problem in str(caught.value)
    assert "\n" not in str(caught.value)


SPECTRA = {
    "short": (lambda x: x[:5], r"eigenvalues of layer 1 has shape \[5\], expected \[64\]"),
    "integers": (lambda x: x.int(), "eigenvalues of layer 1 has dtype torch.int32"),
    "infinite": (lambda x: x / 0, "eigenvalues of layer 1, head 0 holds NaN or infinity"),
}
SHAPE = r"rotation of layer 1 has shape \[32, 32\], expected \[64, 64\]"
VERSION = "format_version .*; of published rotations, this sglang-kvq reads versions 1"
#: Changed fields of layer 1's entry or of the whole document, and the resulting message.
DOCUMENTS = {
    **{name: ({}, dict(eigenvalues=change), problem) for name, (change, problem) in SPECTRA.items()},
    "another shape": ({}, dict(rotation=lambda r: rotation(32)), SHAPE),
    "another layer": ({}, dict(layer_id=lambda number: 0), "the entry of layer 1 is damaged"),
    **{
        f"version {type(version).__name__} {n}": (dict(format_version=version), {}, VERSION)
        for n, version in enumerate((0, 3, -1, "2", 2.0, True, None, [2], 10**400))
    },
}


@pytest.mark.parametrize("fields, changes, problem", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_are_checked(tmp_path, fields, changes, problem):
    write(tmp_path, SHARED, [0, 1])
    content = {**document([0, 1]), **fields}
    for name, change in changes.items():
        content["layers"][1][name] = change(content["layers"][1][name])
    torch.save(content, tmp_path / SHARED[0])
    with pytest.raises(KVQuantError, match=problem):
        load_rotations(tmp_path, **GEOMETRY)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_precisions_are_read_as_float32(tmp_path, dtype):
    write(tmp_path, SHARED, [0, 1])
    content = document([0, 1])
    for entry in content["layers"].values():
        entry["rotation"] = torch.nn.Parameter(entry["rotation"].to(dtype))
    torch.save(content, tmp_path / SHARED[0])
    loaded = load_rotations(tmp_path, **GEOMETRY)
    assert loaded.k.dtype == torch.float32 and not loaded.k.requires_grad


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    with pytest.raises(KVQuantError, match="cannot be read .*[Pp]ermission"):
        load_rotations(tmp_path, **GEOMETRY)


NAMES = {
    "user": "~no-such-user/rotations",
    "long": "a" * 5000,
    "long on the hub": "o/" + "a" * 5000,
    "null": "no\0name",
}


@pytest.mark.parametrize("location", NAMES.values(), ids=NAMES)
def test_names_that_no_folder_has(location):
    with pytest.raises(KVQuantError):
        load_rotations(location, **GEOMETRY)


def test_a_dangling_link_is_no_file(tmp_path):
    write(tmp_path / "real", SHARED, [0, 1])
    shutil.copytree(tmp_path / "real", tmp_path / "copy")
    (tmp_path / "copy" / SHARED[1]).unlink()
    (tmp_path / "copy" / SHARED[1]).symlink_to("nowhere.pt")
    with pytest.raises(KVQuantError, match=f"{SHARED[1]} is missing"):
        load_rotations(tmp_path / "copy", **GEOMETRY)


def test_names_in_messages_stay_on_one_line(tmp_path):
    write(tmp_path, SHARED, [0, 1])
    torch.save({**document([0, 1]), "format_version": "2\nerror: hacked"}, tmp_path / SHARED[0])
    with pytest.raises(KVQuantError) as caught:
        load_rotations(tmp_path, **GEOMETRY)
    assert "\n" not in str(caught.value)
    torch.save({**document([0, 1]), "objective": "a\nb"}, tmp_path / SHARED[0])
    assert "\n" not in load_rotations(tmp_path, **GEOMETRY).meta.objective
