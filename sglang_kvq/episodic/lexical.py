"""Lexical matching: which texts share a question's rare letters (Okapi BM25, Robertson and Zaragoza 2009)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_kvq.errors import KVQuantError

#: Terms are runs of so many letters within a word: "painted" and "painting" share three of four.
LETTERS = 4
#: Terms are hashed to numbers below this.
TERMS = 1 << 20
#: How soon a term's repetitions stop to count, and how much a long text's terms count less.
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
        # Row by row: terms, how often each occurs, and where a text's terms begin.
        self._terms = np.empty(0, np.int32)
        self._counts = np.empty(0, np.float32)
        self._starts = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def add(self, texts: Sequence[str]) -> None:
        """Append texts."""
        if texts:
            terms, counts, starts = self._split(texts)
            self._starts = np.concatenate([self._starts, len(self._terms) + starts[1:]])
            self._terms, self._counts = np.concatenate([self._terms, terms]), np.concatenate([self._counts, counts])

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

    def scores(self, question: str) -> np.ndarray:
        """How well each text matches, float64 ``[texts]``; 0 where nothing is shared."""
        found = np.zeros(len(self))
        asked, _, _ = self._split([question])
        if not len(asked) or not len(self._terms):
            return found
        number = np.zeros(TERMS, np.int16)
        number[asked] = np.arange(1, len(asked) + 1)
        at = np.flatnonzero(number[self._terms])
        term, count = number[self._terms[at]] - 1, self._counts[at].astype(np.float64)
        text = np.searchsorted(self._starts, at, side="right") - 1
        lengths = np.add.reduceat(np.append(self._counts, 0), self._starts[:-1], dtype=np.float64)
        lengths[np.diff(self._starts) == 0] = 0  # reduceat gives an empty text its successor's first count
        texts_with = np.bincount(term, minlength=len(asked))
        weight = np.log1p((len(self) - texts_with + 0.5) / (texts_with + 0.5))
        norm = SATURATION * (1 - LENGTH + LENGTH * lengths / lengths.mean())
        np.add.at(found, text, weight[term] * count * (SATURATION + 1) / (count + norm[text]))
        return found

    def _split(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Different terms of each text, their counts, and where each text's begin."""
        rows = self._hashing.transform(list(texts))
        return rows.indices.astype(np.int32), rows.data, rows.indptr.astype(np.int64)
