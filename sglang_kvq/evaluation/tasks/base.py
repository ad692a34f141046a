"""Interfaces of tasks: a task, its outcome, and the bench it runs on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.material import Material

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome:
    """The measurement of one task on one server.

    Attributes:
        value, se: the task's main value and its standard error (None from a single sample).
        n: number of independent samples: contexts, problems.
        row: columns of the accuracy table.
        details: further plain values that a reader may want, per length or item.
        warnings: reasons to trust the value less.
    """

    value: float | None
    se: float | None
    n: int
    row: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass
class Bench:
    """Resources that a run gives to its tasks.

    Attributes:
        material: texts, contexts and reference distributions, shared by all methods of an output folder.
        concurrency: number of simultaneous requests per server.
        progress: called with the number of a task's finished items, and the number of all its items.
    """

    material: Material
    concurrency: int = 32
    progress: Callable[[int, int], None] = lambda done, total: None

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Applies ``function`` to items, many at once; returns results in their order. Stops at the first error."""
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
    """A measurement: a frozen dataclass of its settings, in a file of its own."""

    @property
    def name(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """Returns the settings that determine the value, in the form of ``settings_of``."""

    def run(self, client: Client, bench: Bench) -> Outcome:
        """Measures on a running server.

        Raises:
            KVQuantError: the server cannot run the task; the message says what would help.
        """


@runtime_checkable
class ReferenceTask(Task, Protocol):
    """A task that compares with BF16, which must be measured first.

    Attributes:
        largest_chunk: the largest ``--chunked-prefill-size`` at which the task's values show the effect of the cache.
    """

    largest_chunk: ClassVar[int]

    def record_reference(self, client: Client, bench: Bench) -> None:
        """Measures a server without ``--kv-quant``; stores the data that ``run`` compares other servers with."""


def settings_of(task: Any, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a task's fields, without its name, as plain JSON values; a file becomes its name and hash, not a path."""
    names = [field.name for field in fields(task) if field.name not in ("name", *leave_out)]
    return {name: _plain(getattr(task, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if is_dataclass(value):
        return settings_of(value)
    return file_identity(value) if isinstance(value, Path) else value


def file_identity(path: Path) -> dict[str, str]:
    """Returns a file's name and the hash of its content.

    Raises:
        KVQuantError: the file cannot be read.
    """
    try:
        return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except OSError as error:
        raise KVQuantError(f"{path}: cannot be read ({error.strerror}).") from error


def text_tokens(path: Path, skip: float, client: Client, bench: Bench) -> np.ndarray:
    """Returns the tokens of a text file without its first ``skip`` (a share of its characters), int32 ``[n]``."""
    return bench.material.tokens({**file_identity(path), "skip": skip}, lambda: _read_text(path, skip), client)


def _read_text(path: Path, skip: float) -> str:
    """Reads a text file from the start of the first line after ``skip``.

    Raises:
        KVQuantError: the file is not readable, or not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KVQuantError(f"{path}: not readable as UTF-8 text ({error}).") from error
    text = text[int(len(text) * skip) :]
    return text[text.find("\n") + 1 :] if skip else text


def short(length: int) -> str:
    """Formats 16384 as 16k, and 1500 as 1500."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def listed(values: Sequence[float]) -> str:
    """Formats numbers as the user gives them to an option."""
    return ",".join(map(str, values))


def fitting(flag: str, lengths: Sequence[int], client: Client) -> list[int]:
    """Returns those of ``lengths``, in tokens, that the server can take in one request.

    Raises:
        KVQuantError: the server can take none of them.
    """
    found = [length for length in lengths if length <= client.facts.room]
    if not found:
        raise KVQuantError(
            f"{flag} {listed(lengths)}: no length fits in the {client.facts.room} tokens that the server "
            "takes. Give a shorter one."
        )
    return found
