"""What a task is, what it returns, and what it works with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.material import Material

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome:
    """What one task measured on one server.

    Attributes:
        value, se: the task's headline and its standard error (None from a single sample).
        n: independent samples: contexts, problems.
        row: columns of the accuracy table.
        details: whatever else a reader may want, per length or item; plain values.
        warnings: what makes the value less than it seems.
    """

    value: float | None
    se: float | None
    n: int
    row: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """What a run lends its tasks.

    Attributes:
        material: texts, contexts and reference distributions, shared by all methods of an output folder.
        concurrency: requests at once per server.
        progress: told how many of a task's items are done, and of how many.
    """

    material: Material
    concurrency: int = 32
    progress: Callable[[int, int], None] = lambda done, total: None

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """``function`` of every item, many at once, in order. The first error ends it."""
        items = list(items)
        with ThreadPoolExecutor(max(1, min(self.concurrency, len(items)))) as pool:
            futures = [pool.submit(function, item) for item in items]
            done: set[Future[Result]] = set()
            self.progress(0, len(items))
            while len(done) < len(items):
                wait(set(futures) - done, timeout=1.0, return_when=FIRST_EXCEPTION)
                done = {future for future in futures if future.done()}
                self.progress(len(done), len(items))
                if errors := [error for future in done if (error := future.exception())]:
                    for future in futures:
                        future.cancel()
                    raise errors[0]
        return [future.result() for future in futures]


class Task(Protocol):
    """One measurement. A frozen dataclass of its settings, in a file of its own."""

    @property
    def name(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """The settings that decide the value, as plain JSON values: files by name and hash, no paths."""

    def run(self, client: Client, bench: Bench) -> Outcome:
        """Measure.

        Raises:
            KVQuantError: the server cannot do it; the message says what would help.
        """


@runtime_checkable
class ReferenceTask(Task, Protocol):
    """A task that compares with BF16, which must be measured first.

    Attributes:
        largest_chunk: the largest ``--chunked-prefill-size`` in which it sees the cache.
    """

    largest_chunk: ClassVar[int]

    def record_reference(self, client: Client, bench: Bench) -> None:
        """Store what ``run`` on other servers compares with, of a server without ``--kv-quant``."""


def file_identity(path: Path) -> dict[str, str]:
    """A file's name and the hash of its content.

    Raises:
        KVQuantError: it cannot be read.
    """
    try:
        return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except OSError as error:
        raise KVQuantError(f"{path}: cannot be read ({error.strerror}).") from error


def read_text(path: Path, skip: float) -> str:
    """A text file without the first ``skip`` of its characters, from a line's start.

    Raises:
        KVQuantError: not readable, or not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KVQuantError(f"{path}: not readable as UTF-8 text ({error}).") from error
    text = text[int(len(text) * skip) :]
    return text[text.find("\n") + 1 :] if skip else text
