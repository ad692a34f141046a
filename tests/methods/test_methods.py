"""Methods as declared and as resolved for a model: codes, clips, groups, allocated bits, rotations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import INT2, CodeFormat
from sglang_kvq.methods import METHOD_NAMES, RotationKind, get_method
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.maths.fixed import hadamard_rotations, random_rotations
from sglang_kvq.rotations.maths.transform import DISTORTION, PATTERNS, STEPS
from sglang_kvq.rotations.resolve import resolve_clips, resolve_formats, resolve_rotations, rotations_of_worker
from sglang_kvq.rotations.storage.files import save_rotations
from tests.rotations.helpers import random_rotations as orthogonal_rotations
from tests.rotations.helpers import random_transform

LAYERS, KV_HEADS = 4, 2


def model(head_dim: int = 128) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 512, "vocab_size": 1000, "rope_theta": 10000.0,
        "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": KV_HEADS, "head_dim": head_dim,
    }  # fmt: skip


def learned(**meta) -> Rotations:
    return replace(hadamard_rotations(LAYERS, 128), meta=RotationMeta(source="folder", **meta))


def bits(method: str, width: str | None, head_dim: int) -> float:
    rotations = random_transform(LAYERS, KV_HEADS, head_dim) if get_method(method).planes else None
    formats = resolve_formats(KVQuantConfig(method, bits=width), rotations, model(head_dim))
    return sum(f.bits_per_element for f in formats) / len(formats)


@pytest.mark.parametrize(
    "method,width,at_64,at_128",
    [
        ("oscar", None, 2.5, 2.25), ("oscar", "2.5", 3.0, 2.75), ("oscar", "3", 3.5, 3.25),
        ("oscar", "4", 4.5, 4.25), ("oscar-lloyd-max", None, 2.375, 2.1875),
        ("oscar-lloyd-max", "4", 4.375, 4.1875), ("turboquant", None, 3.25, 3.125), ("turboquant", "2", 2.25, 2.125),
        ("turboquant", "2.5", 2.75, 2.625), ("turboquant", "3.5", 3.75, 3.625), ("turboquant", "4", 4.25, 4.125),
        ("kivi", None, 2.5, 2.375), ("kivi", "4", 4.5, 4.375),
        ("hadamard", None, 2.5, 2.25), ("hadamard", "3", 3.5, 3.25), ("transform", None, 2.5, 2.4375),
        ("transform", "2.25", 2.25, 2.1875), ("transform", "4", 4.0, 3.9375),
        ("int2", None, 2.5, 2.25), ("int4", None, 4.625, 4.375),
    ],
)  # fmt: skip
def test_allocated_bits_are_those_of_docs_methods(method, width, at_64, at_128):
    assert (bits(method, width, 64), bits(method, width, 128)) == (at_64, at_128)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_every_width_that_a_method_lists_makes_a_format(name):
    if get_method(name).planes:
        with pytest.raises(ValueError, match="planes"):
            get_method(name).codes(2)
        return
    for width in get_method(name).widths:
        k, v = get_method(name).codes(width)
        assert (k.bits + v.bits) / 2 == width and k.bits - v.bits in (0, 1)
        for head_dim in (64, 96, 128, 256):
            assert (
                resolve_formats(KVQuantConfig(name, bits=f"{width:g}"), None, model(head_dim))[0].head_dim == head_dim
            )


@pytest.mark.parametrize(
    "method,width,message",
    [
        ("oscar", "5", "--kv-quant-bits 5: not a width of --kv-quant oscar. Choose 2, 2.5, 3, 3.5, 4 or auto:TARGET"),
        ("oscar", "2.25", "--kv-quant-bits 2.25: not a width of --kv-quant oscar"),
        ("turboquant", "auto:3", "auto:3: not a width of --kv-quant turboquant. Choose 2, 2.5, 3, 3.5, 4"),
        ("turboquant", "three", "--kv-quant-bits three: not a width"),
        ("oscar", "auto:", "--kv-quant-bits auto:: not a width"),
        ("oscar", "auto:inf", "--kv-quant-bits auto:inf: not a width"),
        ("int4", "3", "--kv-quant-bits 3: not a width of --kv-quant int4; it has 4 bits only. Leave the flag out"),
        ("kivi", "3", "--kv-quant-bits 3: not a width of --kv-quant kivi. Choose 2, 4"),
        ("transform", "1.2", "--kv-quant-bits 1.2: --kv-quant transform allocates any number .* from 1.25 to 4, gains"),
        ("transform", "4.01", "--kv-quant-bits 4.01: .* from 1.25 to 4, .*leave the flag out for 2.5"),
        ("transform", "auto:2.5", "--kv-quant-bits auto:2.5: .* from 1.25 to 4"),
        ("transform", "nan", "--kv-quant-bits nan: .* from 1.25 to 4"),
    ],
)
def test_width_that_a_method_does_not_have_is_refused(method, width, message):
    with pytest.raises(KVQuantError, match=message):
        KVQuantConfig(method, bits=width)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"method": "kivi", "group_size": 128}, "--kv-quant-group-size 128: --kv-quant kivi has 32 or 64"),
        (
            {"method": "turboquant", "group_size": 64},
            "--kv-quant-group-size 64: --kv-quant turboquant has one scale per token row",
        ),
        ({"method": "turboquant", "clip_v": 0.9}, "--kv-quant-clip-v 0.9: --kv-quant turboquant does not clip"),
        (
            {"method": "oscar-lloyd-max", "clip_v": 0.9},
            "--kv-quant-clip-v 0.9: --kv-quant oscar-lloyd-max does not clip",
        ),
        ({"method": "int4", "clip_k": 0.9}, "--kv-quant-clip-k 0.9: --kv-quant int4 does not clip these codes"),
        ({"method": "kivi", "clip_k": 0.9}, "--kv-quant-clip-k 0.9: --kv-quant kivi does not clip these codes"),
        (
            {"method": "transform", "group_size": 64},
            "--kv-quant-group-size 64: --kv-quant transform has one scale per token row",
        ),
        ({"method": "transform", "clip_k": 0.9}, "--kv-quant-clip-k 0.9: .*already clips rows where that lowers"),
        ({"method": "transform", "clip_v": 1.0}, "--kv-quant-clip-v 1.0: .*already clips rows where that lowers"),
        ({"method": "oscar", "seed": 3}, "--kv-quant-seed 3: --kv-quant oscar draws no random rotations"),
        ({"method": "turboquant", "seed": -1}, "--kv-quant-seed -1: must be at least 0"),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_flag_that_means_nothing_to_a_method_is_refused(fields, message):
    with pytest.raises(KVQuantError, match=message):
        KVQuantConfig(**fields)


def test_kivi_groups_of_the_paper():
    """The paper (arXiv 2402.02750) uses groups of 32 tokens for keys and 32 channels for values."""
    format = resolve_formats(KVQuantConfig("kivi", group_size=32), None, model())[0]
    assert (format.run, format.group_size, format.bits_per_element) == (32, 32, 3.0)
    assert (format.k.axis, format.v.axis) == ("channel", "token")


def test_group_that_does_not_divide_the_head_is_refused():
    with pytest.raises(KVQuantError, match="--kv-quant-group-size 96 does not divide this model's head_dim 128"):
        resolve_formats(KVQuantConfig("int2", group_size=96), None, model())


def test_clips_are_the_flags_then_the_calibrations_then_the_methods():
    per_layer = learned(clip_k=(0.9, 0.91, 0.92, 0.93), clip_v=0.8)
    assert resolve_clips(KVQuantConfig("oscar"), None, 4) == [(0.96, 0.92)] * 4
    assert resolve_clips(KVQuantConfig("oscar"), per_layer, 4) == [(0.9, 0.8), (0.91, 0.8), (0.92, 0.8), (0.93, 0.8)]
    assert resolve_clips(KVQuantConfig("oscar", clip_k=0.7), per_layer, 4) == [(0.7, 0.8)] * 4


@pytest.mark.parametrize(
    "config", [KVQuantConfig("oscar", bits="4"), KVQuantConfig("oscar-lloyd-max")], ids=KVQuantConfig.describe
)
def test_calibrated_clips_are_for_int2_only(config):
    assert resolve_clips(config, learned(clip_k=0.9, clip_v=0.8), 4) == [(1.0, 1.0)] * 4
    assert resolve_clips(replace(config, clip_k=0.97), learned(clip_k=0.9), 4) == [(0.97, 1.0)] * 4


def test_auto_widens_by_sensitivity():
    rises = {
        "k": {"2": [8.0, 1.0, 4.0, 64.0], "4": [0.5, 0.01, 1.0, 4.0]},
        "v": {"2": [2.0, 1.0, 3.0, 2.0], "4": [0.1] * 4},
    }
    formats = resolve_formats(KVQuantConfig("oscar", bits="auto:2.75"), learned(sensitivity=rises, clip_k=0.9), model())
    assert [(f.k.bits, f.v.bits) for f in formats] == [(3, 2), (2, 2), (2, 3), (4, 2)]
    assert [f.clip_k for f in formats] == [1.0, 0.9, 0.9, 1.0] and [f.clip_v for f in formats] == [
        0.92,
        0.92,
        1.0,
        0.92,
    ]
    lloyd = resolve_formats(KVQuantConfig("oscar-lloyd-max", bits="auto:2.5"), learned(sensitivity=rises), model())
    assert [f.k.bits for f in lloyd] == [2, 2, 2, 4] and lloyd[3].k.levels == "lloyd-max"


def test_a_clip_flag_holds_for_codes_of_every_width_that_auto_chooses():
    rises = {part: {"2": [1.0] * 4, "4": [0.1, 0.1, 0.9, 0.9]} for part in "kv"}
    config = KVQuantConfig("oscar", bits="auto:2.75", clip_k=0.95)
    formats = resolve_formats(config, learned(sensitivity=rises, clip_k=0.9, clip_v=0.9), model())
    assert {f.clip_k for f in formats} == {0.95} and len({f.k.bits for f in formats}) > 1
    assert {(f.v.bits > 2, f.clip_v) for f in formats} == {(True, 1.0), (False, 0.9)}


def test_auto_without_sensitivities_says_how_to_get_them():
    with pytest.raises(
        KVQuantError, match="--kv-quant-bits auto:2.75: folder hold no layer sensitivities.*kvq calibrate"
    ):
        resolve_formats(KVQuantConfig("oscar", bits="auto:2.75"), learned(), model())


def test_oscar_is_the_int2_of_the_fast_kernels():
    for name in ("oscar", "hadamard", "int2"):
        assert (get_method(name).k, get_method(name).v) == (INT2, INT2) == (CodeFormat(), CodeFormat())


# -- transform coding


def foreseen(rotations: Rotations, formats: tuple) -> float:
    """Returns the model's predicted loss, from importance, energies and each plane's distortion."""
    total = 0.0
    for part, energies in (("k", rotations.k_energies), ("v", rotations.v_energies)):
        planes = energies.double().unflatten(-1, (4, -1)).sum((1, 3))  # all heads: [layers, planes]
        for layer, format in enumerate(formats):
            errors = torch.tensor([DISTORTION[w] for w in getattr(format, part).widths], dtype=torch.float64)
            total += rotations.meta.importance[part][layer] * float(planes[layer] @ errors)
    return total


def test_planes_go_where_the_model_minds():
    """Planes follow the budget and a layer's importance, and beat any single pattern for all layers."""
    rotations = random_transform(LAYERS, KV_HEADS, 128)
    rotations = replace(rotations, meta=replace(rotations.meta, importance={"k": [1.0] * 3 + [1e6], "v": [1.0] * 4}))
    formats = resolve_formats(KVQuantConfig("transform", bits="2.3"), rotations, model())
    spent = sum(f.bits_per_element for f in formats) / LAYERS
    assert 2.3 - 4 / 4 / 2 / LAYERS < spent <= 2.3
    everywhere = [
        foreseen(rotations, tuple(replace(f, k=replace(f.k, widths=p), v=replace(f.v, widths=p)) for f in formats))
        for p in PATTERNS
        if sum(p) / 4 + 8 / 128 <= 2.3
    ]
    assert foreseen(rotations, formats) < min(everywhere)
    assert formats[3].k.total > max(f.k.total for f in formats[:3]) and len({f.v.total for f in formats}) <= 2
    assert all(list(code.widths) == sorted(code.widths, reverse=True) for f in formats for code in (f.k, f.v))


def test_more_bits_lose_less():
    rotations = random_transform(LAYERS, KV_HEADS, 128)
    losses = [
        foreseen(rotations, resolve_formats(KVQuantConfig("transform", bits=f"{b}"), rotations, model()))
        for b in (1.25, 1.7, 2.5, 3.2, 4)
    ]
    assert losses == sorted(losses, reverse=True) and losses[0] > 4 * losses[-1]


def test_rotations_of_another_kind_say_how_to_get_the_right_ones(tmp_path):
    config = model(64)
    for name, rotations in (("oscar", orthogonal_rotations(LAYERS)), ("transform", random_transform(LAYERS))):
        save_rotations(rotations, tmp_path / name, kv_heads=KV_HEADS)
    found = resolve_rotations(KVQuantConfig("transform", rotations=str(tmp_path / "transform")), "m", config)
    assert found.is_transform
    wanted = "kvq calibrate org/tiny --composition transform`, or serve these with --kv-quant oscar"
    with pytest.raises(KVQuantError, match=f"oscar: they are not for transform coding .*{wanted}"):
        resolve_rotations(KVQuantConfig("transform", rotations=str(tmp_path / "oscar")), "m", config)
    for method in ("oscar", "oscar-lloyd-max"):
        with pytest.raises(KVQuantError, match="for transform coding, not for .*serve them with --kv-quant transform"):
            resolve_rotations(KVQuantConfig(method, rotations=str(tmp_path / "transform")), "m", config)
    with pytest.raises(KVQuantError, match="--kv-quant transform: its pages depend on the rotations"):
        resolve_formats(KVQuantConfig("transform"), None, config)


def test_folded_steps_leave_attention_as_it_is():
    """Folded steps change neither scores nor outputs, in every worker's slice."""
    rotations = random_transform(LAYERS, KV_HEADS, 64)
    formats = resolve_formats(KVQuantConfig("transform"), rotations, model(64))
    worker = rotations_of_worker(rotations, formats[1:], range(1, LAYERS), KV_HEADS, 1, 1)
    plain = rotations.for_worker(range(1, LAYERS), KV_HEADS, 1, 1)
    one = torch.eye(64).expand_as(worker.k)
    for read, stored in ((worker.q, worker.k), (worker.o, worker.v)):
        torch.testing.assert_close((read.double() @ stored.double().mT).float(), one, atol=1e-4, rtol=0)
    for layer, format in enumerate(formats[1:]):
        steps = torch.tensor([STEPS[w] for w in format.k.widths]).repeat_interleave(16)
        torch.testing.assert_close(worker.k[layer, 0] * steps, plain.k[layer, 0])
        torch.testing.assert_close(worker.k_mean[layer, 0] * steps, plain.k_mean[layer, 0])
        steps = torch.tensor([STEPS[w] for w in format.v.widths]).repeat_interleave(16)
        torch.testing.assert_close(worker.o[layer, 0] / steps, plain.o[layer, 0])


# -- random rotations
# -------------------------------------------------------------------------------------------------------


def test_random_rotations_are_orthogonal_and_of_each_head():
    r = random_rotations(3, 2, 64, seed=5)
    for x in (r.k, r.v):
        assert x.shape == (3, 2, 64, 64) and x.dtype == torch.float32
        assert ((x.mT @ x) - torch.eye(64)).abs().max() < 1e-5
    flat = torch.cat([r.k, r.v]).flatten(0, 1)
    assert (torch.cdist(flat.flatten(1), flat.flatten(1)) > 1).sum() == 12 * 11, "two heads share a rotation"


def test_random_rotations_are_haar():
    """Haar matrices: entries have mean 0, variance 1/D, 4th moment 3 / (D (D + 2)); traces mean 0, variance 1."""
    x = random_rotations(40, 25, 16, seed=1).k.double().flatten(0, 1)
    d, n = 16, x.numel()
    assert abs(x.mean().item()) < 4 * (1 / d / n) ** 0.5
    assert x.pow(4).mean().item() == pytest.approx(3 / (d * (d + 2)), rel=0.05)
    trace = x.diagonal(dim1=1, dim2=2).sum(-1)
    assert abs(trace.mean().item()) < 4 * len(x) ** -0.5 and trace.var().item() == pytest.approx(1, rel=0.2)


def test_seed_decides_and_processes_agree():
    config = KVQuantConfig("turboquant")
    first, again = (resolve_rotations(config, "m", model()) for _ in range(2))
    other = resolve_rotations(replace(config, seed=1), "m", model())
    assert torch.equal(first.k, again.k) and not torch.equal(first.k, other.k)
    assert torch.equal(first.k, resolve_rotations(replace(config, seed=0), "m", model()).k)
    assert first.meta.source == "random, seed 0" and other.meta.source == "random, seed 1"


def test_tensor_parallel_workers_take_the_rotations_of_their_global_heads():
    whole = random_rotations(LAYERS, 8, 64)
    for rank in range(4):
        worker = whole.for_worker(range(LAYERS), 8, 2 * rank, 2)
        assert torch.equal(worker.k, whole.k[:, 2 * rank : 2 * rank + 2]) and torch.equal(
            worker.v, whole.v[:, 2 * rank : 2 * rank + 2]
        )


def test_only_learned_methods_take_rotation_files():
    for name in METHOD_NAMES:
        if get_method(name).rotation is not RotationKind.LEARNED:
            with pytest.raises(KVQuantError, match=f"--kv-quant-rotations r: --kv-quant {name} uses no rotation files"):
                resolve_rotations(KVQuantConfig(name, rotations="r"), "m", model())
