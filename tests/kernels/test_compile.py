"""The compiler accepts every kernel for sm_90 (the interpreter, which other tests use on a CPU, accepts more)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kernels_compile_for_sm90():
    script = Path(__file__).parent / "compile_sm90.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
