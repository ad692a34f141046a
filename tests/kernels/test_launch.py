"""A launch that skips Triton's search runs the kernel that the search would find, with the same arguments."""

import re

from tests.kernels.no_gpu import output_of


def test_launches_without_search_are_tritons():
    """Runs launch_kinds.py."""
    repeats, kernels = map(int, re.findall(r"\d+", output_of("tests.kernels.launch_kinds", timeout=900)))
    assert repeats >= 800 and kernels >= 500
