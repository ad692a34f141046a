"""A thread that repeats an observation while something else is measured."""

from __future__ import annotations

import threading
from typing import TypeVar

_Watch = TypeVar("_Watch", bound="Watch")


class Watch:
    """Calls ``look`` repeatedly inside its ``with`` block.

    Args:
        pause: seconds before each call.
    """

    def __init__(self, pause: float) -> None:
        self._pause, self._stop = pause, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self: _Watch) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        raise NotImplementedError

    def _watch(self) -> None:
        while not self._stop.wait(self._pause):
            self.look()
