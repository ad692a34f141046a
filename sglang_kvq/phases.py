"""Shows the phases of a long command on stderr, as bars on a terminal and lines elsewhere, and measures their times."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Seconds between two lines of a phase, if there are no bars.
EVERY = 10.0


@dataclass
class _Phase:
    """A phase: its steps, and the wall-clock time and CPU time that it took.

    While the phase runs, both times hold their values at its beginning.
    """

    name: str
    done: int
    total: int
    seconds: float
    cpu_seconds: float


class Phases:
    """A ``Progress`` of ``rotations.calibration.run``: call it with a phase's name, the steps done, and all steps.

    A phase ends with its last step, or when the next phase begins. A phase of a single step shows only its time. If
    stderr is not a terminal, a line is printed when a phase begins, every ``EVERY`` seconds, and when it ends.
    """

    def __init__(self, console: Console, *, timings: bool = False) -> None:
        self._console, self._timings = console, timings
        self._phases: list[_Phase] = []
        self._open = False  # True while the last phase runs
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Phases:
        if self._console.is_terminal:
            self._bars = _bars(self._console)
            self._bars.start()
        else:
            threading.Thread(target=self._remind, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._lock:
            self._end(said=kind is None)
        self._stop.set()
        if self._bars:
            self._bars.stop()
        if self._timings:
            self._show_timings()

    def __call__(self, name: str, done: int, total: int) -> None:
        with self._lock:
            if not self._open or self._phases[-1].name != name:
                if self._phases and self._phases[-1].name == name:
                    return  # this phase has already ended
                self._end()
                self._begin(name, total)
            self._phases[-1].done = done
            if self._bars:
                self._bars.update(self._tasks[name], completed=done)
            if done >= total:
                self._end()

    def _begin(self, name: str, total: int) -> None:
        self._phases.append(_Phase(name, 0, total, time.monotonic(), time.process_time()))
        self._open = True
        if self._bars:
            self._tasks[name] = self._bars.add_task(name, total=None if total == 1 else total)
        else:
            self._say(f"{name}{f': 0 of {total}' if total > 1 else ''}")

    def _end(self, said: bool = True) -> None:
        if not self._open:
            return
        self._open, last = False, self._phases[-1]
        last.seconds = time.monotonic() - last.seconds
        last.cpu_seconds = time.process_time() - last.cpu_seconds
        if self._bars:
            self._bars.update(self._tasks[last.name], total=last.total, completed=last.total if said else last.done)
            self._bars.stop_task(self._tasks[last.name])
        elif said:
            steps = f"{last.total} of {last.total} in " if last.total > 1 else ""
            self._say(f"{last.name}: {steps}{last.seconds:.1f} s")

    def _remind(self) -> None:
        """Prints a line about the running phase every ``EVERY`` seconds.

        Runs in a thread, because some phases report no steps.
        """
        while not self._stop.wait(EVERY):
            with self._lock:
                if self._open:
                    last = self._phases[-1]
                    steps = f"{last.done} of {last.total} after " if last.total > 1 else ""
                    self._say(f"{last.name}: {steps}{time.monotonic() - last.seconds:.0f} s")

    def timings(self) -> dict[str, tuple[float, float]]:
        """Returns the seconds and CPU seconds of each phase that has ended, and of this process so far ("in all")."""
        ended = self._phases[:-1] if self._open else self._phases
        found = {phase.name: (phase.seconds, phase.cpu_seconds) for phase in ended}
        return {**found, "in all": (_age(), time.process_time())}

    def _show_timings(self) -> None:
        for name, (seconds, cpu_seconds) in self.timings().items():
            self._say(f"{name:<24}{seconds:8.1f} s{cpu_seconds:10.1f} CPU s")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _bars(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # A context may take minutes, so the remaining time is estimated from a whole pass.
    return Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=36000)


def _age() -> float:
    """Returns the seconds since this process began."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
