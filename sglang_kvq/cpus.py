"""Counts the CPUs that this process may use; without torch, because `kvq eval` runs without it."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cpus(cgroups: Path = CGROUPS) -> int:
    """Returns the number of CPUs that this process may run on, within a container's limit; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, int(_quota(cgroups) or cpus)))


def _quota(cgroups: Path) -> float | None:
    """Returns a container's limit in CPUs, from cgroups version 2 or 1; None without a limit."""
    try:
        if (cgroups / "cpu.max").is_file():
            quota, period = (cgroups / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroups / "cpu" / f"cpu.cfs_{x}_us").read_text() for x in ("quota", "period"))
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else None
    except (OSError, ValueError):
        return None
