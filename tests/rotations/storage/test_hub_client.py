"""The real hub client in a separate process: revisions, missing names, no network, and the cache."""

import json
import os
import socket
import time

import pytest

from tests import pairs, preloaded_cli
from tests.rotations.hub_cache import COMMIT, lay_out
from tests.rotations.hub_server import REPOSITORY, hub_server
from tests.rotations.published_files import PER_HEAD, SHARED, real_files, write

OLD, NEW = "a" * 40, "b" * 40
ZOO = "Zhongzhu/OSCAR-RotationZoo"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Serves a hub whose folder ``model/tagged`` got files per head after tag v1; yields address and requests."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    for root in (old, new):
        write(root / "model" / "tagged", SHARED, [0, 1])
        (root / "README.md").write_text("not fetched")
    write(new / "model" / "tagged", PER_HEAD, [0, 1], heads=2, version=2)
    write(new / "latents", ["layer_0.pt", "layer_1.pt"], [0])
    with hub_server({"main": (NEW, new), "v1": (OLD, old), "feature/x": (OLD, old)}) as served:
        yield served


def inspect(location, cache, endpoint="http://127.0.0.1:1", offline=False):
    """Runs ``kvq inspect --json`` and returns its output, or the error's text."""
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | {
        "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    done = preloaded_cli.run(["inspect", "--json", location], environment)
    if done.returncode == 0:
        return json.loads(done.stdout)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {location.split('@')[0]}"), done.stderr
    return lines[0]


REVISIONS = {"": "per-head", "@v1": "per-layer", f"@{OLD}": "per-layer", "@feature/x": "per-layer", "@main": "per-head"}


@pytest.mark.parametrize("revision, granularity", list(REVISIONS.items())[: None if pairs.everything else 3])
def test_a_revision_is_fetched_and_then_served_without_a_network(hub, tmp_path, revision, granularity):
    endpoint, asked = hub
    location = f"{REPOSITORY}/model/tagged{revision}"
    fetched = inspect(location, tmp_path, endpoint)
    assert fetched["granularity"] == granularity and not any("README" in path for path in asked)
    for offline in (True, False):
        assert inspect(location, tmp_path, offline=offline) == fetched
    if revision[1:] == OLD:  # a commit in the cache cannot have changed
        asked.clear()
        assert inspect(location, tmp_path, endpoint) == fetched and not asked


def test_what_does_not_exist_is_said(hub, tmp_path):
    endpoint, _ = hub
    text = inspect(f"{REPOSITORY}/model/tagged@v2", tmp_path, endpoint)
    assert f"{REPOSITORY} has no revision v2. Pass a branch, tag or commit" in text
    text = inspect(f"{REPOSITORY}/other@v1", tmp_path, endpoint)
    assert f"no rotations in other; folders with rotations: {REPOSITORY}/model/tagged@v1" in text
    text = inspect("org/gone/model", tmp_path, endpoint)
    assert "no such repository on the Hugging Face hub, or none that you may read" in text
    assert "MLA's latents" in inspect(f"{REPOSITORY}/latents", tmp_path, endpoint)


def test_one_pair_of_several_on_the_hub(hub, tmp_path):
    endpoint, _ = hub
    assert inspect(f"{REPOSITORY}/model/tagged/{SHARED[0]}", tmp_path, endpoint)["granularity"] == "per-layer"


def test_a_hub_that_never_answers_is_given_up_in_seconds(tmp_path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(16)
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        took = []
        for address in ("http://127.0.0.1:1", endpoint):  # the first refuses at once
            begun = time.monotonic()
            assert "cannot be reached" in inspect(f"{REPOSITORY}/model", tmp_path, address)
            took.append(time.monotonic() - begun)
        assert took[1] < 20 + 3 * took[0], "slow machines take longer for both"
        lay_out(tmp_path, REPOSITORY, "model", write(tmp_path / "made", SHARED, [0, 1]))
        assert inspect(f"{REPOSITORY}/model", tmp_path, endpoint)["granularity"] == "per-layer"


def test_offline_names_what_the_cache_has(tmp_path):
    cache = tmp_path / "cache"
    text = inspect(f"{ZOO}/Qwen3.5-4B", cache, offline=True)
    for words in ("offline mode", f"not in the cache {cache}", "HF_HUB_OFFLINE is set", "kvq calibrate MODEL"):
        assert words in text
    lay_out(cache, ZOO, "Qwen3-8B/seq1", write(tmp_path / "made", SHARED, [0, 1]))
    text = inspect(f"{ZOO}/Qwen3.5-4B", cache, offline=True)
    assert f"folders with rotations: {ZOO}/Qwen3-8B/seq1" in text and "The hub cannot be reached (offline mode)" in text
    assert "The name Qwen3.5-4B is inferred from its authors' scripts" in text


def test_a_cache_with_the_older_shared_files_only(tmp_path):
    """Qwen3-30B-A3B is published per head and must not be loaded from shared files alone."""
    lay_out(tmp_path, ZOO, "Qwen3-30B-A3B", write(tmp_path / "made", SHARED, [0, 1]))
    text = inspect(f"{ZOO}/Qwen3-30B-A3B", tmp_path, offline=True)
    assert "only the shared ones are here" in text and f"and {PER_HEAD[1]} are needed" in text
    lay_out(tmp_path, ZOO, "Qwen3-30B-A3B", write(tmp_path / "per head", PER_HEAD, [0, 1], heads=2, version=2))
    assert inspect(f"{ZOO}/Qwen3-30B-A3B", tmp_path, offline=True)["granularity"] == "per-head"


RESOLVE = """
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.rotations.resolve import locate_rotations, resolve_rotations
import json, sys
model, rotations = sys.argv[1], sys.argv[2] or None
config = dict(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, hidden_size=4096)
config |= dict(architectures=["Qwen3ForCausalLM"], vocab_size=151936, rope_theta=1e6)
method = KVQuantConfig("oscar", rotations=rotations)
meta = resolve_rotations(method, model, config).meta
print(json.dumps([locate_rotations(method, model, config), meta.source, meta.files]))
"""


@pytest.mark.parametrize("model, flag", [
    ("Qwen/Qwen3-8B", ""), ("/models/Qwen3-8B", ZOO), ("Qwen/Qwen3-8B-FP8", f"{ZOO}@main"),
    ("Qwen/Qwen3-8B", f"{ZOO}@{COMMIT}"),
])  # fmt: skip
def test_the_quick_starts_model_finds_its_published_rotations(tmp_path, model, flag):
    """A repository without a folder means its folder for the model, at the given revision."""
    folder, source = "Qwen3-8B/seq20000_prompt83_group128", real_files("qwen3-8b")
    lay_out(tmp_path, ZOO, folder, source)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = preloaded_cli.run([model, flag], environment, code=RESOLVE)
    assert done.returncode == 0, done.stderr
    location, found, files = json.loads(done.stdout)
    revision = f"@{flag.partition('@')[2]}" if "@" in flag else ""
    assert location == f"{ZOO}/{folder}{revision}" and found.endswith(f"snapshots/{COMMIT}/{folder}")
    assert set(files) == set(SHARED)
