"""Each family's reference follows its definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.capacity import random_transform
from benchmarks.research.families import gear, palu
from benchmarks.research.families.base import History, uniform
from benchmarks.research.families.catalog import BUDGETS, SERVED
from benchmarks.research.families.gear import Gear
from benchmarks.research.families.h2o import H2O
from benchmarks.research.families.kvmerger import KVMerger, gaussian_weights, merging_sets
from benchmarks.research.families.palu import Bases, Palu
from benchmarks.research.families.served import preset, served, to_model, to_stored
from benchmarks.research.families.snapkv import SnapKV
from benchmarks.research.tests import helpers
from sglang_kvq.rotations.calibration.rope import turn_of
from sglang_kvq.rotations.identity import geometry_of

HEADS, N, DIM = helpers.KV_HEADS, 128, 64


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def history(k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> History:
    k = randn(HEADS, N, DIM, seed=1) if k is None else k
    v = randn(HEADS, N, DIM, seed=2) if v is None else v
    masses = (torch.rand(k.shape[:2], generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))
    return History(k, v, torch.arange(64, 64 + k.shape[1]), *masses)


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).square().sum() / x.square().sum())


@pytest.mark.parametrize("budget", BUDGETS)
def test_eviction_keeps_the_highest_scores(budget: float) -> None:
    given = history()
    found = H2O(budget)(0, given)
    count = found.k.shape[1]
    for head in range(HEADS):
        best = given.mass[head].topk(count).indices.sort().values
        assert torch.equal(found.k[head], given.k[head, best]) and torch.equal(found.v[head], given.v[head, best])
    # A token has 2 x 64 numbers of 16 bits and a score of 16 bits.
    assert found.bits == HEADS * count * (2 * DIM * 16 + 16) <= budget * given.elements < found.bits * (1 + 1 / count)
    assert SnapKV(budget)(0, given).k.shape[1] == int(budget * N / 16)


def test_snapkv_keeps_neighbours_of_what_its_window_sees() -> None:
    given = history()
    given.observed.zero_()
    given.observed[:, 40] = 1.0
    found = SnapKV(7 * 16 / N, kernel=7)(0, given)
    assert torch.equal(found.k, given.k[:, 37:44])


def test_equal_neighbours_merge_without_loss() -> None:
    """With eight runs of equal tokens, and the runs' sizes in the scores, attention does not change."""
    runs = randn(HEADS, 8, DIM, seed=5)
    sizes = torch.tensor([1, 2, 30, 1, 50, 4, 10, 30])
    given = history(*(x.repeat_interleave(sizes, 1) for x in (runs, runs.flip(-1))))
    found = KVMerger(8 * 16.2 / N, counted=True)(0, given)
    torch.testing.assert_close(found.k, runs)
    torch.testing.assert_close(found.v, runs.flip(-1))
    q = randn(HEADS, 3, DIM, seed=6) / 8
    before = (q @ given.k.mT).softmax(-1) @ given.v
    after = (q @ found.k.mT + found.bias[:, None]).softmax(-1) @ found.v
    torch.testing.assert_close(after, before)
    assert KVMerger(8 * 16.2 / N)(0, given).bias is None


def test_merging_takes_weighted_means_around_the_pivot() -> None:
    given = history()
    sets = merging_sets(given.k, 30)
    assert sets[:, 0].eq(0).all() and sets[:, -1].eq(29).all() and sets.diff(dim=1).max() == 1
    weights = gaussian_weights(given.k, given.mass, sets, 30)
    head, members = 1, (sets[1] == sets[1].mode().values).nonzero()[:, 0]
    pivot = members[given.mass[head, members].argmax()]
    squares = (given.k[head, members] - given.k[head, pivot]).square().sum(-1)
    g = (-squares / (2 * squares.mean())).exp()
    torch.testing.assert_close(weights[head, members], g / g.sum())
    found = KVMerger(30 * 16 / N)(0, given)
    wanted = (weights[head, members, None] * given.v[head, members]).sum(0)
    torch.testing.assert_close(found.v[head, sets[head, pivot]], wanted, atol=0.01, rtol=0.01)


def test_uniform_codes() -> None:
    x = torch.tensor([[0.0, 1.0, 2.1, 3.0, 100.0]])
    kept = torch.tensor([[True, True, True, True, False]])
    assert torch.equal(uniform(x, 2, 1, kept), torch.tensor([[0.0, 1.0, 2.0, 3.0, 3.0]]))
    assert uniform(torch.tensor([[-3.0, -1.0, 1.0, 3.0]]), 1, 1).tolist() == [[-2.0, -2.0, 2.0, 2.0]]


def test_gear_adds_low_rank_and_outliers() -> None:
    """After 2-bit codes, the residual is noise, a direction that all tokens share, and a few outliers."""
    given = history()
    errors = {}
    for rank, outliers in ((1, 0.0), (4, 0.0), (4, 0.04)):
        one = Gear(2, rank, outliers)
        found = one(0, given)
        errors[rank, outliers] = relative(given.k, found.k) + relative(given.v, found.v)
        assert found.bits / given.elements == pytest.approx(gear.size(one, given))
    assert errors[1, 0.0] > errors[4, 0.0] > errors[4, 0.04] > 0
    far = given.k.clone()
    far[:, 7, 9] = 500.0
    with_outlier = history(k=far)
    assert Gear(2, 1, 0.04)(0, with_outlier).k[0, 7, 9] == 500.0
    # The outlier does not stretch its channel's scale.
    without = relative(given.k[:, :, 9], Gear(2, 1, 0.04)(0, given).k[:, :, 9])
    rest = [i for i in range(N) if i != 7]
    assert relative(given.k[:, rest, 9], Gear(2, 1, 0.04)(0, with_outlier).k[:, rest, 9]) < 2 * without
    # Rank 1 on codes that are all one number (a constant matrix) leaves nothing.
    outer = randn(HEADS, N, 1, seed=8) * randn(HEADS, 1, DIM, seed=9)
    assert relative(outer, Gear(3, 8, 0.0)(0, history(k=outer)).k) < 0.002


@pytest.mark.parametrize("budget", BUDGETS)
def test_settings_fit_their_budget(budget: float) -> None:
    given = history()
    found = gear.settings(budget, given)
    assert found and all(one(0, given).bits <= budget * given.elements for one in found[::7])
    of = bases()
    for one in palu.settings(of, budget):
        total = sum(one(layer, given).bits for layer in range(helpers.LAYERS))
        least = 2 * helpers.LAYERS * N * one.width  # one direction per matrix, whatever its energy
        assert total <= budget * given.elements * helpers.LAYERS + least


def bases(k: torch.Tensor | None = None) -> Bases:
    size = HEADS * DIM
    turn = turn_of(helpers.tiny_llama(head_dim=DIM).config, DIM)
    turns = torch.stack([turn(at) for at in range(256)]).float()
    moments = torch.eye(size, dtype=torch.float64).expand(helpers.LAYERS, -1, -1)
    rows = randn(helpers.LAYERS, 4 * size, size, seed=11).double() if k is None else k
    return Bases.of(rows.mT @ rows, moments, turns)


def test_palu_is_exact_on_keys_of_low_rank() -> None:
    """Keys before RoPE lie in 16 of the heads' joint dimensions, with 16 bits each."""
    directions = randn(16, HEADS * DIM, seed=12)
    before = (randn(N, 16, seed=13) @ directions).view(N, HEADS, DIM).transpose(0, 1)
    of = bases((randn(helpers.LAYERS, 400, 16, seed=14) @ directions).double())
    positions = torch.arange(64, 64 + N)
    k = torch.einsum("hnd,nde->hne", before, of.turns[positions])
    torch.testing.assert_close(palu.before_rope(k, positions, of.turns), before, atol=1e-3, rtol=1e-3)
    assert of.ranks(16 / (2 * HEADS * DIM))[0].tolist() == [16] * helpers.LAYERS
    given = history(k=k)
    wide = Palu(of, 0.5, 16)(0, given)
    assert relative(k, wide.k) < 1e-4
    assert relative(k, Palu(of, 0.5, 4)(0, given).k) < 0.05 < relative(k, Palu(of, 0.02, 16)(0, given).k)


def test_palu_of_all_directions_is_exact() -> None:
    given = history()
    found = Palu(bases(), 1.0, 16)(0, given)
    assert relative(given.k, found.k) < 1e-4 > relative(given.v, found.v)
    assert found.bits == 16 * given.elements


@pytest.fixture(scope="module")
def rotations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    geometry = geometry_of(helpers.tiny_llama(head_dim=DIM).config)
    return random_transform(tmp_path_factory.mktemp("rotations") / "transform", *geometry)


def test_served_methods_leave_their_basis(rotations: Path) -> None:
    config = helpers.tiny_llama(head_dim=DIM).config
    given = history()
    for spec in ("transform:2.5", "turboquant:2", "kivi:2/32"):
        one = served(spec, "tiny", config, str(rotations))
        for x, y in zip((given.k, given.v), to_model(one.rotations, 1, *to_stored(one.rotations, 1, given.k, given.v))):
            torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-3)
        found = one(1, given)
        assert 0.001 < relative(given.k, found.k) < 0.7
        assert found.bits == one.formats[1].bits_per_element * given.elements


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_served_fits_its_budget(budget: float, rotations: Path) -> None:
    config = helpers.tiny_llama(head_dim=DIM).config
    specs = [spec for spec in SERVED[budget] if not spec.startswith("oscar")]  # not for tiny models
    for one in [
        preset(budget, "tiny", config, str(rotations)),
        *(served(s, "tiny", config, str(rotations)) for s in specs),
    ]:
        assert sum(f.bits_per_element for f in one.formats) <= budget * len(one.formats)
