"""From second moments to matrices of keys, queries and values: definitions, and the gain of each composition."""

import pytest
import torch

from sglang_kvq.formats.quantize import clip_rank, dequantize_rows, quantize_rows
from sglang_kvq.rotations.base import Rotations, check_rotations
from sglang_kvq.rotations.maths.compose import balance, compose, compose_keys, oscar_permutation, stretch
from sglang_kvq.rotations.maths.fixed import hadamard_matrix


def test_oscar_composition_is_u_h_p():
    x = torch.randn(200, 64, dtype=torch.float64)
    moment = x.T @ x
    values, u = torch.linalg.eigh(moment)
    order = values.argsort(descending=True)
    perm = torch.empty(64, dtype=torch.int64)
    for i in range(64):
        perm[int(f"{i:06b}"[::-1], 2)] = order[i]
    rotation, eigenvalues = compose("oscar", moment, moment)
    torch.testing.assert_close(rotation, (u @ hadamard_matrix(64) @ torch.eye(64).double()[:, perm]).float())
    torch.testing.assert_close(eigenvalues, values.float())


@pytest.mark.parametrize("n", [64, 96, 128])
def test_oscar_permutation_is_one(n):
    assert sorted(oscar_permutation(n).tolist()) == list(range(n))


def test_offset_composition_stores_a_common_part_for_free():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 64, generator=generator) + 4 * torch.randn(64, generator=generator)
    moment = (x.T @ x).double()
    errors = {}
    for name in ("offset", "oscar"):
        rotated = x @ compose(name, torch.eye(64, dtype=torch.float64), moment)[0]
        back = dequantize_rows(*quantize_rows(rotated.bfloat16(), 64, clip_rank(64, 0.9)))
        errors[name] = (back - rotated).square().mean()
    assert errors["offset"] < 0.2  # unit noise at 2 bits; the mean, of size 4, costs nothing
    assert errors["oscar"] > 3 * errors["offset"]


def outliers(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and k, float64 ``[512, 64]``: keys are large where queries are small, as in Qwen2.5."""
    spread = torch.logspace(-0.8, 0.8, 64, dtype=torch.float64)
    mix = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=generator))[0]
    q, k = (torch.randn(512, 64, dtype=torch.float64, generator=generator) for _ in "qk")
    return q / spread @ mix, k * spread @ mix


def moment(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


def test_balanced_keys_and_queries_have_one_moment():
    q, k = outliers(torch.Generator().manual_seed(1))
    a = balance(moment(q), moment(k))
    torch.testing.assert_close(a, a.T)
    of_keys, of_queries = moment(k @ a), moment(q @ torch.linalg.inv(a))
    assert (of_keys - of_queries).norm() < 0.02 * of_keys.norm()


def test_balance_keeps_scores_and_makes_them_exacter():
    q, k = outliers(torch.Generator().manual_seed(2))
    error = {}
    for name in ("balanced", "offset"):
        r_k, r_q, _ = compose_keys(name, moment(q), moment(k))
        assert (r_q is None) == (name == "offset")
        r_q = r_k if r_q is None else r_q
        exact, turned, queries = q @ k.T, (k @ r_k.double()).bfloat16(), q @ r_q.double()
        torch.testing.assert_close(q @ r_q.double() @ (k @ r_k.double()).T, exact, rtol=1e-4, atol=1e-3)
        back = dequantize_rows(*quantize_rows(turned, 64, 0)).double()
        error[name] = ((queries @ back.T - exact).norm() / exact.norm()).item()
    assert error["balanced"] < 0.25 * error["offset"], error


def test_what_the_zero_point_stores_is_stretched():
    """The direction of a constant part of keys, as from biases, is stretched, so that its codes do not spoil scores."""
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(512, 64, dtype=torch.float64, generator=generator) for _ in "qk")
    direction = torch.nn.functional.normalize(torch.randn(64, dtype=torch.float64, generator=generator), dim=0)
    q, k = q + 6 * torch.randn(512, 1, dtype=torch.float64, generator=generator) * direction, k + 40 * direction
    a = balance(moment(q), moment(k))
    plain = a @ torch.linalg.eigh(a.T @ moment(k) @ a).eigenvectors.flip(-1) @ hadamard_matrix(64)
    stretched, _, _ = compose_keys("balanced", moment(q), moment(k))
    error = []
    for r_k in (plain, stretched.double()):
        back = dequantize_rows(*quantize_rows((k @ r_k).bfloat16(), 64, 0)).double()
        error.append((q @ torch.linalg.inv(r_k).mT @ back.T - q @ k.T).norm().item())
    assert error[1] < 0.8 * error[0], error


@pytest.mark.parametrize("energies, wanted", [((100, 1, 1, 1), 5), ((5, 2, 2, 2), 1), ((1, 0, 0, 0), 500)])
def test_the_stretch_is_the_root_of_a_quarter_of_the_energys_share(energies, wanted):
    energy = torch.tensor(energies, dtype=torch.float64).diag()
    torch.testing.assert_close(stretch(energy).norm(dim=0), torch.tensor([wanted, 1, 1, 1], dtype=torch.float64))


@pytest.mark.parametrize("unused", ["queries", "keys", "both"])
def test_a_head_without_queries_or_keys_gets_rotations(unused):
    q, k = (moment(x) for x in outliers(torch.Generator().manual_seed(3)))
    q, k = q * (unused == "keys"), k * (unused == "queries")
    r_k, r_q, _ = compose_keys("balanced", q, k)
    rotations = Rotations(r_k[None, None], torch.eye(64)[None, None], q=r_q[None, None])
    check_rotations(rotations, layers=1, kv_heads=1, head_dim=64)


@pytest.mark.parametrize("seed", range(8))
def test_keys_that_never_change_get_rotations(seed):
    """All but one direction have no energy, or by rounding less than none."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, 64, dtype=torch.float64, generator=generator) for n in (512, 1))
    r_k, r_q, _ = compose_keys("balanced", moment(q), moment(10.0 ** (seed % 5 - 2) * k))
    rotations = Rotations(r_k[None, None], torch.eye(64)[None, None], q=r_q[None, None])
    check_rotations(rotations, layers=1, kv_heads=1, head_dim=64)


def test_a_direction_that_keys_or_queries_lack_does_no_harm():
    q, k = outliers(torch.Generator().manual_seed(3))
    q[:, 0] = 0
    k[:, 1] = 0
    r_k, r_q, _ = compose_keys("balanced", moment(q), moment(k))
    rotations = Rotations(r_k[None, None], torch.eye(64)[None, None], q=r_q[None, None])
    check_rotations(rotations, layers=1, kv_heads=1, head_dim=64)
