"""A launch that skips Triton's search runs the kernel that the search would find, with the same arguments."""

import os
import re
import subprocess
import sys

from tests.conftest import ROOT


def test_launches_without_search_are_tritons():
    """Runs launch_kinds.py in a separate process, where kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.launch_kinds"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    repeats, kernels = map(int, re.findall(r"\d+", done.stdout))
    assert repeats >= 800 and kernels >= 500
