"""Progress of a run on stderr: lines, and on a terminal a bar per method."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Display:
    """Shows progress, as a context manager; safe to call from many threads."""

    def __init__(self) -> None:
        self._lock, self._begin = threading.Lock(), time.monotonic()
        self._console = Console(stderr=True, highlight=False, emoji=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._rows: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        line = f"[{time.monotonic() - self._begin:5.0f} s] {text}"
        self._console.print(line, markup=False, soft_wrap=True)

    def status(self, method: str, text: str) -> None:
        """Shows the current activity of a method."""
        if self._bars.disable:
            self.say(f"{method}: {text}")
        with self._lock:
            if method not in self._rows:
                self._rows[method] = self._bars.add_task("", total=None)
            self._bars.update(self._rows[method], description=f"{method}: {text}", completed=0, total=None)

    def finish(self, method: str) -> None:
        with self._lock:
            if method in self._rows:
                self._bars.remove_task(self._rows.pop(method))

    def counter(self, method: str, task: str) -> Callable[[int, int], None]:
        """Returns a task's ``progress`` callback."""

        def tell(done: int, total: int) -> None:
            with self._lock:
                if method in self._rows:
                    self._bars.update(self._rows[method], description=f"{method}: {task}", completed=done, total=total)

        return tell
