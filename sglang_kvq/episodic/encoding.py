"""A thread for what takes long: questions before segments, so that a long history holds up no other answer."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from sglang_kvq.episodic.embed import Embedder
from sglang_kvq.episodic.page_index import NewPages

#: Segments that are embedded at once on a CPU, and elsewhere; a question waits for at most so many.
CPU_BATCH, BATCH = 8, 64
_QUESTION, _SEGMENTS, _END = range(3)
T = TypeVar("T")
_Job: TypeAlias = Callable[[], Any]


class EncodingThread:
    """One thread that embeds and searches.

    sentence-transformers' tokenizers are not for two at once, and one thread leaves the event loop its share of the
    interpreter.

    Attributes:
        batch: segments that are embedded at once.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.batch = CPU_BATCH if embedder.device.startswith("cpu") else BATCH
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job, Future[Any]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="kvq-embed", daemon=True)
        self._thread.start()

    def question(self, text: str) -> Future[np.ndarray]:
        """Float32 ``[1, D]``, of length 1; zeros for a text without words."""
        return self._put(_QUESTION, partial(embed, self._embedder, [text]))

    def segments(self, texts: Sequence[str]) -> Future[np.ndarray]:
        """Float32 ``[texts, D]``, as ``question``; at most ``batch`` texts."""
        return self._put(_SEGMENTS, partial(embed, self._embedder, list(texts)))

    def pages(self, texts: Sequence[str]) -> Future[NewPages]:
        """Embeddings and letters of pages' texts; at most ``batch`` texts."""
        texts = list(texts)
        return self._put(_SEGMENTS, lambda: NewPages.made(embed(self._embedder, texts), texts))

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Returns the result of ``function``, run with a question's priority."""
        return self._put(_QUESTION, function)

    def close(self) -> None:
        """End the thread once it has done what it was asked."""
        self._put(_END, lambda: None)
        self._thread.join()

    def _put(self, priority: int, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((priority, next(self._numbers), job, future))
        return future

    def _run(self) -> None:
        while True:
            priority, _, job, future = self._jobs.get()
            if priority == _END:
                return
            if future.set_running_or_notify_cancel():
                _settle(future, job)
            del job, future  # what they hold must not wait for the next job


def _settle(future: Future[Any], job: _Job) -> None:
    try:
        future.set_result(job())
    except Exception as error:  # of the one who asked
        future.set_exception(error)


def embed(embedder: Embedder, texts: Sequence[str]) -> np.ndarray:
    """Float32 ``[texts, D]``: as ``Embedder.encode``, but zeros, near nothing, for texts without words.

    Of tokens some make no text, such as a page of a template's marks.
    """
    has_words = [bool(text.strip()) for text in texts]
    # One more text says how long a row is where no other does.
    known = embedder.encode([text for text, words in zip(texts, has_words) if words] or ["-"])
    rows = np.zeros((len(texts), known.shape[1]), np.float32)
    if any(has_words):
        rows[np.array(has_words)] = known
    return rows
