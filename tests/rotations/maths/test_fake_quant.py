"""Attention with rotated, fake-quantized keys and values agrees with its definition, query by query."""

from dataclasses import replace

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.rotations.maths.fake_quant import RotatedContext, causal_attention, page_round_trip, round_trip
from tests.rotations.helpers import random_rotations, random_transform

SINK, RECENT, SCALE = 64, 128, 0.125


def activations(tokens=448, heads=2, group=2, dim=64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(h, tokens, dim, generator=generator).bfloat16() for h in (heads * group, heads, heads)]


def rotated(rotations, **options):
    return RotatedContext.of(rotations, 1, *activations(), SCALE, sink=SINK, recent=RECENT, **options)


def test_history_is_what_lies_between_sink_and_window():
    """A query of page p reads fake-quantized tokens from ``SINK`` to the start of page p minus ``RECENT``."""
    context = rotated(LayerRotations())
    old_k, old_v = (round_trip(x, 2, 0.9) for x in (context.k, context.v))
    found = context.output(old_k, old_v)
    for token in (0, 63, 255, 256, 300, 447):
        end = max(token // PAGE_SIZE * PAGE_SIZE - RECENT, SINK)
        k, v = (
            torch.cat([x[:, :SINK], old[:, SINK:end], x[:, end:]], 1)[:, : token + 1]
            for x, old in ((context.k, old_k), (context.v, old_v))
        )
        for head in range(4):
            weights = (context.q[head, token] @ k[head // 2].T * SCALE).softmax(-1)
            torch.testing.assert_close(found[head, token], weights @ v[head // 2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [448, 447, 40])
@pytest.mark.parametrize("sink, recent", [(0, 64), (64, 128), (128, 320), (64, 1024), (512, 0)])
def test_several_pages_at_once_are_those_pages(tokens, sink, recent):
    q, k, v = (x.float() for x in activations(tokens=tokens))
    context = RotatedContext(q, k, v, SCALE, sink, recent)
    old_k, old_v = k + 1.0, 2 * v
    for given in ((old_k, old_v), (None, old_v), (old_k, None)):
        want = context.output(*given)
        for pages in (2, 3, 8):
            torch.testing.assert_close(context.output(*given, pages=pages), want, rtol=1e-4, atol=1e-5)
    assert (recent + sink >= tokens) == torch.equal(context.output(old_k, old_v), context.output())


@pytest.mark.parametrize("heads", [1, 2], ids=["shared", "per head"])
@pytest.mark.parametrize("balanced", [False, True], ids=["orthogonal", "balanced"])
def test_rotations_change_nothing_but_rounding(heads, balanced):
    q, k, v = activations()
    context = rotated(random_rotations(heads=heads, balanced=balanced).whole())
    plain = causal_attention(q.float(), k.float(), v.float(), SCALE)
    torch.testing.assert_close(context.to_model_basis(context.exact()), plain, rtol=0.02, atol=0.02)
    torch.testing.assert_close(context.output(), context.exact(), rtol=1e-4, atol=1e-5)


def test_heads_share_rotations_as_if_each_had_its_own():
    rotations = random_rotations(heads=1)
    one, other = rotated(rotations.whole()), rotated(rotations.for_worker(range(2), 2, 0, 2))
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.to_model_basis(one.q), other.to_model_basis(other.q))


def test_what_is_stored_is_bf16_and_queries_on_demand():
    rotations = random_rotations().whole()
    exact, rounded = rotated(rotations), rotated(rotations, round_queries=True)
    assert all(torch.equal(x, x.bfloat16().float()) for x in (exact.k, exact.v, rounded.q))
    assert not torch.equal(exact.q, rounded.q) and torch.equal(exact.q.bfloat16().float(), rounded.q)


def test_transform_coding_reads_what_plain_attention_does():
    """With exact keys and values, removing the keys' mean and applying matrices that cancel changes no output."""
    rotations = random_transform().whole()
    q, k, v = activations()
    want = causal_attention(*(x.float() for x in (q, k, v)), SCALE)
    context = rotated(rotations)
    got = context.to_model_basis(context.exact())
    assert (got - want).norm() < 0.02 * want.norm()
    no_mean = rotated(replace(rotations, k_mean=None))
    assert float((no_mean.k - context.k).norm()) > 0.1 * float(context.k.norm()), "the mean is taken off"


def test_planes_go_through_records_too():
    _, k, v = (x.float() for x in activations(tokens=2 * PAGE_SIZE + 7))
    format = PlaneFormat(64, PlaneCode((6, 6, 2, 2)), PlaneCode((4, 4, 4, 4)))
    read_k, read_v = page_round_trip(format, k, v)
    assert torch.equal(read_k[:, 2 * PAGE_SIZE :], k[:, 2 * PAGE_SIZE :])
    assert 0 < float((read_v - v)[:, : 2 * PAGE_SIZE].square().mean()) < 0.05


def test_pages_go_through_records_and_a_partial_one_stays():
    _, k, v = (x.float() for x in activations(tokens=2 * PAGE_SIZE + 7))
    format = PageFormat(64, 64, 0.9, 0.92)
    read_k, read_v = page_round_trip(format, k, v)
    for x, read, clip in ((k, read_k, 0.9), (v, read_v, 0.92)):
        assert torch.equal(read[:, 2 * PAGE_SIZE :], x[:, 2 * PAGE_SIZE :])
        assert torch.equal(read[:, : 2 * PAGE_SIZE], round_trip(x[:, : 2 * PAGE_SIZE], 2, clip))


@pytest.mark.parametrize("bits, most", [(2, 0.13), (3, 0.05), (4, 0.02)])
def test_round_trip_errs_as_the_width_allows(bits, most):
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    error = (round_trip(x, bits, 0.88 if bits == 2 else 1.0) - x.float()).square().mean()
    assert most / 3 < error < most
