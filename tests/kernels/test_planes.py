"""Kernels over records of planes (transform coding) against float64 and the reference, as for other formats."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat, Widths
from tests.kernels.scene import DEVICE, Heads, Scene, assert_close, int64, make_scene
from tests.kernels.test_decode import BOUND, decode, exact

HEADS = [Heads(64, 64, 3, 3), Heads(128, 128, 2, 4), Heads(96, 96, 1, 6), Heads(256, 128, 1, 5)]
#: Keys' and values' widths: every kind of cell, fields that stay and that are shifted, planes without bits.
WIDTHS: list[tuple[Widths, Widths]] = [
    ((6, 4, 2, 0), (3, 2, 2, 1)),
    ((4, 4, 0, 0), (2, 1, 1, 0)),
    ((5, 2, 1, 0), (4, 4, 2, 2)),
    ((3, 1, 0, 0), (1, 1, 1, 1)),
    ((6, 5, 3, 2), (5, 4, 4, 3)),
    ((2, 2, 2, 2), (4, 0, 0, 0)),
    ((3, 2, 1, 0), (4, 3, 2, 1)),
    ((6, 4, 2, 2), (2, 0, 0, 0)),
]


def plane_scene(heads: Heads, widths: tuple[Widths, Widths], lengths: list[int]) -> Scene:
    format = PlaneFormat(heads.head_dim, PlaneCode(widths[0]), PlaneCode(widths[1]))
    return make_scene(heads, lengths, formats=[format] * 2)


@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: "-".join("".join(map(str, x)) for x in w))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_agrees_with_float64(heads, widths):
    scene = plane_scene(heads, widths, [1, 64 * 9 + 5, 330, 0])
    ops, _ = scene.ops()
    q = scene.queries(4)
    got = decode(ops, 1, q, scene)
    assert_close("decode", got.double(), exact(scene, 1, q), BOUND)


def test_one_dominant_token():
    scene = plane_scene(HEADS[1], WIDTHS[0], [64 * 14 + 5])
    ops, _ = scene.ops()
    q = scene.queries(1) * 20
    assert_close("decode", decode(ops, 0, q, scene).double(), exact(scene, 0, q), BOUND)


def pages(heads: Heads, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of whole pages, energies falling from plane to plane, heavy tails, and rows that are all zero or huge."""
    torch.manual_seed(1)
    shape = (count * PAGE_SIZE, heads.kv, heads.head_dim)
    spread = torch.logspace(1, -1, heads.head_dim, device=DEVICE)
    k, v = (torch.randn(shape, device=DEVICE) * spread * torch.randn(*shape[:2], 1, device=DEVICE).exp() for _ in "kv")
    k[3], v[5], k[7], v[9] = 0, 0, k[7] * 1e9, v[9] * 1e-9
    return k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: "-".join("".join(map(str, x)) for x in w))
@pytest.mark.parametrize("heads", HEADS, ids=str)
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
            scene.pool.overlays[:, slot, kind] = x[i * PAGE_SIZE :][:PAGE_SIZE].transpose(0, 1)
    scene.pool.records[0].zero_()
    scene.pool.records[1].zero_()
    ops.quantize_slots(slots, ids, int64(2))
    for layer in range(2):
        assert torch.equal(scene.pool.records[layer][ids], want)
