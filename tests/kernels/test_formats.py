"""Every kind of code passes through every kernel that reads or writes records."""

from dataclasses import replace

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import INT2, CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.kernels.extend.gather_pages import gather_pages
from tests.kernels.scene import DEVICE, Heads, assert_close, int64, make_batch, make_scene, randn
from tests.kernels.test_decode import BOUND, check_decode, exact
from tests.kernels.test_quantize import heavy, same_records
from tests.pairs import each, few

LLOYD = CodeFormat(2, "lloyd-max", "moments")
SPHERE = CodeFormat(3, "sphere", "norm")
CHANNEL = CodeFormat(axis="channel")
CENTRED = CodeFormat(4, centred=True)


def bits(code: CodeFormat, n: int) -> CodeFormat:
    return replace(code, bits=n)


#: Codes of keys, codes of values, and further fields of the format; a group of None is min(head_dim, 128).
KINDS = {
    "oscar-lloyd-max": (replace(LLOYD, gain=1.1), CodeFormat(2, "sphere", "norm", gain=1.1), {}),
    "lloyd-max": (LLOYD, LLOYD, {"clip_v": 0.92, "group": 32}),
    "lloyd-max-3-4": (bits(LLOYD, 3), bits(LLOYD, 4), {"clip_k": 0.96, "clip_v": 0.92}),
    "lloyd-max-4-3-g32": (bits(LLOYD, 4), bits(LLOYD, 3), {"group": 32}),
    "uniform-4-2": (bits(INT2, 4), INT2, {"clip_k": 0.98, "clip_v": 0.92}),
    "uniform-2-4": (INT2, bits(INT2, 4), {"group": 32}),
    "uniform-3-3": (bits(INT2, 3), bits(INT2, 3), {"clip_v": 0.96}),
    "sphere-3-2": (SPHERE, bits(SPHERE, 2), {}),
    "sphere-4-3": (bits(SPHERE, 4), SPHERE, {}),
    "sphere-2-4": (bits(SPHERE, 2), bits(SPHERE, 4), {}),
    "channel-2": (CHANNEL, INT2, {"group": 32, "run": 32}),
    "channel-4": (bits(CHANNEL, 4), bits(INT2, 4), {}),
    "channel-3-moments": (CodeFormat(3, "lloyd-max", "moments", "channel"), SPHERE, {"run": 16}),
    "centred-4": (CENTRED, bits(INT2, 4), {}),
    "centred-4-g32": (CENTRED, INT2, {"clip_v": 0.92, "group": 32}),
    "centred-3": (bits(CENTRED, 3), bits(INT2, 3), {}),
    "centred-lloyd-max": (replace(LLOYD, centred=True), LLOYD, {}),
    "centred-sphere": (replace(SPHERE, bits=2, centred=True), bits(SPHERE, 2), {}),
    "odd-statistics": (
        CodeFormat(2, "uniform", "norm"),
        CodeFormat(4, "sphere", "minmax"),
        {"clip_v": 0.9, "group": 32},
    ),
}


def make_format(kind: str, head_dim: int) -> PageFormat:
    k, v, more = KINDS[kind]
    more = dict(more)
    return PageFormat(head_dim, more.pop("group", min(head_dim, 128)), k=k, v=v, **more)


@each(kind=KINDS.keys(), head_dim=HEAD_DIMS)
def test_activations_and_back(kind, head_dim):
    """quantize_tokens gives the reference's records, and gather_pages reads them back, both bit for bit."""
    format, pages = make_format(kind, head_dim), 2
    table = torch.arange(4 * PAGE_SIZE, dtype=torch.int32, device=DEVICE)[None] % (3 * PAGE_SIZE)
    pool = PagePool.allocate([format], kv_heads=1, pages=3, slots=1, req_to_token=table)
    pool.read_rows()
    pool.records[0].fill_(0xAA)
    ops = TritonOps(pool, LayerRotations(), 1, 1)
    kv = heavy(PAGE_SIZE * pages + 5, 2, head_dim)
    k, v = kv[:, :1], kv[:, 1:]
    ids, first = int64(2, 1), int64(3, 5 + PAGE_SIZE)
    ops.quantize_tokens(0, first, ids, k, v)
    tokens = first[:, None] + torch.arange(PAGE_SIZE, device=DEVICE)
    want = format.quantize_pages(k[tokens].transpose(1, 2), v[tokens].transpose(1, 2))
    same_records(format, pool.records[0][ids], want)
    assert (pool.records[0][[0, 3]] == 0xAA).all(), "wrote outside its pages"

    pool.row_history_end[0] = 3 * PAGE_SIZE
    plan = torch.tensor([[0, 2, 0, 64], [0, 1, 64, 17]], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(2, 2 * PAGE_SIZE, 1, head_dim, dtype=torch.bfloat16, device=DEVICE)
    gather_pages(*out, int64(0), plan, *ops._stored(0))
    for got, back in zip(out, format.dequantize_pages(want)):
        back = back.bfloat16().squeeze(1)
        assert torch.equal(got[:64, 0], back[0]) and torch.equal(got[64:81, 0], back[1][:17])
        assert not got[81:].any()


def test_bf16_pages_of_mixed_layers():
    """Layers of five layouts share a pool, with clips per layer; some have none."""
    a, b, c = make_format("lloyd-max", 64), PageFormat(64, 64, 0.96, 0.92), make_format("channel-2", 64)
    formats = [a, b, replace(a, clip_k=0.9, clip_v=1.0), c, replace(b, clip_k=0.9), replace(b, clip_k=1.0, clip_v=1.0)]
    formats += [make_format("centred-4", 64), make_format("centred-lloyd-max", 64)]
    heads = Heads(64, 64, 1, 1)  # test_quantize.py has more heads and pages
    scene = make_scene(heads, [64], margin=4, formats=formats)
    ops, reference = scene.ops()
    pool = scene.pool
    assert len(pool.stores) == 5
    pool.bf16_pages.copy_(heavy(*pool.bf16_pages.shape))
    slots, pages = int64(3, 1, 4), int64(2, 5, 1)
    before = [records.clone() for records in pool.records]
    reference.quantize_slots(slots, pages, int64(2))
    want = [records.clone() for records in pool.records]
    for records, old in zip(pool.records, before):
        records.copy_(old)
    ops.quantize_slots(slots, pages, int64(2))
    for format, got, right, old in zip(formats, pool.records, want, before):
        same_records(format, got[pages[:2]], right[pages[:2]])
        got[pages[:2]] = old[pages[:2]]
        assert torch.equal(got, old), "wrote outside its pages"


@pytest.mark.parametrize(
    "kind,heads",
    few(
        [
            ("oscar-lloyd-max", Heads(128, 128, 2, 4)),
            ("lloyd-max-4-3-g32", Heads(64, 32, 1, 5)),
            ("uniform-4-2", Heads(256, 128, 1, 2)),
            ("uniform-3-3", Heads(96, 96, 1, 2)),
            ("sphere-3-2", Heads(128, 128, 1, 4)),
            ("channel-2", Heads(128, 32, 1, 4)),
            ("channel-3-moments", Heads(96, 96, 1, 9)),
            ("centred-4", Heads(128, 128, 2, 4)),
            ("centred-sphere", Heads(64, 64, 2, 7)),
            ("odd-statistics", Heads(128, 32, 1, 3)),
            ("oscar-lloyd-max", Heads(64, 64, 1, 3)),
            ("lloyd-max", Heads(128, 32, 1, 2)),
            ("lloyd-max", Heads(96, 32, 1, 4)),
            ("lloyd-max-3-4", Heads(128, 128, 1, 2)),
            ("lloyd-max-4-3-g32", Heads(96, 32, 1, 1)),
            ("lloyd-max-4-3-g32", Heads(128, 32, 1, 2)),
            ("lloyd-max-4-3-g32", Heads(256, 32, 2, 1)),
            ("uniform-2-4", Heads(96, 32, 1, 4)),
            ("uniform-3-3", Heads(256, 128, 1, 1)),
            ("sphere-4-3", Heads(256, 128, 1, 8)),
            ("sphere-2-4", Heads(96, 96, 2, 1)),
            ("channel-2", Heads(64, 32, 2, 1)),
            ("channel-4", Heads(256, 128, 1, 2)),
            ("centred-4", Heads(96, 96, 1, 2)),
            ("centred-4-g32", Heads(64, 32, 1, 3)),
            ("centred-3", Heads(256, 128, 1, 1)),
            ("centred-lloyd-max", Heads(128, 128, 1, 8)),
            ("centred-sphere", Heads(256, 128, 1, 2)),
        ],
        10,
    ),
    ids=str,
)
def test_decode_agrees_with_float64(kind, heads):
    scene = make_scene(heads, [64 * 5 + 40, 64 * 8], formats=[make_format(kind, heads.head_dim)])
    check_decode(scene.ops()[0], scene)


def test_layers_share_a_plan_if_they_divide_a_batch_alike():
    """An SM holds twelve programs of the first and third format; the other two need more registers."""
    formats = [PageFormat(128, 32, 0.96, 0.92), make_format("sphere-4-3", 128), make_format("channel-2", 128)]
    formats.append(make_format("centred-4", 128))
    scene = make_scene(Heads(128, 32, 1, 4), [700, 64, 90], formats=formats)
    ops, reference = scene.ops()
    assert [ops.plans.index(plan) for plan in ops.layer_plans] == [0, 1, 0, 1]
    q = scene.queries(3)
    ops.plan_attention(scene.rows, scene.seq_lens)
    for layer in range(len(formats)):
        got = ops.decode(layer, q, scene.rows, scene.seq_lens, scene.scale)
        assert_close(f"layer {layer}", got.double(), exact(scene, layer, q), BOUND)
        batch = make_batch(scene.rows, [(384, 1), (64, 1), (64, 1)])
        k, v = randn(3, 1, 128), randn(3, 1, 128)
        got = ops.extend(layer, q, k, v, batch, scene.scale)
        assert_close(f"extend, layer {layer}", got, reference.extend(layer, q, k, v, batch, scene.scale), 2 * BOUND)


@each(head_dim=HEAD_DIMS, size=[200.0, 6e4, 3e38], kind=["centred-4", "centred-lloyd-max", "centred-sphere"])
def test_channels_of_any_mean(kind, head_dim, size):
    """Channel means may be far above the residuals, or beyond FP16, where they are clamped.

    Residuals are then not BF16 values.
    """
    format, heads = make_format(kind, head_dim), Heads(head_dim, min(head_dim, 128), 1, 1)
    scene = make_scene(heads, [64], formats=[format])
    ops, reference = scene.ops()
    k = (randn if size == 200 else heavy)(PAGE_SIZE, 1, head_dim).float()
    k[:, :, ::3] += size
    k[:, :, 5] -= size
    k, v = k.bfloat16(), heavy(PAGE_SIZE, 1, head_dim)
    ops.quantize_tokens(0, int64(0), int64(1), k, v)
    reference.quantize_tokens(0, int64(0), int64(2), k, v)
    same_records(format, *scene.pool.records[0][1:3])


def test_decode_of_keys_with_constant_channels():
    """Keys may differ by only a hundredth of their common offset."""
    heads = Heads(128, 128, 1, 4)
    scene = make_scene(heads, [64 * 6 + 9], recent=64, formats=[make_format("centred-4", 128)])
    ops, _ = scene.ops()
    pool, offset = scene.pool, torch.zeros(128, device=DEVICE)
    offset[[3, 50, 64, 120]] = torch.tensor([200.0, -90.0, 60.0, 150.0], device=DEVICE)
    for index in range(7):
        page = int(pool.req_to_token[1, index * PAGE_SIZE]) // PAGE_SIZE
        k, v = randn(2, 1, PAGE_SIZE, 128)
        pool.records[0][page] = pool.formats[0].quantize_pages((k.float() + offset).bfloat16(), v)
        slot = int(pool.page_slot[page])
        if slot >= 0:
            pool.bf16_pages[0, slot, 0] = (pool.bf16_pages[0, slot, 0].float() + offset).bfloat16()
    check_decode(ops, scene)


@pytest.mark.parametrize(
    "format", [PageFormat(64, 64, v=CHANNEL), PageFormat(64, 64, k=CHANNEL, run=8)], ids=["values", "run"]
)
def test_what_no_method_asks_for_is_refused(format):
    with pytest.raises(KVQuantError, match="layer 0: keys in 2 bits uniform minmax per .*Use 16, 32 or 64, or a CPU"):
        make_scene(Heads(64, 64, 1, 1), [64], formats=[format]).ops()
