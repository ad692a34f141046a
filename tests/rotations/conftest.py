"""Fixtures of the calibration's tests."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """For tensors too small for more; on a busy machine more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
