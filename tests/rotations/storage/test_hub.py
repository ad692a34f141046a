"""A fake hub: finding a folder in a repository, downloads, the cache when offline, uploads."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from sglang_kvq.cli import app
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import load_rotations, save_rotations
from sglang_kvq.rotations.storage import hub as hub_module
from sglang_kvq.rotations.storage.card import describe_gains, model_card
from sglang_kvq.rotations.storage.hub import TENSOR_FILE, find_folder
from sglang_kvq.rotations.storage.published import K_FILE, V_FILE, save_published
from sglang_kvq.rotations.storage.registry import Published
from sglang_kvq.rotations.storage.schema import CONFIG_FILE
from tests.rotations.helpers import random_rotations, random_transform

GEOMETRY = dict(layers=2, kv_heads=2, head_dim=64)


def pair(folder):
    return [f"{folder}/{K_FILE}", f"{folder}/{V_FILE}"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Fakes a hub with one repository ``org/zoo`` in a folder; ``hub.online`` and ``hub.cached`` say what answers."""

    class Hub:
        root, online, cached, token, asked, uploads = tmp_path / "repo", True, False, "hf_x", [], []

        def answer(self):
            if not self.online:
                raise ConnectionError("no route to the hub")

    fake = Hub()
    fake.asked, fake.uploads = [], []
    fake.root.mkdir()

    class Api:
        def model_info(self, repo, revision=None, timeout=None):
            fake.answer()
            names = [p.relative_to(fake.root).as_posix() for p in fake.root.rglob("*") if p.is_file()]
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

        def whoami(self):
            fake.answer()
            return {"name": "org"}

        def create_repo(self, repo, exist_ok):
            assert exist_ok
            fake.answer()

        def upload_folder(self, *, repo_id, folder_path, path_in_repo, allow_patterns, commit_message):
            fake.answer()
            shutil.copytree(folder_path, fake.root / (path_in_repo or "."), dirs_exist_ok=True)

        def upload_file(self, *, repo_id, path_or_fileobj, path_in_repo, commit_message):
            fake.answer()
            (fake.root / path_in_repo).write_bytes(path_or_fileobj)
            fake.uploads.append((repo_id, path_in_repo))

    def snapshot(repo, revision=None, allow_patterns=None, local_files_only=False):
        if not (fake.cached if local_files_only or not fake.online else True):
            raise ConnectionError("not cached")
        if not local_files_only:
            fake.asked.append((repo, allow_patterns))
        return str(fake.root)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: fake.token)
    return fake


TAGGED = [
    "README.md",
    *pair("Qwen3-8B_seq32768_prompt64_group128"),
    *pair("Qwen3-8B-Base_seq1"),
    *pair("glm/GLM-4.7-FP8"),
]


@pytest.mark.parametrize(
    "wanted, folder",
    [
        ("Qwen3-8B", "Qwen3-8B_seq32768_prompt64_group128"),
        ("qwen3-8b", "Qwen3-8B_seq32768_prompt64_group128"),
        ("GLM-4.7-FP8", "glm/GLM-4.7-FP8"),
        ("Qwen3-8B-Base_seq1", "Qwen3-8B-Base_seq1"),
    ],
)
def test_a_folder_is_found_by_the_models_name(wanted, folder):
    assert find_folder(TAGGED, wanted, "org/zoo") == (folder, (K_FILE, V_FILE))


def test_an_exact_name_goes_before_a_tagged_one():
    files = [*pair("Qwen3-8B/seq1"), *pair("Qwen3-8B_seq2")]
    assert find_folder(files, "Qwen3-8B", "org/zoo")[0] == "Qwen3-8B/seq1"


def test_ambiguity_is_refused_with_the_candidates():
    with pytest.raises(KVQuantError, match="org/zoo/Qwen3-8B_seq1, org/zoo/Qwen3-8B_seq2.*--kv-quant-rotations"):
        find_folder([*pair("Qwen3-8B_seq1"), *pair("Qwen3-8B_seq2")], "Qwen3-8B", "org/zoo")


@pytest.mark.parametrize(
    "files", [pair("Qwen3-8B-Base"), pair("Qwen3-8B.1"), [f"Qwen3-8B/{K_FILE}"], pair("Qwen3-80B"), []], ids=str
)
def test_neither_variants_nor_half_a_folder_pass_for_the_model(files):
    with pytest.raises(KVQuantError, match="no rotations in Qwen3-8B; folders with rotations"):
        find_folder(files, "Qwen3-8B", "org/zoo")


def test_only_the_folders_files_are_downloaded(hub):
    folder = hub.root / "Qwen3-8B_seq1"
    folder.mkdir()
    save_published(random_rotations(heads=1), folder)
    loaded = load_rotations("org/zoo/Qwen3-8B", **GEOMETRY)
    assert loaded.meta.source == str(folder)
    assert hub.asked == [("org/zoo", pair("Qwen3-8B_seq1"))]


def test_offline_the_cache_serves(hub):
    hub.online, hub.cached = False, True
    save_rotations(random_rotations(), hub.root / "mine", kv_heads=2)
    assert load_rotations("org/zoo/mine", **GEOMETRY).meta.source == str(hub.root / "mine")


def test_unreachable_hub_names_the_cache_and_the_fix(hub, monkeypatch):
    hub.online = False
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(KVQuantError) as caught:
        load_rotations("org/zoo/Qwen3-8B", **GEOMETRY)
    message = str(caught.value)
    for words in (
        "no route",
        constants.HF_HUB_CACHE,
        "HF_HUB_OFFLINE is set",
        "copy the rotations",
        "--kv-quant int4",
    ):
        assert words in message


def test_the_registry_matches_names():
    entry = Published("Qwen3-8B", "x")
    assert entry.fits("qwen3-8b") and entry.fits("Qwen3-8B-FP8")
    assert not entry.fits("Qwen3-8B-Base") and not entry.fits("My-Qwen3-8B")


def test_card_of_transform_coding():
    rotations = random_transform()
    card = model_card(rotations, 2, "org/zoo/tiny")
    gain = describe_gains(rotations)
    for words in (
        "--kv-quant transform",
        "org/zoo/tiny",
        f"| coding gain | {gain} |",
        "importance K",
        "coding gain V, dB",
    ):
        assert words in card, card
    assert "OSCAR" not in card and "clip" not in card and "--kv-quant oscar" in model_card(random_rotations(), 2)


def test_push_uploads_folder_and_card(hub, tmp_path):
    rotations = random_rotations()
    table = {part: {"2": [0.5, 0.25], "4": [0.01, 0.02]} for part in "kv"}
    meta = replace(rotations.meta, clip_k=(0.86, 0.9), sensitivity=table, corpus="a.txt", tokens=9, seed=2)
    save_rotations(replace(rotations, meta=meta), tmp_path / "mine", kv_heads=2)
    command = ["push", str(tmp_path / "mine"), "org/zoo/tiny", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(result.stdout) == {"uploaded": "https://huggingface.co/org/zoo/tree/main/tiny"}
    assert result.exit_code == 0 and hub.uploads == [("org/zoo", "tiny/README.md")]
    assert (hub.root / "tiny" / TENSOR_FILE).read_bytes() == (tmp_path / "mine" / TENSOR_FILE).read_bytes()
    card = (hub.root / "tiny" / "README.md").read_text()
    for words in (
        "base_model: org/tiny",
        "a.txt, 9 tokens, seed 2",
        "0.86 to 0.9 by layer",
        "| 1 | 0.9 |",
        "org/zoo/tiny",
    ):
        assert words in card, card
    load_rotations("org/zoo/tiny", **GEOMETRY)


@pytest.mark.parametrize(
    "trouble, words", [("token", "no Hugging Face token.*hf auth login"), ("online", "does not accept")]
)
def test_push_that_cannot_work_is_refused_before_calibration(hub, tmp_path, trouble, words):
    setattr(hub, trouble, None)
    arguments = ["calibrate", "no/model", "--text", "no.txt", "--output", str(tmp_path / "out"), "--push", "org/zoo"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, KVQuantError)
    with pytest.raises(KVQuantError, match=words):
        raise result.exception
    assert not list(tmp_path.glob("out*"))


def test_a_failed_upload_keeps_the_folder(hub, tmp_path, monkeypatch):
    save_rotations(random_rotations(), tmp_path / "mine", kv_heads=2)

    def refuse(self, **kwargs):
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", refuse)
    with pytest.raises(KVQuantError, match="403 Forbidden.*kvq push"):
        hub_module.push(tmp_path / "mine", "org/zoo", "card")
    assert json.loads((tmp_path / "mine" / CONFIG_FILE).read_text())["sha256"]


def test_push_target_must_be_a_repo(hub):
    with pytest.raises(KVQuantError, match="^name: must be ORG/REPO"):  # of `kvq push`, which has no --push
        hub_module.check_push("name")
