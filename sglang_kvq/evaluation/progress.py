"""Progress of a run: a bar per method with rich, or plain lines without rich or a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError:
    Console = None  # type: ignore[assignment, misc]


class Display:
    """Shows progress, as a context manager; safe to call from many threads."""

    def __init__(self) -> None:
        self._lock, self._begin = threading.Lock(), time.monotonic()
        self._bars: Any = None
        self._rows: dict[str, Any] = {}
        self._told: dict[str, int] = {}

    def __enter__(self) -> Display:
        if Console is not None and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=Console(stderr=True, highlight=False, emoji=False))
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        with self._lock:
            line = f"[{time.monotonic() - self._begin:5.0f} s] {text}"
            if self._bars:
                self._bars.console.print(line, markup=False, soft_wrap=True)
            else:
                print(line, file=sys.stderr, flush=True)

    def status(self, method: str, text: str) -> None:
        """Shows the current activity of a method."""
        if not self._bars:
            self.say(f"{method}: {text}")
            return
        with self._lock:
            if method not in self._rows:
                self._rows[method] = self._bars.add_task("", total=None)
            self._bars.update(self._rows[method], description=f"{method}: {text}", completed=0, total=None)

    def finish(self, method: str) -> None:
        with self._lock:
            if self._bars and method in self._rows:
                self._bars.remove_task(self._rows.pop(method))

    def counter(self, method: str, task: str) -> Callable[[int, int], None]:
        """Returns a task's ``progress`` callback."""

        def tell(done: int, total: int) -> None:
            with self._lock:
                if self._bars and method in self._rows:
                    name = f"{method}: {task}"
                    self._bars.update(self._rows[method], description=name, completed=done, total=total)

        return tell
