"""Short extends that read stored pages directly agree with float64 on the same codes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_kvq.attention.planning.extend_costs import Geometry
from sglang_kvq.attention.planning.short_extend import AS_MEASURED, ShortExtends
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.pack import unpack_codes
from sglang_kvq.kernels.extend import history as extend_history
from sglang_kvq.kernels.extend.extend_attention import NARROW, WIDE, Item, extend_launch, plan_extend
from tests import device_waits
from tests.kernels.scene import HEADS, ON_GPU, Heads, Scene, check_extend, make_batch, make_scene, prefix_scene, randn
from tests.kernels.test_formats import make_format
from tests.kernels.test_unpack import OPERATIONS, execute, words
from tests.pairs import each, few

BOUND = 5e-3
#: The launch for small batches. The interpreter is slow per row, so its tiles have as few rows as a product allows.
SMALL = NARROW if ON_GPU else replace(NARROW, rows=16)
#: Geometries for which one batch is enough.
OTHERS = [HEADS[7], HEADS[3], HEADS[5], Heads(64, 64, 1, 16), Heads(128, 128, 1, 1), HEADS[2], HEADS[4], *HEADS[6::2]]
ANY = ShortExtends(costs=None, most_rows_unpacked=1 << 20, least_prefix=0, launch=SMALL)

# Lengths of the prefix and of the new tokens, for each request.
BATCHES = {
    "one-token": [(64 * 6 + 5, 1)],
    "ragged": [(64 * 9, 7), (0, 3), (64 * 4 + 63, 1), (5, 9)],
    "bf16_pages-only": [(100, 6), (64 * 3, 5)],
    "no-prefix": [(0, 70), (0, 1)],
    "tail-of-one": [(64 * 7 + 1, 5), (64 * 7 - 1, 2)],
}
if ON_GPU:
    BATCHES |= {
        "chat": [(3000 * i + 17 * i, 1 + 37 * i % 250) for i in range(20)],
        "long": [(131072, 100)],
        "many": [(61 * i, 1 + 9 * i % 70) for i in range(120)],
    }


def check(scene: Scene, lens, short=ANY, **more) -> TritonOps:
    ops = check_extend(scene, lens, BOUND, short=short, **more)
    plan = ops._extend_plans.short
    assert plan is not None and ops._extend_plans.slabs is None, "another kernel was used"
    assert plan.launch == short.launch
    return ops


@each(lens=BATCHES, heads=HEADS[:2])
def test_agrees_with_float64(heads, lens):
    check(prefix_scene(heads, lens), lens)


@pytest.mark.parametrize("heads", few(OTHERS, 3), ids=str)
def test_all_geometries(heads):
    lens = [(64 * 5 + 9, 4), (64, 2)]
    check(prefix_scene(heads, lens), lens, layers=[1])


@pytest.mark.parametrize("launch", [NARROW, WIDE], ids=lambda x: f"rows{x.rows}-warps{x.warps}")
def test_tiles_of_all_sizes(launch):
    heads = HEADS[7] if launch is WIDE else HEADS[1]
    lens = [(64 * 4 + 3, 40), (64 * 6, 3)]
    check(prefix_scene(heads, lens), lens, replace(ANY, launch=launch), layers=[0])


@pytest.mark.parametrize("sink,recent", few([(0, 0), (192, 128), (64, 10_000), (0, 64), (64, 0), (320, 0)], 3))
def test_history_begins_and_ends_anywhere(sink, recent):
    lens = [(64 * 5 + 17, 3), (64 * 5, 3)]
    check(prefix_scene(HEADS[1], lens, sink, recent), lens, layers=[0])


@pytest.mark.parametrize("scale", few([0.0, 1e-28, 3e4, 1e-3, 30.0], 3))
def test_queries_of_any_size(scale):
    """Queries are scaled by a power of two to fit FP16; large ones make scores that differ by thousands."""
    heads = replace(HEADS[0], kv=1)
    check(make_scene(heads, [64 * 5]), [(64 * 5, 4)], layers=[0], size=scale)


@pytest.mark.parametrize(
    "kind,heads",
    few(
        [
            ("lloyd-max-4-3-g32", Heads(96, 32, 1, 2)),
            ("uniform-3-3", Heads(256, 128, 1, 1)),
            ("sphere-4-3", Heads(64, 64, 1, 4)),
            ("channel-2", Heads(128, 32, 1, 2)),
            ("centred-4", Heads(64, 64, 1, 3)),
            ("oscar-lloyd-max", Heads(128, 128, 2, 4)),
            ("centred-lloyd-max", Heads(96, 96, 1, 2)),
            ("odd-statistics", Heads(128, 128, 1, 3)),
        ],
        5,
    ),
    ids=str,
)
def test_other_formats(kind, heads):
    lens = [(64 * 5 + 40, 3)]
    scene = make_scene(heads, [lens[0][0]], formats=[make_format(kind, heads.head_dim)])
    check(scene, lens, layers=[0])


def half(x: np.ndarray, shift: int) -> np.ndarray:
    return (x.astype(np.uint64) >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16)


def fma_f16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """PTX's fma.rn.f16x2: computes both halves in float64, which holds the product and the sum, and rounds once."""
    parts = [half(a, s).astype(np.float64) * half(b, s) + half(c, s) for s in (0, 16)]
    low, high = (x.astype(np.float16).view(np.uint16).astype(np.uint64) for x in parts)
    return low | high << np.uint64(16)


def test_the_assembly_gives_codes_times_scale_plus_offset(monkeypatch):
    monkeypatch.setitem(OPERATIONS, "fma.rn.f16x2", fma_f16x2)
    monkeypatch.setitem(OPERATIONS, "lop3.b32", lambda a, b, c, table: (a & b | c) * (table == 0xEA))
    count = 2000
    packed = words(count, 1)
    codes = unpack_codes(torch.from_numpy(packed.astype(np.uint32).view(np.uint8)), count, 16, 2).numpy()
    codes = codes.reshape(count, 4, 4)  # [word, plane, byte]
    draw = np.random.default_rng(2)
    for ptx, arguments in ((extend_history._KEYS_PTX, 4), (extend_history._VALUES_PTX, 8)):
        pairs = (draw.standard_normal((arguments, count, 4)) * 3).astype(np.float16)
        if arguments == 4:  # s, z of planes 0 and 1, then of 2 and 3; a token's value in both halves, four times
            pairs[...] = pairs[..., :1]
            operands = [x[:, [0, 0]].copy().view(np.uint32)[:, 0] for x in pairs for _ in range(4)]
            scale, offset = pairs[[0, 0, 2, 2]], pairs[[1, 1, 3, 3]]
        else:  # s of each plane, then z of each plane; each token's word holds it and its neighbor
            operands = [
                x[:, 2 * (i // 2) : 2 * (i // 2) + 2].copy().view(np.uint32)[:, 0] for x in pairs for i in range(4)
            ]
            scale, offset = pairs[:4], pairs[4:]
        got = [x.view(np.float16) for x in execute(ptx.value, 8, [packed, *operands])]  # [word, 2] each
        for plane in range(4):
            exact = codes[:, plane] * scale[plane].astype(np.float64) + offset[plane]
            assert np.array_equal(np.concatenate(got[2 * plane : 2 * plane + 2], 1), exact.astype(np.float16))


@pytest.mark.parametrize("seed", range(60))
def test_every_row_meets_every_key_once(seed):
    draw = random.Random(seed)
    gqa_group, rows, wave = draw.choice([1, 3, 4, 5, 16]), draw.choice([16, 64, 128]), draw.choice([1, 5, 33, 400])
    lens = [
        (draw.choice([0, 1, 64, draw.randrange(9000)]), draw.choice([0, 1, 64, draw.randint(1, 300)])) for _ in range(7)
    ]
    lens.append((draw.randrange(3000), 1))
    prefix, new = map(list, zip(*lens))
    plan = plan_extend(prefix, new, gqa_group, rows, wave)
    starts = np.cumsum([0, *new])
    met: dict[tuple[int, int], list] = {}
    taken = set()
    for item in (Item(*fields) for fields in plan.items.tolist()):
        request = item.request
        assert (item.start, item.new, item.prefix) == (starts[request], new[request], prefix[request])
        for row in range(item.first_row, min(item.first_row + rows, item.new * gqa_group)):
            token = row // gqa_group
            first, many = plan.spans[item.start + token]
            assert many == item.parts
            if many > 1:  # otherwise the item writes the whole row
                partial = item.begin + token * many + item.part
                assert (partial, row % gqa_group) not in taken and partial < plan.partials
                taken.add((partial, row % gqa_group))
                assert first <= partial < first + many
            met.setdefault((request, row), []).append((item.first, item.last))
    assert len(taken) == plan.partials * gqa_group, "a partial result that nothing writes"
    for request, (stored_tokens, count) in enumerate(lens):
        for row in range(count * gqa_group):
            seen = [unit for first, last in sorted(met[request, row]) for unit in range(first, last)]
            pages = -(-stored_tokens // PAGE_SIZE)
            assert seen == list(range(len(seen))) and len(seen) * PAGE_SIZE >= (
                pages * PAGE_SIZE + row // gqa_group + 1
            )


def test_a_long_prefix_fills_the_gpu_once():
    plan = plan_extend([131072], [16], 4, 64, 33)
    assert len(plan.items) == 33
    items = Item(*plan.items.T)
    sizes = items.last - items.first
    assert sizes.max() - sizes.min() <= 1 and sizes.sum() == 2049
    assert len(plan_extend([16384] * 8, [64] * 8, 4, 128, 16).items) in (16, 32, 48)
    assert plan_extend([0], [0], 4, 64, 33).partials == 0


def test_which_batches_are_short():
    """Checks rules that do not depend on measured costs; ``test_extend_costs.py`` has the measured points."""
    geometry = Geometry(32, 8, 128, 132)
    suits = lambda prefix, new, short=AS_MEASURED, cheap=True: short.suits(  # noqa: E731
        prefix, new, geometry, cheap=cheap, capacity=65536, flashinfer=True
    )
    assert suits([32768], [16]) and suits([32768, 500], [16, 1]) and not suits([8192], [512])
    assert not suits([511], [5]) and suits([2048], [5]), "no prefix to speak of"
    assert not suits([32768], [0]) and not suits([32768], [0], ANY)
    assert suits([32768], [32], cheap=False) and not suits([32768], [33], cheap=False)
    assert suits([0], [512], ANY, cheap=False)
    assert extend_launch(128) is NARROW and extend_launch(256) is WIDE


@pytest.mark.gpu
def test_planning_and_running_never_wait_for_the_device():
    heads = HEADS[1]
    scene = make_scene(heads, [5000, 64, 900])
    ops = scene.ops()[0]
    ops.short = replace(ANY, launch=None)
    q, k, v = (randn(60, n, heads.head_dim) for n in (heads.q, heads.kv, heads.kv))
    lens = [(5000, 30), (64, 10), (900, 20)]
    ops.extend(0, q, k, v, make_batch(scene.rows, lens), scene.scale)
    batch = make_batch(scene.rows, lens)
    with device_waits.refused():
        ops.extend(0, q, k, v, batch, scene.scale)
