"""Kernels over records of planes (transform coding) against float64 and the reference, as for other formats."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.formats.planes import PlaneCode, PlaneFormat, Widths
from tests.kernels.scene import Heads, Scene, assert_close, make_scene
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
