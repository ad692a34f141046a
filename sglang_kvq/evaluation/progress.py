"""Shows progress of a run on stderr: a bar per method on a terminal, elsewhere a line every ``EVERY`` seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

#: Seconds between two lines about a method's activity, if there are no bars.
EVERY = 30.0


class Display:
    """Shows progress, as a context manager; safe to call from many threads."""

    def __init__(self) -> None:
        self._lock, self._begin = threading.Lock(), time.monotonic()
        self._console = Console(stderr=True, highlight=False, emoji=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._rows: dict[str, TaskID] = {}
        self._ended = threading.Event()
        self._reminder = threading.Thread(target=self._remind, daemon=True)

    def __enter__(self) -> Display:
        self._bars.start()
        if self._bars.disable:
            self._reminder.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._bars.disable:
            self._reminder.join()
        self._bars.stop()

    def _remind(self) -> None:
        while not self._ended.wait(EVERY):
            with self._lock:  # also while it prints, so that no line follows the end of its method
                for row in self._bars.tasks:
                    self.say(row.description + (f": {row.completed:g} of {row.total:g}" if row.total else ""))

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        line = f"[{time.monotonic() - self._begin:5.0f} s] {text}"
        self._console.print(line, markup=False, soft_wrap=True)

    def status(self, method: str, text: str) -> None:
        """Shows the current activity of a method."""
        if self._bars.disable:
            self.say(f"{method}: {text}")
        with self._lock:
            if method in self._rows:  # a bar keeps its total
                self._bars.remove_task(self._rows[method])
            self._rows[method] = self._bars.add_task(f"{method}: {text}", total=None)

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
