"""Moments of the tokens that attention reads follow their definition, and errors there cost as much as they predict."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.rotations.maths import moments as module
from sglang_kvq.rotations.maths.fake_quant import RotatedContext
from sglang_kvq.rotations.maths.moments import attended_moments, context_moments

SINK, RECENT, T, D = 64, 64, 320, 16
SCALE = D**-0.5


@pytest.fixture
def activations() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k, v: 4 query heads that read 2 KV heads, whose keys have a mean."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, T, D, generator=generator) for heads in (4, 2, 2))
    return 2 * q, k + torch.randn(2, 1, D, generator=generator), v


def pairs(q, k, v):
    """Yields p^2, and p^2 times |v - o|^2, for every query of a KV head and every key of its history."""
    for query_head in range(4):
        head = query_head // 2
        for n in range(T):
            p = (k[head, : n + 1] @ q[query_head, n] * SCALE).double().softmax(0)
            o = p @ v[head, : n + 1].double()
            for i in range(SINK, n // 64 * 64 - RECENT):
                yield head, query_head, n, i, p[i] ** 2, p[i] ** 2 * (v[head, i].double() - o).square().sum()


def test_they_are_weighted_by_what_errors_cost(activations):
    q, k, v = activations
    sums = {name: torch.zeros(2, D, D, dtype=torch.float64) for name in ("qq", "kk", "vv")}
    totals, mean = {name: torch.zeros(2, dtype=torch.float64) for name in sums}, torch.zeros(2, D, dtype=torch.float64)
    for head, query_head, n, i, count, cost in pairs(q, k, v):
        queries, key, value = q[query_head, n].double(), k[head, i].double(), v[head, i].double()
        of_key = cost * queries.square().sum()
        mean[head] += of_key * key
        for name, weight, row in (("qq", cost, queries), ("kk", of_key, key), ("vv", count, value)):
            sums[name][head] += weight * torch.outer(row, row)
            totals[name][head] += weight
    found = attended_moments(q, k, v, SCALE, sink=SINK, recent=RECENT)
    for name, x in sums.items():
        torch.testing.assert_close(
            getattr(found, name), x / totals[name][:, None, None], rtol=1e-4, atol=1e-5, msg=name
        )
        assert getattr(found, name).dtype == torch.float64
    torch.testing.assert_close(found.k_mean, mean / totals["kk"][:, None], rtol=1e-4, atol=1e-5)


def test_blocks_of_queries_add_up(activations, monkeypatch):
    whole = attended_moments(*activations, SCALE, sink=SINK, recent=RECENT)
    monkeypatch.setattr(module, "MOST_SCORES", 2 * T * 128)
    for a, b in zip(whole, attended_moments(*activations, SCALE, sink=SINK, recent=RECENT), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_errors_of_values_cost_what_the_weights_say(activations):
    """Independent errors of equal size cost what the weights predict, on the most attended tokens and on all others."""
    q, k, v = activations
    context = RotatedContext(*activations, SCALE, SINK, RECENT)
    weights = torch.zeros(2, T, dtype=torch.float64)
    for head, _, _, i, count, _ in pairs(q, k, v):
        weights[head, i] += count
    generator, changed = torch.Generator().manual_seed(1), torch.zeros(2)
    much = weights >= weights[:, SINK : T - RECENT].quantile(0.9, dim=1, keepdim=True)
    for part, which in enumerate((much, ~much)):
        for _ in range(20):
            error = torch.randn(v.shape, generator=generator) * which[..., None]
            change = context.output(v=v + error) - context.output()
            changed[part] += float(change.square().sum()) / 20
    expected = torch.stack([(weights * which).sum() * D for which in (much, ~much)]).float()
    torch.testing.assert_close(changed, expected, rtol=0.2, atol=0)


def test_small_errors_of_keys_cost_what_the_weights_say(activations):
    q, k, v = activations
    context, size = RotatedContext(*activations, SCALE, SINK, RECENT), 0.02
    expected = sum(
        float(cost * q[query_head, n].double().square().sum()) * (size * SCALE) ** 2
        for _, query_head, n, _, _, cost in pairs(q, k, v)
    )
    generator, changed = torch.Generator().manual_seed(2), 0.0
    for _ in range(20):
        change = context.output(k=k + size * torch.randn(k.shape, generator=generator)) - context.output()
        changed += float(change.square().sum()) / 20
    assert changed == pytest.approx(expected, rel=0.1)


def test_a_head_that_reads_no_history_has_all_tokens_alike(activations):
    q, k, v = activations
    k[0, :SINK] = 40 * q[:2].mean((0, 1))  # the head's sinks get all attention
    q[:2] = q[:2].abs() * k[0, 0].sign()
    q[:2] *= 1000
    found, plain = attended_moments(q, k, v, SCALE, sink=SINK, recent=RECENT), context_moments(q, k, v, SINK)
    late = v[:, SINK:].double()
    plain = plain._replace(vv=late.mT @ late / late.shape[1])
    for name in ("qq", "kk", "vv", "k_mean"):
        torch.testing.assert_close(getattr(found, name)[0], getattr(plain, name)[0], rtol=1e-6, atol=1e-6, msg=name)
    assert all(torch.isfinite(x).all() for x in found)
