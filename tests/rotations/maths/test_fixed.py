import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import hadamard_matrix, hadamard_rotations


@pytest.mark.parametrize("n", [1, 2, 12, 20, 64, 96, 128, 160, 256])
def test_orthonormal_with_flat_entries_and_constant_first_row(n):
    h = hadamard_matrix(n)
    torch.testing.assert_close(h.T @ h, torch.eye(n, dtype=torch.float64), atol=1e-13, rtol=0)
    torch.testing.assert_close(h.abs(), torch.full_like(h, n**-0.5))
    assert (h[0] > 0).all()


@pytest.mark.parametrize("n", [64, 128, 256])
def test_powers_of_two_are_sylvesters(n):
    bits = torch.tensor([[bin(i & j).count("1") % 2 for j in range(n)] for i in range(n)])
    torch.testing.assert_close(hadamard_matrix(n), (1.0 - 2.0 * bits).double() / n**0.5)


def test_unknown_order_is_refused():
    with pytest.raises(KVQuantError, match="head_dim 56 .*int2"):
        hadamard_matrix(56)


def test_rotations_of_a_model():
    rotations = hadamard_rotations(3, 96)
    worker = rotations.for_worker(range(1, 3), kv_heads_total=8, head_start=2, head_count=2)
    assert worker.k.shape == worker.v.shape == (2, 2, 96, 96)
    torch.testing.assert_close(worker.k[1, 1], hadamard_matrix(96).float())
