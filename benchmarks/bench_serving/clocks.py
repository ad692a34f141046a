"""Reads the GPU's clock during a measurement, because a GPU that idles between requests may lower it."""

from __future__ import annotations

import os
import statistics

import pynvml

from benchmarks.watch import Watch

PAUSE = 0.02


class Clocks(Watch):
    """Reads the SM clock of the first visible GPU inside its ``with`` block; without a GPU it does nothing."""

    def __init__(self) -> None:
        super().__init__(PAUSE)
        self._found: list[int] = []

    def take(self) -> list[int] | None:
        """Returns the least, the median and the largest MHz since the last call; None if the clock was not read."""
        found, self._found = self._found, []
        return [min(found), round(statistics.median(found)), max(found)] if found else None

    def _watch(self) -> None:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        try:
            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)
            super()._watch()
        except pynvml.NVMLError:  # no GPU, or one that does not report its clock
            return

    def look(self) -> None:
        self._found.append(pynvml.nvmlDeviceGetClockInfo(self._gpu, pynvml.NVML_CLOCK_SM))
