"""SIGTERM, which job schedulers and containers send, stops a command as Ctrl-C does: it says what is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raises ``Terminated`` in the block when SIGTERM comes; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_status(error: KeyboardInterrupt) -> int:
    """The status that shells give to a command which the signal ends."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
