"""Makes signals stop a command: SIGTERM, which schedulers and containers send, and Ctrl-C in code that hides it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
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


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises ``KeyboardInterrupt`` after the block if Ctrl-C arrived in it, whatever the block made of the exception.

    Imports hide it: libraries have bare excepts, and Python 3.11 turns any error of a ``__set_name__``, which every
    Enum calls, into a RuntimeError. It has no effect outside the main thread, and where SIGINT is ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    arrived = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived:
            raise KeyboardInterrupt


def exit_status(error: KeyboardInterrupt) -> int:
    """Returns the exit status that shells report for a command that was ended by the signal."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
