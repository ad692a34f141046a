"""A prefill layer asks little of the host: short prompts wait for each of its operations."""

from __future__ import annotations

import re

from tests.kernels.no_gpu import output_of


def test_operations_and_launches_of_a_prefill_layer():
    """Runs host_layer.py. FlashAttention 3 is not counted."""
    output = output_of("tests.sglang.attention.host_layer", "128")
    found = {name: (int(a), int(b)) for name, a, b in re.findall(r"(.+): (\d+) operations, (\d+) launches", output)}
    assert found == {"fresh": (4, 1), "after a prefix": (12, 3)}, "see docs/notes/prefill-graphs.md: What the host does"
