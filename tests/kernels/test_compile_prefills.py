"""A server compiles the kernels of prefills over a stored prefix before it serves, so no request waits for them."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT

SCRIPT = "tests.kernels.compiled_prefills"


def test_no_prefill_over_a_prefix_compiles_a_kernel():
    """Runs compiled_prefills.py in a separate process, where kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    first = {name: set(kernels.split()) for name, _, kernels in reversed(lines)}
    assert first["oscar, at startup"] >= {"_rotate", "_gather", "_append", "_extend", "_flash", "_merge"}
    later = [kernels for name, _, kernels in lines if name.endswith("later")]
    assert len(later) == 8 and not any(later), done.stdout
