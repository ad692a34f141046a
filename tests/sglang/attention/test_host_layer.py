"""A prefill layer asks little of the host: short prompts wait for each of its operations."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.conftest import ROOT

SCRIPT = "tests.sglang.attention.host_layer"


def test_operations_and_launches_of_a_prefill_layer():
    """Runs host_layer.py in a separate process, where kernels are not interpreted. FlashAttention 3 is not counted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", SCRIPT, "128"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = {
        name: (int(a), int(b)) for name, a, b in re.findall(r"(.+): (\d+) operations, (\d+) launches", done.stdout)
    }
    assert found == {"fresh": (4, 1), "after a prefix": (12, 3)}, "see docs/notes/prefill-graphs.md: What the host does"
