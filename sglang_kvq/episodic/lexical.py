"""Lexical matching: which texts share a question's rare runs of letters (Okapi BM25, Robertson and Zaragoza 2009)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_kvq.errors import KVQuantError

#: Terms are runs of so many letters within a word: "painted" and "painting" share three of four.
LETTERS = 4
#: Terms are hashed to numbers below this.
TERMS = 1 << 20
#: Saturation of a term's repetitions, and discount of a long text's terms.
SATURATION, LENGTH = 1.2, 0.75


class Lexical:
    """An index of texts that grows at its end; a conversation of 100,000 tokens answers in milliseconds.

    Args:
        letters: of a term; 0 for whole words.

    Raises:
        KVQuantError: scikit-learn is missing, or ``letters`` is below 0.
    """

    def __init__(self, letters: int = LETTERS) -> None:
        if letters < 0:
            raise KVQuantError(f"terms of {letters} letters: give 1 or more, or 0 for whole words.")
        try:
            from sklearn.feature_extraction.text import HashingVectorizer
        except ImportError as error:
            raise KVQuantError(
                "matching a question's words needs scikit-learn: pip install 'sglang-kvq[episodes]'."
            ) from error
        self._hashing = HashingVectorizer(
            analyzer="char_wb" if letters else "word",
            ngram_range=(letters or 1, letters or 1),
            n_features=TERMS,
            alternate_sign=False,
            norm=None,
            dtype=np.float32,
        )
        # Row by row: terms, how often each occurs, where a text's terms begin, and how many it has.
        self._terms = np.empty(0, np.int32)
        self._counts = np.empty(0, np.float32)
        self._starts = np.zeros(1, np.int64)
        self._lengths = np.empty(0)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def add(self, texts: Sequence[str]) -> None:
        """Append texts."""
        if texts:
            terms, counts, starts = self._split(texts)
            self._starts = np.concatenate([self._starts, len(self._terms) + starts[1:]])
            self._terms, self._counts = np.concatenate([self._terms, terms]), np.concatenate([self._counts, counts])
            ends = np.concatenate([[0.0], counts.cumsum(dtype=np.float64)])[starts]
            self._lengths = np.concatenate([self._lengths, np.diff(ends)])

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` texts.

        Raises:
            KVQuantError: there are not so many.
        """
        if not 0 <= count <= len(self):
            raise KVQuantError(f"{count} of {len(self)} texts: give a number from 0 to {len(self)}.")
        self._starts = self._starts[: count + 1].copy()
        end = int(self._starts[-1])
        self._terms, self._counts = self._terms[:end].copy(), self._counts[:end].copy()
        self._lengths = self._lengths[:count].copy()

    def scores(self, question: str, run: int = 1) -> np.ndarray:
        """Scores each run of ``run`` consecutive texts, as one text.

        Returns:
            float64 ``[texts - run + 1]``, of fewer texts than ``run`` one number for all; 0 where nothing is shared.

        Raises:
            KVQuantError: ``run`` is below 1.
        """
        if run < 1:
            raise KVQuantError(f"runs of {run} texts: give 1 or more.")
        asked, _, _ = self._split([question])
        number = np.full(TERMS, -1, np.int16)
        number[asked] = np.arange(len(asked))
        at = np.flatnonzero(number[self._terms] >= 0)
        text = np.searchsorted(self._starts, at, side="right") - 1
        counts = np.zeros((len(self), len(asked)))
        counts[text, number[self._terms[at]]] = self._counts[at]
        counts, lengths = runs(counts, run), runs(self._lengths, run)
        if not counts.any():
            return np.zeros(len(counts))
        texts_with = np.count_nonzero(counts, axis=0)
        weights = np.log1p((len(counts) - texts_with + 0.5) / (texts_with + 0.5))
        norms = SATURATION * (1 - LENGTH + LENGTH * lengths / lengths.mean())
        return np.asarray((counts * (SATURATION + 1) / (counts + norms[:, None])) @ weights)

    def _split(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Different terms of each text, their counts, and where each text's begin."""
        rows = self._hashing.transform(list(texts))
        return rows.indices.astype(np.int32), rows.data, rows.indptr.astype(np.int64)


def runs(rows: np.ndarray, run: int) -> np.ndarray:
    """Sums of ``run`` consecutive rows of ``[n, ...]``: ``[n - run + 1, ...]``, of fewer than ``run`` all in one."""
    run = max(1, min(run, len(rows)))
    return np.asarray(sum(rows[at : len(rows) - run + 1 + at] for at in range(run)))
