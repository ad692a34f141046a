"""Launches skip Triton's search, and a starting server compiles several kernels at the same time."""

import os
import re

from tests.kernels.no_gpu import output_of


def test_launches_without_search_are_tritons():
    """Runs launch_kinds.py: the kernels are those that the search would find, and get the same arguments."""
    repeats, kernels = map(int, re.findall(r"\d+", output_of("tests.kernels.launch_kinds", timeout=900)))
    assert repeats >= 800 and kernels >= 500


def test_kernels_are_compiled_together_and_not_launched(tmp_path, monkeypatch):
    """Runs compiled_together.py with an empty cache of kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels, threads, cores = map(int, re.findall(r"\d+", output_of("tests.kernels.compiled_together")))
    assert kernels == 4 and cores == len(os.sched_getaffinity(0)) and threads == min(kernels, cores)
