"""Transform coding agrees with its theory: inverses, errors of scores, bits by exhaustive search, the bound."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.planes import PLANES, PlaneCode, cells_of
from sglang_kvq.rotations.maths.fixed import hadamard_matrix
from sglang_kvq.rotations.maths.transform import (
    DISTORTION,
    MOST_PAIRS,
    PATTERNS,
    STEPS,
    Basis,
    choose_widths,
    coding_basis,
    coding_gain,
    fold_steps,
    pattern_costs,
    plane_energies,
    rate_distortion,
)
from tests.rotations.helpers import random_transform

D = 64


def moment(*shape: int, spread: float = 2.0) -> torch.Tensor:
    """Returns random positive definite matrices with energies over ``spread`` decades."""
    u = torch.linalg.qr(torch.randn(*shape, D, D, dtype=torch.float64))[0]
    return u * torch.logspace(0, -spread, D, dtype=torch.float64) @ u.mT


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_folded_steps_change_neither_scores_nor_outputs():
    plain = random_transform().for_worker(range(2), 2, 0, 2)
    folded = fold_steps(plain, torch.tensor([[4, 3, 1, 0], [2, 2, 1, 1]]), torch.tensor([[3, 2, 2, 1], [4, 0, 0, 0]]))
    q, k, v = torch.randn(3, 2, 1, 5, D)

    def attention(r: LayerRotations) -> tuple[torch.Tensor, torch.Tensor]:
        return (q @ r.q) @ (k @ r.k - r.k_mean[:, :, None]).mT, v @ r.v @ r.o.mT

    for got, want in zip(attention(folded), attention(plain)):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert not torch.equal(folded.k, plain.k)


def gaussian(covariance: torch.Tensor, count: int) -> torch.Tensor:
    return torch.randn(count, D, dtype=torch.float64) @ torch.linalg.cholesky(covariance).mT


def scaled(basis: Basis, widths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a basis with the quantizers' steps folded in, float32 ``[..., D, D]`` each."""
    steps = torch.tensor(STEPS, dtype=torch.float64)[widths]
    unit = basis.energies.sqrt() * steps.repeat_interleave(D // PLANES, dim=-1)
    return (basis.encode / unit[..., None, :]).float(), (basis.decode * unit[..., :, None]).float()


def test_the_basis_is_invertible_and_its_channels_independent():
    c, w = moment(3, 2), moment(3, 2)
    basis = coding_basis(c, w)
    one = torch.eye(D, dtype=torch.float64).expand(3, 2, D, D)
    torch.testing.assert_close(basis.encode @ basis.decode, one)
    torch.testing.assert_close(basis.encode.mT @ c @ basis.encode, torch.diag_embed(basis.energies))
    assert (basis.energies.diff(dim=-1) <= 0).all()
    # An error in the basis costs its square.
    torch.testing.assert_close(basis.decode @ w @ basis.decode.mT, one)


def test_scaling_makes_every_channels_step_one():
    basis, widths = coding_basis(moment(2, 3), moment(2, 3)), torch.tensor([[4, 3, 1, 0], [2, 2, 2, 2]])[:, None]
    encode, decode = scaled(basis, widths)
    torch.testing.assert_close(
        (encode @ decode).double(), torch.eye(D, dtype=torch.float64).expand(2, 3, D, D), atol=1e-4, rtol=0
    )
    steps = (basis.encode / encode.double()).mean(-2) / basis.energies.sqrt()
    expected = torch.tensor(STEPS, dtype=torch.float64)[widths].repeat_interleave(D // PLANES, -1).expand(2, 3, D)
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("widths", [(6, 3, 2, 1), (4, 3, 1, 0), (4, 4, 4, 4)], ids=str)
def test_the_error_of_scores_is_what_the_table_says(widths):
    """The table gives the error at gain 1 on Gaussian keys; with the rows' own gains it is within a factor."""
    c, w = moment(), moment()
    basis, keys = coding_basis(c, w), gaussian(c, 20000)
    encode, decode = (x.double() for x in scaled(basis, torch.tensor(widths)))
    code = PlaneCode(widths)
    y = (keys @ encode).bfloat16()
    foreseen = float((torch.tensor(DISTORTION)[torch.tensor(widths)].double() * plane_energies(basis.energies)).sum())

    def error(back: torch.Tensor) -> float:
        e = back.double() @ decode - keys
        return float(((e @ w) * e).sum(-1).mean())

    quarter = D // PLANES
    top = (2.0 ** torch.tensor(widths) - 1) / 2
    top = top.repeat_interleave(quarter)
    fixed = ((y.float().floor() + 0.5).clamp(-top, top)) * (top > 0)
    assert error(fixed) == pytest.approx(foreseen, rel=0.05)
    assert error(code.dequantize(*code.quantize(y))) < 2.5 * foreseen


def test_bits_where_the_energy_is_beat_equal_bits():
    """At 2 bits, unequal widths gain more than 5 dB here; the basis's coding gain is 6.6 dB by energies alone."""
    c, w = moment(), moment()
    keys, basis = gaussian(c, 8000), coding_basis(c, w)
    mixed = Basis(
        basis.encode @ hadamard_matrix(D).double(), hadamard_matrix(D).double().mT @ basis.decode, basis.energies
    )

    def error(encode: torch.Tensor, decode: torch.Tensor, widths: tuple[int, ...], scale: float) -> float:
        code = PlaneCode(widths)
        back = code.dequantize(*code.quantize((keys @ encode / scale).bfloat16())).double() * scale
        e = back @ decode - keys
        return float(((e @ w) * e).sum(-1).mean())

    one = pattern_costs(basis.energies[None, None], torch.ones(1))
    ((widths, _),) = choose_widths(one, one, 2.0)
    assert sum(widths) / PLANES == 2
    ours = error(*(x.double() for x in scaled(basis, torch.tensor(widths))), widths, 1.0)
    equal = error(mixed.encode, mixed.decode, (2, 2, 2, 2), float(basis.energies.mean().sqrt()) * STEPS[2])
    assert float(coding_gain(basis.energies)) > 5
    assert 10 * math.log10(equal / ours) > 0.6 * float(coding_gain(basis.energies))


def test_patterns_never_rise():
    every = itertools.combinations_with_replacement(range(6, -1, -1), 4)
    assert tuple(p for p in every if cells_of(p)) == PATTERNS
    assert all(list(p) == sorted(p, reverse=True) for p in PATTERNS)


def planted(layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns costs of keys and values for layers with very different energies."""
    energies = torch.rand(2, layers, PLANES, dtype=torch.float64).sort(-1, descending=True).values
    energies *= torch.logspace(0, 3, layers, dtype=torch.float64)[:, None]
    k, v = energies @ torch.tensor(DISTORTION, dtype=torch.float64)[torch.tensor(PATTERNS)].T
    return k, v


def cost_of(costs: tuple[torch.Tensor, torch.Tensor], chosen: list) -> float:
    return sum(float(c[i, PATTERNS.index(pair[part])]) for part, c in enumerate(costs) for i, pair in enumerate(chosen))


@pytest.mark.parametrize("budget", [1.0, 1.4, 1.6, 2.25, 3.9, 4.0])
def test_widths_are_near_the_best_of_all(budget):
    """No combination of widths for two layers is better within the budget by more than the hull allows."""
    costs = planted(2)
    found = choose_widths(*costs, budget)
    total = sum(sum(k) + sum(v) for k, v in found)
    assert total / (2 * 2 * PLANES) <= budget + 1e-9
    # For each part, the least cost at each of its sizes suffices.
    sizes = range(2, 17, 2)
    best = {bits: [min(float(c[n]) for n, p in enumerate(PATTERNS) if sum(p) == bits) for x in costs for c in x]
            for bits in sizes}  # fmt: skip
    least = min(
        sum(best[b][part] for part, b in enumerate(each))
        for each in itertools.product(sizes, repeat=4)
        if sum(each) <= 16 * budget + 1e-9
    )
    assert least - 1e-12 <= cost_of(costs, found) <= 1.1 * least


def test_few_pairs_cost_little():
    costs = planted(40)
    free, few = choose_widths(*costs, 2.4, most=1000), choose_widths(*costs, 2.4)
    assert len(set(free)) > 12 and len(set(few)) <= MOST_PAIRS
    assert cost_of(costs, free) <= cost_of(costs, few) <= 1.15 * cost_of(costs, free)
    alone = choose_widths(*costs, 2.4, most=1)
    assert len(set(alone)) == 1 and cost_of(costs, alone) > 2 * cost_of(costs, free)


@pytest.mark.parametrize("budget", [1.6, 2.4, 3.1])
def test_no_layer_could_use_what_is_left_of_the_budget(budget):
    costs = planted(40)
    chosen = choose_widths(*costs, budget)
    left = 2 * PLANES * 40 * budget - sum(map(width_of, chosen)) + 1e-6
    for layer, pair in enumerate(chosen):
        for other in set(chosen):
            if 0 < width_of(other) - width_of(pair) <= left:
                changed = [*chosen[:layer], other, *chosen[layer + 1 :]]
                assert cost_of(costs, changed) >= cost_of(costs, chosen), (layer, pair, other)


def width_of(pair: tuple) -> int:
    return sum(map(sum, pair))


def test_more_bits_never_cost_more():
    costs = planted(12)
    errors = [cost_of(costs, choose_widths(*costs, b / 4, most=1000)) for b in range(4, 17)]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(errors))


def test_the_bound_is_reverse_water_filling():
    """The bound agrees with bisection of the water level, and lies below the tables of uniform quantizers."""
    energies = torch.logspace(2, -4, 50, dtype=torch.float64)
    rates = [0.0, 0.01, 0.5, 1.0, 2.5, 6.0]
    for rate, found in zip(rates, rate_distortion(energies, rates), strict=True):
        low, high = 1e-12, float(energies.max())
        for _ in range(200):
            level = math.sqrt(low * high)
            used = 0.5 * torch.log2(energies / level).clamp(min=0).mean()
            low, high = (level, high) if used > rate else (low, level)
        assert found == pytest.approx(float(energies.clamp(max=high).sum()), rel=1e-6)
    same = torch.ones(8)
    for bits, distortion in enumerate(DISTORTION):
        assert rate_distortion(same, [float(bits)])[0] / 8 == pytest.approx(4.0**-bits) and 4.0**-bits <= distortion


@pytest.mark.parametrize("budget", [0.9, 4.1, math.nan])
def test_budgets_that_make_no_sense_are_named(budget):
    with pytest.raises(KVQuantError, match="budget"):
        choose_widths(*[torch.ones(2, len(PATTERNS), dtype=torch.float64)] * 2, budget)


def test_moments_that_make_no_sense_are_named():
    with pytest.raises(KVQuantError, match="not finite"):
        coding_basis(moment() * math.nan, moment())
    with pytest.raises(KVQuantError, match="finite cost"):
        choose_widths(*[torch.full((1, len(PATTERNS)), math.inf, dtype=torch.float64)] * 2, 1.0)


@pytest.mark.parametrize("part", [0, 1])
def test_a_head_with_nothing_to_code_is_named(part):
    moments = [torch.eye(64, dtype=torch.float64).repeat(2, 2, 1, 1) for _ in range(2)]
    moments[part][1, 0] = 0
    with pytest.raises(KVQuantError, match="layer 1, head 0: .* nothing to code"):
        coding_basis(*moments)
