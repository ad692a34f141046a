"""Keeps embeddings in a file, so that runs over the same texts compute them once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.research.episodes.case import Embeds

#: Texts that are embedded between two writes of the file.
AT_ONCE = 512


class CachedEmbedder:
    """An ``Embeds`` that caches another one, which is created when the first new text comes.

    Args:
        make: returns the embedder; one file always needs the same model.
        file: an .npz, made if missing; None keeps embeddings in memory only.
    """

    def __init__(self, make: Callable[[], Embeds], file: Path | None = None) -> None:
        self._make, self._file = make, file
        self._embedder: Embeds | None = None
        self._rows: dict[str, np.ndarray] = {}
        if file is not None and file.exists():
            with np.load(file) as stored:
                self._rows = dict(zip(stored["names"].tolist(), stored["rows"]))

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Returns float32 ``[texts, D]``, rows of length 1."""
        names = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts]
        # Equal texts are embedded once; texts are sorted by length, so that batches have little padding.
        new = sorted({n: t for n, t in zip(names, texts) if n not in self._rows}.items(), key=lambda one: len(one[1]))
        for at in range(0, len(new), AT_ONCE):
            some = new[at : at + AT_ONCE]
            if self._embedder is None:
                self._embedder = self._make()
            self._rows.update(zip((name for name, _ in some), self._embedder.encode([text for _, text in some])))
            self._write()
        return np.stack([self._rows[name] for name in names])

    def _write(self) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_suffix(".part.npz")
            np.savez(part, names=np.array(list(self._rows)), rows=np.stack(list(self._rows.values())))
            part.replace(self._file)
