"""Each tensor-parallel worker applies the rotations of its own layers and KV heads."""

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.rotations import load_rotations, save_rotations
from sglang_kvq.rotations.maths.transform import STEPS
from sglang_kvq.rotations.resolve import resolve_formats, resolve_rotations
from sglang_kvq.sglang.attention import worker_rotations as worker
from tests.rotations.helpers import random_rotations, random_transform

HEADS, LAYERS, D = 6, 4, 64
MODEL = dict(
    architectures=["LlamaForCausalLM"],
    hidden_size=768,
    num_hidden_layers=LAYERS,
    num_attention_heads=12,
    num_key_value_heads=HEADS,
    head_dim=D,
    vocab_size=512,
    rope_theta=1e4,
)


@pytest.fixture
def runner(tmp_path):
    """Returns a model of 6 KV heads, and the config with which it is served."""
    save_rotations(random_rotations(layers=LAYERS, heads=HEADS, balanced=True), tmp_path / "r", kv_heads=HEADS)
    model = SimpleNamespace(hf_config=MODEL, model_path=str(tmp_path))
    return SimpleNamespace(model_config=model, device="cpu"), KVQuantConfig("oscar", rotations=str(tmp_path / "r"))


def rank_rotations(runner, monkeypatch, rank: int, size: int, heads: int, first: int = 0, layers: int = LAYERS):
    monkeypatch.setattr(worker, "tensor_parallel", lambda model_runner: (rank, size))
    geometry = KVGeometry(heads, (PageFormat(D, D),) * layers)
    return worker.worker_rotations(*runner, geometry, range(first, first + layers))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_random_rotations_are_those_of_the_global_heads(runner, monkeypatch, size):
    """Every rank draws the whole model's rotations and keeps its part, so the TP size does not change the cache."""
    runner = runner[0], KVQuantConfig("turboquant", seed=5)
    whole = rank_rotations(runner, monkeypatch, 0, 1, HEADS)[0]
    parts = [rank_rotations(runner, monkeypatch, rank, size, HEADS // size)[0] for rank in range(size)]
    assert torch.equal(torch.cat([part.k for part in parts], dim=1), whole.k)
    assert torch.equal(torch.cat([part.v for part in parts], dim=1), whole.v)
    assert not torch.equal(whole.k[:, 0], whole.k[:, 1])


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_heads_are_dealt_out_in_order(runner, monkeypatch, size):
    whole = load_rotations(runner[1].rotations, layers=LAYERS, kv_heads=HEADS, head_dim=D)
    parts = [rank_rotations(runner, monkeypatch, rank, size, HEADS // size)[0] for rank in range(size)]
    for name in "qkv":
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(whole, name)), name


def test_more_workers_than_heads_share_them(runner, monkeypatch):
    whole = load_rotations(runner[1].rotations, layers=LAYERS, kv_heads=HEADS, head_dim=D)
    for rank in range(12):
        part, _ = rank_rotations(runner, monkeypatch, rank, 12, 1)
        assert torch.equal(part.k, whole.k[:, rank // 2, None]) and torch.equal(part.q, whole.q[:, rank // 2, None]), (
            rank
        )


def test_layers_of_a_later_stage(runner, monkeypatch):
    whole = load_rotations(runner[1].rotations, layers=LAYERS, kv_heads=HEADS, head_dim=D)
    part, meta = rank_rotations(runner, monkeypatch, 1, 2, 3, first=2, layers=2)
    assert torch.equal(part.v, whole.v[2:, 3:]) and torch.equal(part.q, whole.q[2:, 3:])
    assert meta.sha256 == whole.meta.sha256 and len(meta.sha256) == 64


def test_files_have_the_cached_layers_only(runner, monkeypatch):
    """A file for a hybrid of 16 layers holds rotations of its 4 full-attention layers only."""
    hybrid = MODEL | dict(num_hidden_layers=4 * LAYERS, full_attention_interval=4)
    runner[0].model_config.hf_config = hybrid
    whole = load_rotations(runner[1].rotations, layers=LAYERS, kv_heads=HEADS, head_dim=D)
    monkeypatch.setattr(worker, "tensor_parallel", lambda model_runner: (0, 1))
    for ids, at in (((3, 7, 11, 15), slice(0, 4)), ((11, 15), slice(2, 4))):
        geometry = KVGeometry(HEADS, (PageFormat(D, D),) * len(ids))
        assert torch.equal(worker.worker_rotations(*runner, geometry, ids)[0].k, whole.k[at])


@pytest.mark.parametrize("linear", [True, False])
def test_the_cache_is_sized_for_the_layers_in_it(runner, monkeypatch, linear):
    """SGLang's count of cached layers must match the model's config; otherwise formats would be of other layers."""
    from sglang_kvq.sglang import runtime
    from sglang_kvq.sglang.memory import capacity

    monkeypatch.setattr(runtime, "_current", None)
    monkeypatch.setattr(capacity.drafts, "keeps_states", lambda model: True)  # the original asks SGLang's config
    hybrid = MODEL | dict(num_hidden_layers=2 * LAYERS, layer_types=["linear_attention", "full_attention"] * LAYERS)
    model = SimpleNamespace(hf_config=hybrid if linear else MODEL, model_path="m", head_dim=D)
    configurator = SimpleNamespace(
        server_args=SimpleNamespace(_kvq_config=runner[1]),
        is_draft_worker=False,
        model_config=model,
        kv_cache_dtype=torch.bfloat16,
        layer_info=SimpleNamespace(start_layer=2, end_layer=8),
        spec_algorithm=SimpleNamespace(is_eagle=lambda: False, is_standalone=lambda: False),
    )
    plain = 3 * HEADS * 2 * D * 2
    if not linear:
        with pytest.raises(
            SystemExit, match="SGLang keeps 3 layers of m in its KV cache, but according to the model's config 2"
        ):
            capacity.compute_cell_size(lambda *_: plain, None, configurator, 3)
        return
    cell = capacity.compute_cell_size(lambda *_: plain, None, configurator, 3)
    state = runtime.current()
    assert state.layer_ids == (3, 5, 7) and state.geometry.kv_heads == HEADS
    assert cell == state.geometry.page_bytes // 64 and state.geometry.layers == 3


@pytest.mark.parametrize("size", [1, 2, 6])
def test_every_worker_folds_the_same_steps(runner, monkeypatch, tmp_path, size):
    """Widths are those of all heads and layers together, so a worker's part is that of one worker alone."""
    save_rotations(random_transform(LAYERS, HEADS), tmp_path / "t", kv_heads=HEADS)
    config = KVQuantConfig("transform", rotations=str(tmp_path / "t"))
    formats = resolve_formats(config, resolve_rotations(config, "m", runner[0].model_config.hf_config), MODEL)
    assert len(set(formats)) > 1, "layers differ"
    monkeypatch.setattr(worker, "tensor_parallel", lambda model_runner: (0, 1))
    whole, meta = worker.worker_rotations(runner[0], config, KVGeometry(HEADS, formats), range(LAYERS))
    assert meta.objective == "transform"
    for layers in (range(2), range(2, 4)):  # pipeline stages
        part = []
        for rank in range(size):
            monkeypatch.setattr(worker, "tensor_parallel", lambda model_runner, rank=rank: (rank, size))
            geometry = KVGeometry(HEADS // size, formats[layers.start : layers.stop])
            part.append(worker.worker_rotations(runner[0], config, geometry, layers)[0])
        for name in ("q", "k", "v", "o", "k_mean"):
            found = torch.cat([getattr(p, name) for p in part], dim=1)
            assert torch.equal(found, getattr(whole, name)[layers.start : layers.stop]), name
    loaded = load_rotations(tmp_path / "t", layers=LAYERS, kv_heads=HEADS, head_dim=D)
    top = [STEPS[f.k.widths[0]] for f in formats]
    torch.testing.assert_close(whole.k[..., 0], loaded.k[..., 0] / torch.tensor(top)[:, None, None])


def test_a_start_reads_the_file_once(applied, command_line, tmp_path, monkeypatch):
    """A process reads the rotation file once: to check it, to size the cache, and to give it to the worker."""
    from sglang_kvq.rotations.storage import files
    from sglang_kvq.sglang import checks, compat, runtime
    from sglang_kvq.sglang.memory import capacity

    save_rotations(random_rotations(), tmp_path / "r", kv_heads=2)
    reads, original = [], files._load
    monkeypatch.setattr(files, "_load", lambda *words: reads.append(words) or original(*words))
    monkeypatch.setattr(runtime, "_current", None)

    server_args = command_line("--kv-quant", "oscar", "--kv-quant-rotations", str(tmp_path / "r"))
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    config, model = runtime.config_of(server_args), compat.model_config(server_args)
    checks.check_resolved(server_args, config)
    configurator = SimpleNamespace(
        server_args=server_args,
        is_draft_worker=False,
        model_config=model,
        kv_cache_dtype=torch.bfloat16,
        layer_info=SimpleNamespace(start_layer=0, end_layer=2),
        spec_algorithm=SimpleNamespace(is_eagle=lambda: False, is_standalone=lambda: False),
    )
    capacity.compute_cell_size(lambda *_: 2 * 2 * 64 * 2 * 2, None, configurator, 2)
    monkeypatch.setattr(worker, "tensor_parallel", lambda model_runner: (0, 1))
    runner = SimpleNamespace(model_config=model, device="cpu")
    rotations, _ = worker.worker_rotations(runner, config, runtime.current().geometry, (0, 1))
    assert torch.equal(rotations.k, random_rotations().k) and len(reads) == 1


@pytest.mark.parametrize("name, inferred", [("Qwen3-8B", False), ("Qwen3.5-4B", True)])
def test_the_log_says_that_a_folders_name_is_inferred(caplog, name, inferred):
    model = SimpleNamespace(hf_config=MODEL, model_path=f"Qwen/{name}")
    worker.log_inferred(SimpleNamespace(model_config=model), KVQuantConfig("oscar"))
    worker.log_inferred(SimpleNamespace(model_config=model), KVQuantConfig("int4"))
    expected = (
        f"Zhongzhu/OSCAR-RotationZoo/{name} is inferred from its authors' scripts: check that these are Qwen/{name}'s"
    )
    assert [expected in record.getMessage() for record in caplog.records] == [True] * inferred
