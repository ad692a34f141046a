"""Scores of past keys, from pages and from a batch's new tokens, agree with the reference on the same keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_kvq.attention.scores.key_scores import key_scores
from sglang_kvq.attention.scores.scoring import KeyScores, plan_scoring
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.kernels.extend.key_scores import (
    NARROW,
    ScoreLaunch,
    merged,
    past_lse,
    raise_scores,
    score_launch,
    splits_of,
)
from tests import device_waits
from tests.kernels.scene import DEVICE, HEADS, LAYERS, ON_GPU, Heads, Scene, activations, make_batch, make_scene, randn
from tests.kernels.test_formats import make_format
from tests.pairs import few

#: Tolerances against the reference in float32 on BF16 keys: the order of sums differs.
CLOSE = {"rtol": 2e-4 if ON_GPU else 2e-5, "atol": 1e-12}


def check(scene: Scene, lens: list[tuple[int, int]], past: dict[int, int], layers=(0,), slab_tokens=None) -> None:
    """Compares kernels with the reference, for accumulators with any strides and scores of earlier chunks."""
    scene.rows = torch.arange(1, len(lens) + 1, device=scene.rows.device)
    ops = TritonOps(scene.pool, scene.ops()[0].rotations, scene.heads.q, 1, slab_tokens)
    _, reference = scene.ops()
    batch = make_batch(scene.rows, lens)
    q, k, _ = activations(scene.heads, sum(batch.new_lens))
    prefix, new = zip(*lens)
    kv = scene.heads.kv
    got, want = ({n: KeyScores(LAYERS, kv, tokens, DEVICE) for n, tokens in past.items()} for _ in range(2))
    for n, tokens in past.items():
        wide = torch.zeros(LAYERS, kv, tokens + 7, device=DEVICE)
        wide[:, :, tokens:] = float("nan")
        got[n].values = wide[:, :, :tokens]
        for scores in (got[n], want[n]):
            scores.values[:, :, :: max(tokens // 3, 1)] = 0.03
    for part, expected in zip(plan_scoring(prefix, new, got), plan_scoring(prefix, new, want), strict=True):
        for layer in layers:
            ops.score_keys(layer, q, k, batch, part, scene.scale)
            reference.score_keys(layer, q, k, batch, expected, scene.scale)
    for n, tokens in past.items():
        torch.testing.assert_close(got[n].values, want[n].values, **CLOSE)
        assert got[n].values._base[:, :, tokens:].isnan().all(), "wrote behind its tokens"
        for layer in range(LAYERS):
            raised = want[n].values[layer] > 0.03
            assert bool(raised.any()) == (layer in layers), "nothing was scored"


@pytest.mark.parametrize(
    "heads",
    few(
        [Heads(64, 64, 1, 7), Heads(128, 128, 2, 4), Heads(96, 32, 1, 6), Heads(64, 64, 2, 1), Heads(128, 64, 1, 16)], 3
    ),
    ids=str,
)
def test_agrees_with_the_reference(heads):
    """One chunk holds the end of the block and its prompt; the prefix has sinks, records and a BF16 window."""
    prefix = 64 * 5 + 17
    check(make_scene(heads, [prefix]), [(prefix, 90)], {0: prefix + 41})


def test_heads_of_256():
    check(make_scene(HEADS[7], [64 * 3 + 1]), [(64 * 3 + 1, 20)], {0: 200})


@pytest.mark.parametrize(
    "lens,past",
    [
        ([(0, 70)], {0: 69}),
        ([(64 * 4 + 5, 33)], {0: 64 * 2 + 3}),
        ([(64 * 4, 7)], {0: 64 * 4}),
        ([(128, 10), (64 * 5, 40), (0, 9), (64 * 3 + 63, 5)], {1: 64 * 5 + 1, 3: 64}),
    ],
    ids=["nothing stored", "the prompt goes on", "the prompt begins", "some of a batch"],
)
def test_chunks_of_any_kind(lens, past):
    check(make_scene(HEADS[1], [prefix for prefix, _ in lens]), lens, past, layers=range(LAYERS))


@pytest.mark.parametrize("slab_tokens", [64, 192])
def test_a_past_that_does_not_fit_the_workspace(slab_tokens):
    check(make_scene(HEADS[1], [64 * 7 + 9]), [(64 * 7 + 9, 30)], {0: 64 * 7 + 20}, slab_tokens=slab_tokens)


PLANES = [PlaneFormat(d, PlaneCode((6, 4, 2, 0)), PlaneCode((3, 2, 2, 1))) for d in (64, 128)]
SOME = ("uniform-3-3", "sphere-4-3", "channel-2", "centred-4", "oscar-lloyd-max", "lloyd-max-4-3-g32")
FORMATS = {"planes": PLANES[1], **{kind: make_format(kind, 128) for kind in SOME}, "planes-64": PLANES[0]}


@pytest.mark.parametrize("format", few(FORMATS.values(), 5), ids=few(FORMATS, 5))
def test_records_of_every_kind(format):
    heads = Heads(format.head_dim, format.head_dim, 1, 2)
    check(make_scene(heads, [64 * 5], formats=[format] * LAYERS), [(64 * 5, 9)], {0: 64 * 5 + 2})


def both_passes(q, k, scale, splits, launch) -> torch.Tensor:
    lse = torch.full((splits, *q.shape[:2]), float("nan"), device=DEVICE)
    past_lse(lse, q, k, scale, launch=launch)
    values = torch.zeros(k.shape[1], len(k), device=DEVICE)
    raise_scores(values, q, k, merged(lse), scale, launch=launch)
    return values


@pytest.mark.parametrize("splits", few([1, 5, 2, 9], 2))
@pytest.mark.parametrize("past", [1, 64, 130, 257])
def test_ranges_of_keys(splits, past):
    """Some ranges have no keys at all."""
    launch = ScoreLaunch(32, 32, 4, 2)
    q, k = randn(13, 6, 64) * 2, randn(past, 2, 64)
    torch.testing.assert_close(both_passes(q, k, 0.125, splits, launch), key_scores(q, k, 0.125), **CLOSE)


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3])
def test_queries_of_any_size(size):
    """Exponents of thousands lose digits before they become probabilities, in the kernels and in the reference."""
    q, k = (randn(40, 4, 128) * size).bfloat16(), randn(300, 1, 128)
    want = key_scores(q.double().float(), k, 0.09)
    close = {"rtol": max(1e-6 * 2000 * size, 1e-4), "atol": 1e-6} if size > 1 else CLOSE
    torch.testing.assert_close(both_passes(q, k, 0.09, 3, NARROW), want, **close)


def test_the_first_pass_fills_the_gpu():
    launch = score_launch(128)
    assert splits_of(1024, 32, 8, 6144, 132, launch) == 1
    assert splits_of(136, 32, 8, 6144, 132, launch) == 6
    assert splits_of(1, 8, 1, 6144, 132, launch) == 12 and splits_of(1, 8, 8, 100, 132, launch) == 1
    assert score_launch(256) != launch


@pytest.mark.gpu
def test_scoring_never_waits_for_the_device():
    heads = HEADS[1]
    scene = make_scene(heads, [5000, 64])
    ops = scene.ops()[0]
    batch = make_batch(scene.rows, [(5000, 900), (64, 10)])
    q, k, _ = activations(scene.heads, sum(batch.new_lens))
    (part,) = plan_scoring([5000, 64], [900, 10], {0: KeyScores(LAYERS, heads.kv, 5100, DEVICE)})
    ops.score_keys(0, q, k, batch, part, scene.scale)
    batch = replace(batch)  # a new object, so that it is planned again
    with device_waits.refused():
        ops.score_keys(0, q, k, batch, part, scene.scale)
