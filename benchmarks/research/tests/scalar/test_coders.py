"""Coders agree with the literature, exhaustive search and the product's own codes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.capacity import random_transform
from benchmarks.research.families.base import History
from benchmarks.research.families.served import Served, served
from benchmarks.research.scalar.__main__ import bits_at, gained
from benchmarks.research.scalar.coding import (
    Coding,
    bits_of,
    channel_widths,
    foreseen,
    plane_widths,
    transform_of,
    weighted_errors,
)
from benchmarks.research.scalar.lattice import Lattice, in_ball, largest_norm, nearest
from benchmarks.research.scalar.loops import PER_LANE, conflicts, counted
from benchmarks.research.scalar.prediction import Predicted, Predictor, value_widths
from benchmarks.research.scalar.trellis import Trellis, circular_paths, paths
from benchmarks.research.scalar.uniform import Levels, TwoGains, row_gain, uniform, with_best_gain
from benchmarks.research.tests import helpers
from sglang_kvq.formats.planes import PlaneCode
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.maths.transform import STEPS

WIDTHS = (4, 3, 1, 0)


def gauss(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mse(x: torch.Tensor, read: torch.Tensor) -> float:
    return float((x - read).square().mean())


def test_uniform_codes_are_the_products() -> None:
    """Except for FP16 rounding: the same gain gives the same value, and the gain is almost always the same."""
    x, widths = gauss(300, 64).bfloat16().float(), torch.tensor(WIDTHS).repeat_interleave(16)
    steps, code = torch.tensor(STEPS)[widths], PlaneCode(WIDTHS)
    theirs = code.dequantize(*code.quantize((x / steps).bfloat16())) * steps
    ours = uniform(x, widths)
    same = torch.isclose(ours, theirs, atol=1e-5).float().mean()
    assert same > 0.9
    assert mse(x, ours) == pytest.approx(mse(x, theirs), rel=0.02)
    assert not ours[:, 48:].any()


def test_the_gain_next_to_the_best_is_taken() -> None:
    """The gain is nearest to the least-squares one, and gains are an eighth of a power of two apart."""
    units, gains = gauss(50, 64), torch.linspace(0.3, 3, 50)[:, None]
    read = with_best_gain(units * gains, units)
    taken = (read / units)[:, :1]
    assert ((taken / gains - 1).abs() < 0.0626).all()
    eighths = taken * 8 / 2 ** taken.log2().floor()
    torch.testing.assert_close(eighths, eighths.round(), atol=1e-4, rtol=0)


def test_levels_reach_the_literature() -> None:
    """Max 1960, table I: 0.3634, 0.1175, 0.03454 for 1 to 3 bits."""
    levels = Levels.trained(gauss(60_000), 3)
    x = gauss(2000, 64, seed=1)
    for width, wanted in ((1, 0.3634), (2, 0.1175), (3, 0.03454)):
        assert mse(x, levels(x, torch.full((64,), width))) == pytest.approx(wanted, rel=0.06)


def test_the_best_path_is_found() -> None:
    """The path is the best of all 10-bit strings of a row of widths 2, 1, 3, 1, 2, 1."""
    widths, memory, x = [2, 1, 3, 1, 2, 1], 4, gauss(5, 6)
    tables = {w: gauss(1 << memory, seed=w) for w in (1, 2, 3)}

    def values(bits: tuple[int, ...], start: int) -> tuple[list[float], int]:
        state, at, found = start, 0, []
        for w in widths:
            symbol = int("".join(map(str, bits[at : at + w])), 2)
            state, at = ((state << w) | symbol) & (1 << memory) - 1, at + w
            found.append(float(tables[w][state]))
        return found, state

    strings = list(product((0, 1), repeat=sum(widths)))
    free = torch.tensor([values(bits, start)[0] for bits in strings[::7] for start in range(1 << memory)])
    states = paths(x, widths, tables, memory)
    read = torch.stack([tables[w][states[:, t]] for t, w in enumerate(widths)], 1)
    assert ((x - read).square().sum(1) <= ((x[:, None] - free) ** 2).sum(-1).amin(1) + 1e-5).all()

    seam = torch.tensor([3, 0, 9, 15, 6])
    states = paths(x, widths, tables, memory, seam)
    read = torch.stack([tables[w][states[:, t]] for t, w in enumerate(widths)], 1)
    for row in range(5):
        closed = [found for bits in strings if (found := values(bits, int(seam[row])))[1] == int(seam[row])]
        best = min(float(((x[row] - torch.tensor(f)) ** 2).sum()) for f, _ in closed)
        assert float((x[row] - read[row]).square().sum()) == pytest.approx(best, rel=1e-4)


def test_a_circular_string_closes() -> None:
    widths, memory = [2, 1, 3, 1, 2, 1, 2], 5
    tables = {w: gauss(1 << memory, seed=w) for w in (1, 2, 3)}
    states = circular_paths(gauss(40, 7), widths, tables, memory)
    for t, w in enumerate(widths):  # the window moves by w bits; the last state precedes the first value
        before = states[:, t - 1]
        assert torch.equal(states[:, t] >> w, before & (1 << memory - w) - 1)


def test_a_trellis_beats_levels() -> None:
    """At 2 bits along 64 Gaussian values: Lloyd-Max 0.118, bound 0.0625, 64 states of first tables about 0.1."""
    rows, x = gauss(128, 64), gauss(200, 64, seed=1)
    widths = torch.full((64,), 2)
    trellis = Trellis.trained(rows / row_gain(rows, widths), 6, 2, rounds=3)
    assert 0.0625 < mse(x, trellis(x, widths)) < 0.105
    mixed = torch.tensor([2, 2, 1, 0]).repeat_interleave(16)
    read = trellis(x, mixed)
    assert not read[:, 48:].any() and 0.2 < mse(x[:, 32:48], read[:, 32:48]) < 0.36


def test_e8() -> None:
    """E8 has the right shortest vectors, second moment 0.0717 (Conway and Sloane, table 2.3), and balls."""
    x = gauss(4000, 8) * 5
    found = nearest(x)
    doubled = found * 2
    assert torch.equal(doubled, doubled.round()) and ((found.sum(-1) % 2) == 0).all()
    assert (doubled % 2 == doubled[:, :1] % 2).all()
    uniform_ = torch.rand(40_000, 8, generator=torch.Generator().manual_seed(1)) * 8
    assert mse(uniform_, nearest(uniform_)) == pytest.approx(0.07168, rel=0.01)
    # 241 points up to squared length 2 are 1 bit per value, and 56,881 up to 10 are 2 bits.
    assert [largest_norm(w) for w in (1, 2)] == [2, 10]
    assert in_ball(x, 10).square().sum(-1).max() <= 10
    assert torch.equal(in_ball(found, 10_000), found)


def test_a_lattice_beats_levels() -> None:
    """E8's ball code of 2 bits has an error of about 0.09 on a Gaussian (QuIP#, section 4), Lloyd-Max 0.118."""
    rows, x = gauss(256, 64), gauss(500, 64, seed=1)
    lattice, widths = Lattice.trained(rows, 3), torch.full((64,), 2)
    assert 0.08 < mse(x, lattice(x, widths)) < 0.105
    assert not lattice(x, torch.tensor([3, 2, 1, 0]).repeat_interleave(16))[:, 48:].any()
    with pytest.raises(ValueError, match="equal widths"):
        lattice(x, torch.tensor([2, 3] * 32))


def test_a_second_gain_helps_rows_of_two_sizes() -> None:
    x = gauss(200, 64)
    x[::2, 16:] *= 0.1
    widths = torch.tensor([3, 2, 2, 0]).repeat_interleave(16)
    assert mse(x[:, :48], TwoGains()(x, widths)[:, :48]) < 0.7 * mse(x[:, :48], uniform(x, widths)[:, :48])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_transform(tmp_path_factory.mktemp("r") / "transform", *geometry_of(config()))


def config() -> object:
    return helpers.tiny_llama(head_dim=64).config


def history(seed: int = 0) -> History:
    k, v = (gauss(helpers.KV_HEADS, 128, 64, seed=seed + n).bfloat16().float() for n in (1, 2))
    return History(k, v, torch.arange(64, 192), torch.ones(k.shape[:2]), torch.ones(k.shape[:2]))


def test_codes_of_planes_are_what_is_served(folder: Path) -> None:
    rotations = transform_of("tiny", config(), str(folder))
    for bits in (2.0, 3.0):
        theirs = served(f"transform:{bits:g}", "tiny", config(), str(folder))
        assert isinstance(theirs, Served)
        ours = Coding(rotations.whole(), *plane_widths(rotations, bits), uniform)
        a, b, given = theirs(1, history()), ours(1, history()), history()
        assert a.bits == b.bits
        assert mse(given.k, a.k) == pytest.approx(mse(given.k, b.k), rel=0.05)
        assert mse(given.v, a.v) == pytest.approx(mse(given.v, b.v), rel=0.05)


@pytest.mark.parametrize("per_head", [False, True])
def test_widths_of_channels_spend_the_budget_best(folder: Path, per_head: bool) -> None:
    rotations = transform_of("tiny", config(), str(folder))
    planes, channels = plane_widths(rotations, 2.0), channel_widths(rotations, 2.0, per_head=per_head)

    eighths = channel_widths(rotations, 2.0, per_head=False, group=8)
    assert bits_of(rotations, planes) <= 2.0 and 1.99 < bits_of(rotations, channels) <= 2.0
    assert foreseen(rotations, channels) < foreseen(rotations, eighths) < foreseen(rotations, planes)
    assert (eighths[0].unflatten(-1, (-1, 8)).diff(dim=-1) == 0).all()
    assert per_head or torch.equal(channels[0][:, 0], channels[0][:, 1])
    coding = Coding(rotations.whole(), *channels, uniform)
    given = history()
    once, bits = weighted_errors(rotations, coding, 0, given)
    assert sum(x.sum() for x in once) > 0 and bits == coding.bits(0, given)
    given.mass[:, :64] = 0  # tokens without attention cost nothing; the others count twice
    half = History(given.k[:, 64:], given.v[:, 64:], given.positions[64:], given.mass[:, 64:], given.mass[:, 64:])
    for ours, theirs in zip(*(weighted_errors(rotations, coding, 0, one)[0] for one in (given, half))):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    assert coding(0, history()).bits == coding.bits(0, history())


def test_prediction_is_exact_where_values_are_keys(folder: Path) -> None:
    """Values are a linear map of the stored keys before RoPE (here all RoPE matrices are identities)."""
    rotations = transform_of("tiny", config(), str(folder))
    turns, matrix = torch.eye(64).expand(256, -1, -1), gauss(64, 64, seed=9) / 8

    def linear(seed: int) -> History:
        one = history(seed)
        return History(one.k, one.k @ matrix, one.positions, one.mass, one.observed)

    texts = [[linear(10 * n)] * helpers.LAYERS for n in range(1, 4)]
    plain, fitted = (Predictor.fitted(rotations, texts, turns, predicts=p) for p in (False, True))
    assert fitted.energies.sum() < 0.01 * plain.energies.sum()
    given, layer = linear(0), 1
    v = given.v @ rotations.whole().v[layer]
    for one in (plain, fitted):
        left = one.whiten(layer, given.k, given.positions, v)
        torch.testing.assert_close(one.restore(layer, given.k, given.positions, left), v, atol=0.02, rtol=0.02)
    importance = torch.ones(helpers.LAYERS, dtype=torch.float64)
    widths = value_widths(plain.energies, importance, 2.0)
    assert float(widths.double().mean()) == pytest.approx(2 - 8 / 64, abs=0.01)
    exact = torch.full_like(widths, 6)
    results = [Predicted(rotations.whole(), one, exact, widths, uniform)(layer, given) for one in (plain, fitted)]
    assert mse(given.v, results[1].v) < 0.2 * mse(given.v, results[0].v)
    assert results[0].bits == 128 * (6 * 128 + int(widths[layer].sum()) + 2 * helpers.KV_HEADS * 8)


def test_bits_gained() -> None:
    assert bits_at([(2, 0.04), (3, 0.01)], 0.02) == pytest.approx(2.5)
    assert bits_at([(2, 0.04), (3, 0.01)], 0.005) == pytest.approx(3.5)
    places = [("uniform", 2.0, 2.0), ("uniform", 3.0, 3.0), ("x", 2.0, 2.3)]
    outcomes = [
        {"case": str(n), "variant": variant, "budget": bits, "bits": bits, "error": 2.0 ** (-2 * at) * (1 + n)}
        for n in range(4)
        for variant, bits, at in places
    ]
    found, error = gained(outcomes, "x", 2.0, "uniform", lambda one: (one["error"], 1))
    assert found == pytest.approx(0.3) and error == pytest.approx(0, abs=1e-6)


def test_a_look_up_costs_instructions_and_cycles() -> None:
    scalar, pairs = counted("scalar"), counted("pairs")
    assert pairs["instructions"] > scalar["instructions"] + PER_LANE
    assert conflicts(1) == 1 and 3.3 < conflicts(1024) < 3.7
