"""Fixtures of the calibration's tests."""

import pytest
import torch

from tests.rotations.helpers import tiny_llama


@pytest.fixture(scope="module")
def one_thread():
    """For tensors too small for more; on a busy machine more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama():
    """A random model; tests leave it as it is."""
    return tiny_llama()


@pytest.fixture(scope="module")
def ids():
    """Tokens for it."""
    return torch.randint(97, (1100,), generator=torch.Generator().manual_seed(0))
