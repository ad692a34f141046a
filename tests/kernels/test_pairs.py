"""Functions that process BF16 numbers two at a time."""

import pytest
import torch

from sglang_kvq.kernels.device.common import has_pairs
from tests.kernels.scene import DEVICE

N = 4096
PACKED = has_pairs(torch.device(DEVICE))


@pytest.fixture
def kernels():
    from tests.kernels import pair_kernels  # defined while Triton's switch is set, see conftest.py

    return pair_kernels


def any_float32() -> torch.Tensor:
    """Returns numbers of every kind: both signs, all exponents, BF16 numbers, zeros, subnormals and infinities."""
    bits = torch.randint(-(2**31), 2**31, (N,), dtype=torch.int64).int()
    bits[::3] &= -65536  # BF16 numbers
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, float("inf"), -float("inf")]).view(torch.int32)
    bits[: len(special)] = special
    x = bits.view(torch.float32)
    return torch.where(x.isnan(), 0.5, x).to(DEVICE)


def test_rounding_down_keeps_what_is_above(kernels):
    bound, out = any_float32(), torch.empty(N, dtype=torch.int32, device=DEVICE)
    kernels.round_down[(N // 1024,)](out, bound)
    low, high = (out << 16).view(torch.float32), (out & -65536).view(torch.float32)
    assert torch.equal(low, high)
    assert (low <= bound).all()
    next_above = torch.where(low.signbit(), out - 65536, out + 65536) & -65536  # the next number in BF16
    next_above = torch.where((out & -65536) == -(2**31), 65536, next_above).view(torch.float32)  # -0
    assert ((next_above > bound) | next_above.isnan()).all()


def test_counting(kernels):
    x = torch.randn(N // 16, 128, device=DEVICE).bfloat16()
    x[::5] = x[::5, :1]  # ties
    bound = x[:, 7].float() * (1 + torch.arange(N // 16, device=DEVICE) % 3 * 1e-3)
    edge = x[:, 9].abs()
    above, at_least = torch.empty(2, N // 16, device=DEVICE)
    kernels.compare[(N // 16,)](above, at_least, x.view(torch.int32), bound, edge.view(torch.int16).int(), PACKED)
    assert torch.equal(above, (x.float() > bound[:, None]).sum(1).float())
    assert torch.equal(at_least, (x.abs() >= edge[:, None]).sum(1).float())
