"""The GPU's clock while something is measured: a GPU that idles between requests may lower it."""

from __future__ import annotations

import os
import statistics
import threading

import pynvml

PAUSE = 0.02


class Clocks:
    """Reads the SM clock of the first visible GPU while its ``with`` block lasts; nothing without a GPU."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Clocks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> list[int] | None:
        """Returns the least, the median and the largest MHz since the last call; None if the clock was not read."""
        found, self._found = self._found, []
        return [min(found), round(statistics.median(found)), max(found)] if found else None

    def _watch(self) -> None:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        try:
            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)
            while not self._stop.wait(PAUSE):
                self._found.append(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))
        except pynvml.NVMLError:  # no GPU, or one that does not tell
            return
