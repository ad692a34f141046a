"""Decode attention over sinks, history and window agrees with float64 on the same codes."""

import pytest
import torch
import triton

from benchmarks.kernel_bench import oracle
from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.planning.step_plan import StepPlans
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.kernels.decode.decode_attention import DecodeLaunch
from sglang_kvq.kernels.decode.split_work import WorkCosts
from tests.kernels.scene import DEVICE, HEADS, ON_GPU, SOME_HEADS, Heads, Scene, assert_close, make_scene
from tests.pairs import each, few

BOUND = 5e-3

LENGTHS = {
    "ragged": [1, 63, 64, 65, 190, 330, 0, 800],
    "odd-pages": [64 * 8 + 1, 64 * 9 + 1],
}
if ON_GPU:
    LENGTHS |= {"long": [20_000, 5, 7777], "very-long": [300_001], "many": [100 + 37 * i for i in range(100)]}


#: Geometries for products in FP16; some have padded columns or dims.
HALF_HEADS = [
    Heads(128, 128, 1, 6),
    Heads(64, 64, 2, 8),
    Heads(96, 96, 1, 5),
    Heads(128, 128, 1, 12),
    Heads(64, 64, 2, 3),
    Heads(128, 128, 2, 1),
]


def exact(scene: Scene, layer: int, q: torch.Tensor) -> torch.Tensor:
    return oracle.decode(scene.pool, layer, q, scene.rows, scene.seq_lens, scene.scale)


def half_a_bit(scene: Scene, layer: int, q: torch.Tensor) -> float:
    """Returns the relative change of the result if each query moves by half of BF16's last bit.

    The change is large if large scores nearly tie.
    """
    want = exact(scene, layer, q)
    nudged = exact(scene, layer, q.double() * (1 + 2.0**-9 * torch.randn(q.shape, device=q.device).sign()))
    return ((nudged - want).norm() / want.norm()).item()


def decode(ops: TritonOps, layer: int, q: torch.Tensor, scene: Scene) -> torch.Tensor:
    """Runs one decode step of one layer."""
    ops.plan_attention(scene.rows, scene.seq_lens)
    return ops.decode(layer, q, scene.rows, scene.seq_lens, scene.scale)


def check_decode(
    ops: TritonOps, scene: Scene, q: torch.Tensor | None = None, layer: int = 0, bound: float = BOUND
) -> None:
    """Compares a step of one layer with float64; by default with queries for every request."""
    q = scene.queries(len(scene.rows)) if q is None else q
    got = decode(ops, layer, q, scene)
    assert got.dtype == torch.bfloat16
    assert_close("decode", got.double(), exact(scene, layer, q), bound)


def check_heads(ops: TritonOps, scene: Scene) -> None:
    """Each query head, with queries of its own magnitude, gets the result that it would get alone."""
    size = 2.0 ** (torch.arange(scene.heads.q, device=DEVICE) * 7 % 11 - 5.0)
    q = scene.queries(1) * size[None, :, None].to(torch.bfloat16)
    got, want = decode(ops, 0, q, scene).double(), exact(scene, 0, q)
    for h in range(scene.heads.q):
        assert_close(f"head {h}", got[:, h], want[:, h], BOUND)


@each(heads=SOME_HEADS, lengths=LENGTHS)
def test_decode_agrees_with_float64(heads, lengths):
    scene = make_scene(heads, lengths)
    ops, _ = scene.ops(max_batch=len(lengths))
    ops._partial.fill_(float("nan"))
    ops._lse.fill_(float("nan"))
    (plan,) = ops.plans
    plan.items(len(lengths)).fill_(1 << 20)
    plan.spans.fill_(1 << 20)
    check_decode(ops, scene, layer=1)


def half_ops(scene: Scene, pages: int, max_batch: int = 8) -> TritonOps:
    """Returns a backend with products in FP16 that reads ``pages`` pages per iteration."""
    launch = DecodeLaunch(stages=2, registers=168, programs_per_sm=12, half_pages=pages)
    return TritonOps(scene.pool, LayerRotations(), scene.heads.q, max_batch, launch=launch)


@each(heads=few(HALF_HEADS, 4), lengths=LENGTHS, pages=[1, 2])
def test_products_in_fp16_agree_with_float64(heads, pages, lengths):
    scene = make_scene(heads, lengths)
    ops = half_ops(scene, pages, len(lengths))
    ops._partial.fill_(float("nan"))
    ops._lse.fill_(float("nan"))
    check_decode(ops, scene, layer=1)


@each(kind=["growing", "shrinking", "huge", "tiny", "dominant", "no-queries"], pages=[1, 2])
def test_products_in_fp16_keep_what_fp16_cannot_hold(kind, pages):
    """Values and queries may lie far beyond FP16's range, and values of different pages may differ by 2^20."""
    scene = make_scene(Heads(128, 128, 1, 8), [64 * 14 + 5], sink=0, recent=64)
    parts = scene.pool.formats[0].parts
    factors = {"growing": torch.logspace(-10, 10, 13, 2), "shrinking": torch.logspace(10, -10, 13, 2)}
    factor = factors.get(kind, torch.full([13], {"huge": 2.0**12, "tiny": 2.0**-14}.get(kind, 1.0)))
    scale_pages(scene, parts.v_scale, parts.k_mean, factor)
    q = scene.queries(1) * {"dominant": 20.0, "no-queries": 0.0}.get(kind, 1.0)
    q[:, 1] *= 2.0**-20
    check_decode(half_ops(scene, pages), scene, q)


def scale_pages(scene: Scene, start: int, end: int, factor: torch.Tensor) -> None:
    """Multiplies FP16 numbers in bytes ``start`` to ``end`` of the first request's pages by a factor per page."""
    records, ids = scene.pool.records[0], scene.pool.row_pages[1, : len(factor)].long()
    halves = records[ids, :, start:end].view(torch.float16)
    records[ids, :, start:end] = (halves.float() * factor.to(halves.device)[:, None, None]).half().view(torch.uint8)


@each(kind=["rising", "falling", "both"], group=[8, 12], pages=[1, 2])
def test_products_in_fp16_follow_scores(kind, group, pages):
    """Scores of different pages may differ by far more than one scale of FP16 weights can hold.

    Large scores that nearly tie make a result as sensitive to its queries; that sensitivity is added to the bound.
    """
    scene = make_scene(Heads(128, 128, 1, group), [64 * 10 + 5], sink=0, recent=64)
    parts = scene.pool.formats[0].parts
    factor = torch.logspace(-3, 3, 9, 2)
    scale_pages(scene, parts.k_scale, parts.v_scale, factor.flip(0) if kind == "falling" else factor)
    if kind == "both":
        scale_pages(scene, parts.v_scale, parts.k_mean, torch.logspace(-8, 8, 9, 2).roll(3))
    q = scene.queries(1) * 4.0 ** (torch.arange(group, device=DEVICE) % 3)[None, :, None].to(torch.bfloat16)
    check_decode(half_ops(scene, pages), scene, q, bound=BOUND + half_a_bit(scene, 0, q))


@pytest.mark.parametrize("group", few([5, 8, 13, 9, 10, 16], 3))
def test_products_in_fp16_tell_heads_apart(group):
    scene = make_scene(Heads(128, 128, 1, group), [64 * 5 + 9], sink=0, recent=64)
    check_heads(half_ops(scene, 1), scene)


def test_products_in_fp16_are_refused_for_other_records():
    for heads in (Heads(128, 64, 1, 8), Heads(256, 128, 1, 5)):
        scene = make_scene(heads, [700])
        with pytest.raises(KVQuantError, match="half_pages=0"):
            decode(half_ops(scene, 1), 0, scene.queries(1), scene)


@pytest.mark.parametrize(
    ("sink", "recent"), [(0, 64), (128, 64), (64, 256), (4096, 64)], ids=lambda tokens: f"{tokens}tokens"
)
def test_windows_of_all_sizes(sink, recent):
    heads = HEADS[1]
    scene = make_scene(heads, [64 * 7 + 3, 64 * 6, 40], sink, recent)
    ops, reference = scene.ops()
    q = scene.queries(3)
    check_decode(ops, scene, q)
    got = reference.decode(0, q, scene.rows, scene.seq_lens, scene.scale)
    assert_close("reference", got.double(), exact(scene, 0, q), BOUND)


def test_launches_whose_programs_cost_alike_share_a_plan():
    launches = [
        DecodeLaunch(2, 160, 12),
        DecodeLaunch(3, 168, 12, half_pages=2),
        DecodeLaunch(4, 168, 12, half_pages=1),
        DecodeLaunch(4, 168, 12, half_pages=1, bf16_page_cost=4),
        DecodeLaunch(3, 255, 8),
    ]
    made = StepPlans(launches, programs=1, sms=2, max_batch=4, heads=1, head_dim=64, device=torch.device(DEVICE))
    assert [made.plans.index(plan) for plan in made.layers] == [0, 0, 1, 2, 3]
    assert [plan.launch.costs for plan in made.plans] == [
        WorkCosts(5, 2),
        WorkCosts(5, 1),
        WorkCosts(4, 1),
        WorkCosts(),
    ]


def test_a_plan_of_the_programs_that_an_sm_holds():
    """Only layers whose compiled kernel takes too much shared memory get another plan, with which they decode."""
    scene = make_scene(HEADS[1], [700, 90])
    ops, _ = scene.ops()
    plans = ops.plans
    assert not ops.fit_programs([18 << 10] * 2) and ops.plans is plans
    assert ops.fit_programs([18 << 10, 100 << 10])
    assert [plan.launch.programs_per_sm for plan in ops.layer_plans] == [12, 2]
    ops.reserve(ops.max_batch + 1)
    assert [plan.launch.programs_per_sm for plan in ops.layer_plans] == [12, 2]
    for layer in range(2):
        check_decode(ops, scene, layer=layer)


def test_items_fill_whole_waves():
    launch = DecodeLaunch(stages=2, registers=160, programs_per_sm=12)
    wave = 132 * 12 // 8
    for batch in range(1, 600):
        items = launch.items(batch, 8, sms=132)
        assert items >= batch and items % wave == 0
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        items = launch.items(batch, 8, sms=132)
        assert items // batch * batch >= 0.9 * items
    assert launch.items(64, 8, sms=132) == wave
    assert launch.items(3, 10_000, sms=132) == 3


def test_a_request_of_many_items_is_merged_in_turns():
    """A long request among short ones, with more items than the merge reads at a time, is merged correctly."""
    lengths = [64 * (300 if ON_GPU else 60), *[5] * 7]
    scene = make_scene(HEADS[1], lengths)
    launch = DecodeLaunch(stages=2, registers=160, programs_per_sm=1 if ON_GPU else 16)
    ops = TritonOps(scene.pool, LayerRotations(), scene.heads.q, len(lengths), launch=launch)
    q = scene.queries(len(lengths))
    got = decode(ops, 0, q, scene)
    (plan,) = ops.plans
    items = plan.count(len(lengths))
    assert int(plan.spans[0, 1]) > 2 * triton.next_power_of_2(-(-items // len(lengths)))
    assert_close("decode", got.double(), exact(scene, 0, q), BOUND)


def test_strided_queries_and_int32_indices():
    scene = make_scene(HEADS[1], [700, 90])
    ops, _ = scene.ops()
    q = scene.queries(4)[::2]
    rows, lens = scene.rows.int(), scene.seq_lens.int()
    ops.plan_attention(rows, lens)
    got = ops.decode(0, q, rows, lens, scene.scale)
    assert_close("decode", got.double(), exact(scene, 0, q), BOUND)


@pytest.mark.parametrize("length", [1, 64 * 14 + 5])
def test_one_dominant_token(length):
    """One late score far above the others makes the running maximum rescale everything before it."""
    scene = make_scene(HEADS[1], [length])
    ops, _ = scene.ops(max_batch=1)
    q = scene.queries(1) * 20
    check_decode(ops, scene, q)


@pytest.mark.parametrize("kind", ["uniform", "lloyd-max"])
def test_groups_of_different_size(kind):
    """Each group keeps its precision next to a group with values a thousand times larger."""
    heads = Heads(128, 32, 1, 4)
    code = CodeFormat() if kind == "uniform" else CodeFormat(2, "lloyd-max", "moments")
    scene = make_scene(heads, [64 * 7 + 9], formats=[PageFormat(128, 32, k=code, v=code)])
    ops, _ = scene.ops()
    pool, small = scene.pool, slice(32, 64)
    for where in (pool.formats[0].parts.v_scale, pool.formats[0].parts.v_offset):
        pool.records[0][..., where + 128 : where + 256].view(torch.float16).mul_(2**-10)
    pool.bf16_pages[:, :, 1, :, :, small] *= 2**-10
    q = scene.queries(1)
    got, want = decode(ops, 0, q, scene).double(), exact(scene, 0, q)
    assert want[..., small].norm() < 2**-8 * want.norm()
    assert_close("small group", got[..., small], want[..., small], BOUND)
    assert_close("decode", got, want, BOUND)


def test_a_batch_may_be_padded_beyond_what_was_planned_for():
    """A batch may be larger than planned: data-parallel attention pads to a multiple of its TP size.

    The old buffers are kept, because a CUDA graph may still use them.
    """
    lengths = [700, 90, 300]
    scene = make_scene(HEADS[1], lengths)
    ops, _ = scene.ops(max_batch=2)
    held = ops.plans, ops._partial
    rows, lens = torch.cat([scene.rows, scene.rows[:5] * 0]), torch.cat([scene.seq_lens, scene.seq_lens[:5] * 0 + 1])
    rows, lens = torch.cat([rows, rows[-2:]]), torch.cat([lens, lens[-2:]])
    q = scene.queries(len(rows))
    ops.plan_attention(rows, lens)
    got = ops.decode(0, q, rows, lens, scene.scale)
    assert_close("decode", got[:3].double(), exact(scene, 0, q[:3]), BOUND)
    assert ops.max_batch == len(rows) and ops._outgrown[0][:2] == held
    ops.reserve(1)
    assert ops.max_batch == len(rows) and len(ops._outgrown) == 1
