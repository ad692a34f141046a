"""Embedding in a thread: questions before segments, so that a long history holds up no other session's answer."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from sglang_kvq.episodic.embed import Embedder

#: Segments that are embedded at once on a CPU, and elsewhere; a question waits for at most so many.
CPU_BATCH, BATCH = 8, 64
_QUESTION, _SEGMENTS, _END = range(3)


class EncodingThread:
    """One thread that embeds: sentence-transformers' tokenizers are not for two at once.

    Attributes:
        batch: segments that are embedded at once.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.batch = CPU_BATCH if embedder.device.startswith("cpu") else BATCH
        self._jobs: queue.PriorityQueue[tuple[int, int, list[str], Future[np.ndarray]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="kvq-embed", daemon=True)
        self._thread.start()

    def question(self, text: str) -> Future[np.ndarray]:
        """Float32 ``[1, D]``, of length 1; zeros for a text without words."""
        return self._put(_QUESTION, [text])

    def segments(self, texts: Sequence[str]) -> Future[np.ndarray]:
        """Float32 ``[texts, D]``, as ``question``; at most ``batch`` texts."""
        return self._put(_SEGMENTS, list(texts))

    def close(self) -> None:
        """End the thread once it has done what it was asked."""
        self._put(_END, [])
        self._thread.join()

    def _put(self, priority: int, texts: list[str]) -> Future[np.ndarray]:
        future: Future[np.ndarray] = Future()
        self._jobs.put((priority, next(self._numbers), texts, future))
        return future

    def _run(self) -> None:
        while True:
            priority, _, texts, future = self._jobs.get()
            if priority == _END:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(embed(self._embedder, texts))
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
