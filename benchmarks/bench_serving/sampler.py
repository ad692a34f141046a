"""Reads gauges from a server's ``/metrics`` twice a second while a workload runs."""

from __future__ import annotations

import re
from collections import defaultdict

from benchmarks.watch import Watch
from sglang_kvq.server_process import OPENER

#: Gauges by their names in a row. Their values are summed over a server's workers.
GAUGES = {
    "running": "sglang:num_running_reqs",
    "queued": "sglang:num_queue_reqs",
    "lost_window_pages": "sglang_kvq_lost_window_pages",
    "held_back": "sglang_kvq_held_back_requests",
}
ERRORS = "sglang_kvq_errors_total"
PAUSE = 0.5
_LINE = re.compile(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def parse(text: str) -> dict[str, float]:
    """Returns the values of a page of Prometheus metrics by name, summed over their labels."""
    found: dict[str, float] = defaultdict(float)
    for name, value in _LINE.findall(text):
        found[name] += float(value)
    return dict(found)


class Sampler(Watch):
    """Reads the gauges of a server inside its ``with`` block.

    Attributes:
        most: the largest value of each gauge that the server has.
        errors: errors that the cache counted since the server started.
    """

    def __init__(self, url: str) -> None:
        super().__init__(PAUSE)
        self.url = url
        self.most: dict[str, float] = {}
        self.errors = 0.0
        self.samples = 0

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.look()

    def look(self) -> None:
        try:
            with OPENER.open(f"{self.url}/metrics", timeout=10) as response:
                found = parse(response.read().decode())
        except OSError:  # a busy server may answer the next time; a row without any sample is refused
            return
        self.samples += 1
        self.errors = found.get(ERRORS, 0.0)
        for name, gauge in GAUGES.items():
            if gauge in found:
                self.most[name] = max(self.most.get(name, 0.0), found[gauge])
