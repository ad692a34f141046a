"""Prefill over a stored prefix that is dequantized first agrees with float64."""

import pytest

from tests.kernels.scene import HEADS, ON_GPU, SOME_HEADS, check_extend, prefix_scene
from tests.pairs import each

BOUND = 1e-2  # two BF16 softmaxes

# Lengths of the prefix and of the new tokens, for each request.
BATCHES = {
    "fresh": [(0, 1), (0, 70)],
    "whole-pages": [(64 * 6, 64), (128, 40)],
    "mid-page": [(64 * 5 + 17, 90), (3, 5), (0, 33), (64 * 4 - 1, 2)],
}
if ON_GPU:
    BATCHES |= {
        "chunk": [(8192 + 64 * 3, 8192)],
        "many": [(61 * i, 1 + 97 * i % 800) for i in range(40)],
        "short-over-long": [(100_000, 17)],
    }


def run(heads, lens, slab_tokens):
    check_extend(prefix_scene(heads, lens), lens, BOUND, slab_tokens=slab_tokens, short=None)


@each(lens=BATCHES, heads=HEADS[:2])
def test_extend_agrees_with_float64(heads, lens):
    run(heads, lens, 32768)


@pytest.mark.parametrize("heads", [heads for heads in SOME_HEADS if heads not in HEADS[:2]], ids=str)
def test_extend_of_all_geometries(heads):
    run(heads, BATCHES["mid-page"][:2], 32768)


@pytest.mark.parametrize("slab_tokens", [64, 192])
def test_prefixes_in_several_slabs(slab_tokens):
    run(HEADS[1], BATCHES["mid-page"], slab_tokens)
