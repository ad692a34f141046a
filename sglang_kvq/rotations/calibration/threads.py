"""Threads for PyTorch's work on the CPU: as many as this process may really use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_CGROUPS = Path("/sys/fs/cgroup")


def limit_threads(cgroups: Path = _CGROUPS) -> None:
    """Lowers PyTorch's threads to the CPUs that a container may use; ``OMP_NUM_THREADS`` overrules it.

    PyTorch takes a thread for each core of the host. Where a container may use 16 of 200, the threads wait for each
    other most of the time and use up the CPU time that the container has.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cpus(cgroups))))


def usable_cpus(cgroups: Path = _CGROUPS) -> int:
    """CPUs that this process may run on, and a container's share of them, at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, int(_quota(cgroups) or cpus)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs small decompositions: with more threads, each step of one matrix of 128 x 128 waits for all of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _quota(cgroups: Path) -> float | None:
    """CPUs' worth of time that a container gets, by cgroups 2 or 1; None without a limit."""
    try:
        if (cgroups / "cpu.max").is_file():
            quota, period = (cgroups / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroups / "cpu" / f"cpu.cfs_{x}_us").read_text() for x in ("quota", "period"))
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else None
    except (OSError, ValueError):
        return None
