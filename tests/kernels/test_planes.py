"""Kernels over records of planes (transform coding) agree with float64 and the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat, Widths
from sglang_kvq.kernels.decode import history_planes_fp16 as decode_half_planes
from sglang_kvq.kernels.decode import key_planes_int8
from sglang_kvq.kernels.decode.decode_attention import DecodeLaunch
from sglang_kvq.kernels.device.codes import PlaneCodes
from tests.kernels.scene import DEVICE, ON_GPU, Heads, Scene, int64, make_scene
from tests.kernels.test_decode import BOUND, check_decode, check_heads, decode, half_a_bit
from tests.kernels.test_unpack import execute, words
from tests.pairs import each, few, label

HEADS = [Heads(64, 64, 3, 3), Heads(128, 128, 2, 4), Heads(96, 96, 1, 6), Heads(256, 128, 1, 5)]
#: Widths of keys and values: every kind of cell, fields that stay or are shifted, planes without bits.
WIDTHS: list[tuple[Widths, Widths]] = [
    ((6, 4, 2, 0), (3, 2, 2, 1)),
    ((4, 4, 0, 0), (2, 1, 1, 0)),
    ((5, 2, 1, 0), (4, 4, 2, 2)),
    ((3, 1, 0, 0), (1, 1, 1, 1)),
    ((5, 3, 0, 0), (4, 2, 0, 0)),
    ((6, 5, 3, 2), (5, 4, 4, 3)),
    ((2, 2, 2, 2), (4, 0, 0, 0)),
    ((3, 2, 1, 0), (4, 3, 2, 1)),
    ((6, 4, 2, 2), (2, 0, 0, 0)),
]


def plane_scene(heads: Heads, widths: tuple[Widths, Widths], lengths: list[int], **windows: int) -> Scene:
    format = PlaneFormat(heads.head_dim, PlaneCode(widths[0]), PlaneCode(widths[1]))
    return make_scene(heads, lengths, formats=[format] * 2, **windows)


@each(widths=few(WIDTHS, 6), heads=HEADS)
def test_decode_agrees_with_float64(heads, widths):
    scene = plane_scene(heads, widths, [1, 64 * 9 + 5, 330, 0])
    check_decode(scene.ops()[0], scene, layer=1)


#: Geometries for products in FP16; some have padded columns or dims.
HALF_HEADS = [Heads(64, 64, 2, 8), Heads(64, 64, 1, 3), Heads(128, 128, 1, 12), Heads(96, 96, 1, 6)]


def half_ops(scene: Scene, pages: int = 2, shared_weights: bool = True, programs: int = 8) -> TritonOps:
    """Returns a backend with products in FP16; with one program per SM, each program reads many pages."""
    launch = DecodeLaunch(2, registers=255, programs_per_sm=programs, half_pages=pages, shared_weights=shared_weights)
    return TritonOps(scene.pool, LayerRotations(), scene.heads.q, 4, launch=launch)


@each(widths=few(WIDTHS, 6), heads=HALF_HEADS)
def test_products_in_fp16_agree_with_float64(heads, widths):
    scene = plane_scene(heads, widths, [1, 64 * 9 + 5, 330, 0])
    check_decode(half_ops(scene), scene, layer=1)


@pytest.mark.parametrize("kind", ["growing", "shrinking", "dominant", "no-queries"])
def test_products_in_fp16_keep_what_fp16_cannot_hold(kind):
    """V's gains range from 2^-10 to 2^10 from page to page, and queries differ widely in size."""
    scene = plane_scene(Heads(64, 64, 1, 8), WIDTHS[0], [64 * 14 + 5])
    first = scene.pool.formats[0].parts.v_gains
    pages = scene.pool.row_pages[1, :14].long()
    if kind in ("growing", "shrinking"):
        exponents = torch.arange(14, device=pages.device) - 7
        gains = 128 + 8 * (exponents if kind == "growing" else -exponents)
        scene.pool.records[0][pages, :, first : first + PAGE_SIZE] = gains.to(torch.uint8)[:, None, None]
    q = scene.queries(1) * {"dominant": 20.0, "no-queries": 0.0}.get(kind, 1.0)
    q[:, 1] *= 2.0**-20
    check_decode(half_ops(scene, programs=1), scene, q)


def scale_pages(scene: Scene, first: int, exponents: torch.Tensor) -> None:
    """Multiplies gains from byte ``first`` on, in the first request's pages of layer 0, by powers of two."""
    records, ids = scene.pool.records[0], scene.pool.row_pages[1, : len(exponents)].long()
    records[ids, :, first : first + PAGE_SIZE] += (8 * exponents).to(records)[:, None, None]


@each(
    kind=["rising", "falling", "both"],
    heads=[Heads(64, 64, 1, 3), Heads(128, 128, 1, 8), Heads(128, 128, 1, 12)],
    shared_weights=[False, True],
)
def test_products_in_fp16_follow_scores(kind, heads, shared_weights):
    """Scores, or also V's gains, may differ between pages by far more than one scale of FP16 weights can hold.

    Large scores that nearly tie make a result as sensitive to its queries; that sensitivity is added to the bound.
    """
    scene = plane_scene(heads, ((6, 4, 2, 2), (5, 4, 4, 3)), [64 * 14 + 5], sink=0, recent=64)
    parts, exponents = scene.pool.formats[0].parts, torch.arange(13) // 2 - 3
    scale_pages(scene, parts.k_gains, exponents.flip(0) if kind == "falling" else exponents)
    if kind == "both":
        scale_pages(scene, parts.v_gains, torch.arange(13) % 4 // 2 * 12 - 6)
    q = scene.queries(1) * 2.0 ** (torch.arange(heads.gqa_group, device=DEVICE) % 3 - 2.0)[None, :, None].to(
        torch.bfloat16
    )
    check_decode(
        half_ops(scene, shared_weights=shared_weights, programs=1), scene, q, bound=BOUND + half_a_bit(scene, 0, q)
    )


@pytest.mark.parametrize("group", few([5, 13, 8, 16], 2))
def test_products_in_fp16_tell_heads_apart(group):
    scene = plane_scene(Heads(128, 128, 1, group), ((6, 5, 3, 2), (3, 2, 1, 0)), [64 * 5 + 9], sink=0, recent=64)
    check_heads(half_ops(scene), scene)


@pytest.mark.parametrize("shared_weights", [False, True])
def test_half_a_tile_of_another_request_counts_for_nothing(shared_weights):
    """The last tile's second page is beyond the history and has the largest gains, but does not change the result."""
    scene = plane_scene(Heads(64, 64, 1, 8), WIDTHS[0], [64 * 6 + 5])
    first = scene.pool.formats[0].parts.v_gains
    mine = scene.pool.row_pages[1, :7].long().tolist()
    others = [page for page in range(1, scene.pool.pages + 1) if page not in mine]
    scene.pool.records[0][others, :, first : first + PAGE_SIZE] = 255
    scene.pool.records[0][mine[5:], :, first : first + PAGE_SIZE] = 255
    scene.pool.row_history_end[1] = 64 * 5
    scene.pool.row_sink_end[1] = 0
    check_decode(half_ops(scene, shared_weights=shared_weights), scene)


def test_one_page_a_turn_is_refused():
    scene = plane_scene(HEADS[0], WIDTHS[0], [700])
    with pytest.raises(KVQuantError, match="half_pages=2"):
        decode(half_ops(scene, pages=1), 0, scene.queries(1), scene)
    scene = plane_scene(HEADS[3], WIDTHS[0], [700])
    with pytest.raises(KVQuantError, match="half_pages=0"):
        decode(half_ops(scene), 0, scene.queries(1), scene)


@pytest.mark.parametrize("widths", sorted({x for pair in WIDTHS for x in pair}), ids=label)
def test_the_assembly_cuts_out_codes(widths):
    """For any two words: each field's code at its position in the byte; a byte's last field is not masked."""
    cells = PlaneCode(widths).cells
    packed, codes = words(2000, 1), PlaneCodes(widths, cells, (0,) * len(cells), 0)
    for c, cell in enumerate(codes.cells):
        for f, field in enumerate(cell.fields):
            whole = cell.bits == 8 and 0 < f == len(cell.fields) - 1
            for share in range(cell.shares):
                cut = 255 if whole else ((1 << field.width) - 1) << (field.shift + share * cell.bits)
                want = [(packed >> np.uint64(8 * n)).astype(np.int64) & cut for n in range(4)]
                lower, upper = execute(decode_half_planes.words_ptx.fn(codes, c, f, share), 2, [packed])
                assert np.array_equal(lower.view(np.int16), np.stack(want[::2], 1))
                assert np.array_equal(upper.view(np.int16), np.stack(want[1::2], 1))


@pytest.mark.parametrize("widths", sorted({x for pair in WIDTHS for x in pair}), ids=label)
def test_the_assembly_cuts_out_signed_codes(widths):
    """For any four bytes: each field's code at its position, minus 128 if it includes the highest bit."""
    cells = PlaneCode(widths).cells
    packed, codes = words(2000, 1), PlaneCodes(widths, cells, (0,) * len(cells), 0)
    for c, cell in enumerate(codes.cells):
        for f, field in enumerate(cell.fields):
            for share in range(cell.shares):
                cut = ((1 << field.width) - 1) << (field.shift + share * cell.bits)
                want = [(packed >> np.uint64(8 * n)).astype(np.int64) & cut for n in range(4)]
                (got,) = execute(key_planes_int8.bytes_ptx.fn(codes, c, f, share), 1, [packed])
                assert np.array_equal(got.view(np.int8), np.stack(want, 1) - (cut & 128))


@pytest.mark.parametrize("half", [False, True])
def test_no_queries_see_their_own_tokens_alike(half):
    """Tokens beyond the history have no weight, even if all scores are equal."""
    scene = plane_scene(HEADS[1], WIDTHS[0], [64 * 6 + 5])
    scene.pool.row_history_end[1] = 64 * 5
    scene.pool.row_sink_end[1] = 0
    ops, q = half_ops(scene) if half else scene.ops()[0], scene.queries(1) * 0.0
    check_decode(ops, scene, q)


def test_one_dominant_token():
    scene = plane_scene(HEADS[1], WIDTHS[0], [64 * 14 + 5])
    ops, _ = scene.ops()
    q = scene.queries(1) * 20
    check_decode(ops, scene, q)


def pages(heads: Heads, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens of whole pages: energies fall from plane to plane, with heavy tails and extreme rows.

    Some rows have an infinity or NaN in the first plane, which always has codes, or in the last one.
    """
    torch.manual_seed(1)
    shape = (count * PAGE_SIZE, heads.kv, heads.head_dim)
    spread = torch.logspace(1, -1, heads.head_dim, device=DEVICE)
    k, v = (torch.randn(shape, device=DEVICE) * spread * torch.randn(*shape[:2], 1, device=DEVICE).exp() for _ in "kv")
    k[3], v[5], k[7], v[9] = 0, 0, k[7] * 1e9, v[9] * 1e-9
    k[16:48] *= 2.0 ** torch.arange(32, device=DEVICE)[:, None, None]
    v[16:48] *= 2.0 ** torch.arange(32, device=DEVICE)[:, None, None]
    k, v = k.bfloat16(), v.bfloat16()
    odd = torch.tensor([0x7F80, -0x80, 0x7FC0, -0x40, 0x7F81, 0x7FFF, -1], dtype=torch.int16, device=DEVICE)
    for x in (k, v):
        x[50:57, :, 3] = odd.view(torch.bfloat16)[:, None]
        x[57:64, :, -2] = odd.view(torch.bfloat16)[:, None]
    return k, v


#: Geometries for records. The interpreter takes seconds per head of a page, so only one geometry has several heads.
RECORD_HEADS = HEADS if ON_GPU else [Heads(64, 64, 1, 3), *HEADS[1:]]


@each(widths=few(WIDTHS, 6), heads=RECORD_HEADS)
def test_records_are_the_references(heads, widths):
    scene = plane_scene(heads, widths, [64 * 2])
    ops, _ = scene.ops()
    k, v = pages(heads, 2)
    ids, first = int64(3, 1), int64(0, 64)
    want = scene.pool.formats[0].quantize_pages(*(x.unflatten(0, (2, PAGE_SIZE)).transpose(1, 2) for x in (k, v)))
    ops.quantize_tokens(1, first, ids, k, v)
    assert torch.equal(scene.pool.records[1][ids], want)
    slots = int64(2, 1)
    for i, slot in enumerate(slots.tolist()):
        for kind, x in enumerate((k, v)):
            scene.pool.bf16_pages[:, slot, kind] = x[i * PAGE_SIZE :][:PAGE_SIZE].transpose(0, 1)
    scene.pool.records[0].zero_()
    scene.pool.records[1].zero_()
    ops.quantize_slots(slots, ids, int64(2))
    for layer in range(2):
        assert torch.equal(scene.pool.records[layer][ids], want)
