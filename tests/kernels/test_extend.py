"""Prefill over a stored prefix, dequantized first, against the reference."""

import pytest
import torch

from sglang_kvq.attention.base import ExtendBatch
from sglang_kvq.attention.triton_ops import TritonOps
from tests.kernels.scene import HEADS, LAYERS, ON_GPU, assert_close, int64, make_scene, randn

BOUND = 1e-2  # two BF16 softmaxes

# Prefix and new tokens of each request.
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


def make_batch(rows: torch.Tensor, lens: list[tuple[int, int]]) -> ExtendBatch:
    prefix, new = ([int(x) for x in column] for column in zip(*lens))
    return ExtendBatch(rows, prefix, new, int64(*range(sum(new))), int64(), int64())


def run(heads, lens, slab_tokens):
    scene = make_scene(heads, [prefix for prefix, _ in lens])
    scene.rows = torch.arange(1, len(lens) + 1, device=scene.rows.device)  # a prefix of 0 is no padding here
    ops = TritonOps(scene.pool, scene.ops()[0].rotations, heads.q, 1, slab_tokens, short=None)
    _, reference = scene.ops()
    batch = make_batch(scene.rows, lens)
    tokens = sum(batch.new_lens)
    sizes = [heads.q, heads.kv, heads.kv]
    q, k, v = randn(tokens, sum(sizes), heads.head_dim).split(sizes, dim=1)
    for layer in range(LAYERS):
        got = ops.extend(layer, q, k, v, batch, scene.scale)
        assert_close(f"extend, layer {layer}", got, reference.extend(layer, q, k, v, batch, scene.scale), BOUND)


@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1]], ids=str)
def test_extend_agrees_with_the_reference(heads, lens):
    run(heads, lens, 32768)


@pytest.mark.parametrize("heads", HEADS[2:], ids=str)
def test_extend_of_all_geometries(heads):
    run(heads, BATCHES["mid-page"][:2], 32768)


@pytest.mark.parametrize("slab_tokens", [64, 192])
def test_prefixes_in_several_slabs(slab_tokens):
    run(HEADS[1], BATCHES["mid-page"], slab_tokens)
