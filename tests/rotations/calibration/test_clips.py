"""Clip ratios are chosen by measured error, layer by layer."""

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.calibration.clips import ClipErrors, choose_clips, clip_errors, query_blocks
from sglang_kvq.rotations.calibration.settings import CalibrationSettings
from sglang_kvq.rotations.maths.fake_quant import RotatedContext
from tests.rotations.helpers import random_rotations

GRID = (0.80, 0.88, 0.96, 1.0)


def test_gaussian_rows_want_clipping_and_outliers_that_carry_the_row_none():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 640, 64, generator=generator)
    gaussian = torch.randn(2, 640, 64, generator=generator)
    outliers = 0.1 * gaussian
    outliers[..., :2] = 3 * torch.randn(2, 640, 2, generator=generator).sign()
    errors = []
    for x in (gaussian, outliers):
        context = RotatedContext.of(LayerRotations(), 0, q, x, x, 0.125, sink=64, recent=256)
        error, size = clip_errors(context, grid=GRID, starts=[576])
        errors.append(error / size)
    errors += errors[:1] * 4  # make most layers equal to the first
    best = choose_clips(torch.stack(errors), per_layer=True)
    assert [GRID[i] for i in best[0].tolist()] == [0.88, 0.88] and [GRID[i] for i in best[1].tolist()] == [1.0, 1.0]
    common = choose_clips(torch.stack(errors), per_layer=False)
    assert (common == common[0]).all()


def test_a_layer_departs_from_the_others_only_for_a_clear_gain():
    others, slight, clear = [4.0, 1.0, 2.0, 3.0], [4.0, 1.0, 0.98, 3.0], [4.0, 3.0, 0.2, 3.0]
    errors = torch.tensor([others] * 8 + [slight, clear], dtype=torch.float64)[:, None].expand(-1, 2, -1)
    assert choose_clips(errors, per_layer=True)[:, 0].tolist() == [1] * 9 + [2]
    assert choose_clips(1000 * errors, per_layer=True)[:, 0].tolist() == [1] * 9 + [2]


def test_a_layer_without_output_or_with_nan_does_not_choose_the_ratios_of_others():
    settings = CalibrationSettings(tokens=640, context=640, clip_grid=GRID)
    found = {}
    for case, values in (("plain", None), ("a layer without output", 0.0), ("a layer with NaN", float("nan"))):
        generator = torch.Generator().manual_seed(0)
        errors = ClipErrors(random_rotations(layers=2, heads=2), settings)
        for layer in range(2):
            q, k, v = (torch.randn(2, 640, 64, generator=generator) for _ in range(3))
            errors.add(layer, q, k, v if layer == 0 or values is None else v * values, 0.125)
        found[case] = errors
    plain, zero = (found[case].chosen(1).meta for case in ("plain", "a layer without output"))
    assert (zero.clip_k[0], zero.clip_v[0]) == (plain.clip_k[0], plain.clip_v[0]) and zero.errors["v"][1] == 0
    with pytest.raises(KVQuantError, match="layer 1: the error of its attention output is not finite.*--dtype float32"):
        found["a layer with NaN"].chosen(1)


def test_queries_are_past_the_window_and_within_the_context():
    for context in (448, 512, 1000, 4096):
        for count in (1, 2, 5):
            starts = query_blocks(context, 64, 256, count)
            assert starts and all(s % PAGE_SIZE == 0 and 320 < s <= context - PAGE_SIZE for s in starts)
