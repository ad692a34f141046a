"""Makes SIGTERM, which job schedulers and containers send, stop a command like Ctrl-C: it reports what it has kept."""

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
    """Raises ``Terminated`` in the block when SIGTERM arrives; has no effect outside the main thread."""
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
    """Returns the exit status that shells report for a command that was ended by the signal."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
