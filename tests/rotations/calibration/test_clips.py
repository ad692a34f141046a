"""Clip ratios are chosen by measured error, layer by layer."""

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.rotations.calibration.clips import choose_clips, clip_errors, query_blocks
from sglang_kvq.rotations.maths.fake_quant import RotatedContext

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


def test_queries_are_past_the_window_and_within_the_context():
    for context in (448, 512, 1000, 4096):
        for count in (1, 2, 5):
            starts = query_blocks(context, 64, 256, count)
            assert starts and all(s % PAGE_SIZE == 0 and 320 < s <= context - PAGE_SIZE for s in starts)
