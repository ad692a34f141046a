"""Prints steps with their elapsed time, on a terminal or in a log.

Uses only the standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class StepFailed(RuntimeError):
    """A step's command failed; the message has the end of its output."""


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Prints the title, a running clock if there is a terminal, and the result."""
    begin = time.monotonic()
    done = threading.Event()
    live = sys.stdout.isatty()

    def line(mark: str) -> str:
        return f"{mark} {title} ({time.monotonic() - begin:.1f} s)"

    def tick() -> None:
        while not done.wait(0.5):
            print(f"\r{line('…')}", end="", flush=True)

    clock = threading.Thread(target=tick, daemon=True)
    if live:
        clock.start()
    else:
        print(f"… {title}", flush=True)
    mark = "✗"
    try:
        yield
        mark = "✓"
    finally:
        done.set()
        if live:
            clock.join()
            print("\r\x1b[K", end="")
        print(line(mark), flush=True)


def call(command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
    """Runs a command and appends its output to ``log``.

    Raises:
        StepFailed: it exited non-zero.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        start = out.tell()
        code = subprocess.run(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env
        ).returncode
    if code:
        tail = log.read_bytes()[start:].decode(errors="replace").splitlines()[-30:]
        raise StepFailed(f"`{' '.join(map(str, command[:6]))} …` exited with {code}:\n" + "\n".join(tail))
