"""Fixtures for tests of the calibration."""

import pytest
import torch

from tests.rotations.helpers import tiny_llama


@pytest.fixture(scope="module")
def one_thread():
    """Uses one thread: these tensors are too small for more, which would only wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama():
    """A random model that tests must not change."""
    return tiny_llama()


@pytest.fixture(scope="module")
def ids():
    """Token ids for that model."""
    return torch.randint(97, (1100,), generator=torch.Generator().manual_seed(0))
