"""Divides a server's decode step by kernel: sums the kernels of a torch profiler's trace by name."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections import defaultdict
from pathlib import Path

DEVICE_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
MOST_NAMES = 20


def read_trace(folder: Path, wait: float = 0) -> list[dict]:
    """Returns device events of the folder's one trace, by begin; waits up to ``wait`` seconds for it.

    Raises:
        FileNotFoundError: there is no trace, or none with device events.
    """
    deadline = time.monotonic() + wait
    while not (events := _events(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not events:
        raise FileNotFoundError(f"{folder}: no trace with events of a GPU")
    return sorted(events, key=lambda e: e["ts"])


def _events(folder: Path) -> list[dict]:
    """Returns device events of a complete trace; none while it is being written."""
    for path in folder.glob("**/*.trace.json.gz"):
        try:
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        except (EOFError, ValueError):
            continue
        return [e for e in events if e.get("cat") in DEVICE_EVENTS]
    return []


def per_step(events: list[dict], steps: int, layers: int) -> dict:
    """Returns us per step: ``busy`` (a kernel runs), ``idle`` (none), ``kernels`` by name: [us, launches].

    About ``steps`` steps were requested; the kernels that every layer launches once give the actual number.
    """
    launches, spent = defaultdict(int), defaultdict(float)
    busy, covered = 0.0, events[0]["ts"]
    for event in events:
        name = short(event["name"])
        launches[name] += 1
        spent[name] += event["dur"]
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(covered, event["ts"]))
        covered = max(covered, end)
    once = min((n for n in launches.values() if n >= 0.7 * steps * layers), default=steps * layers)
    found = once / layers
    names = sorted(spent, key=spent.get, reverse=True)
    kernels = {name: [round(spent[name] / found, 1), round(launches[name] / found, 2)] for name in names[:MOST_NAMES]}
    idle = covered - events[0]["ts"] - busy
    return {"busy": round(busy / found, 1), "idle": round(idle / found, 1), "kernels": kernels}


def short(name: str) -> str:
    """Returns a kernel's name without its arguments, templates and namespaces."""
    while (bare := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = bare
    return re.sub(r"[<(].*", "", name.removeprefix("void ")).split("::")[-1].strip()[:60]
