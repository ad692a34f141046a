"""Search index of a conversation's pages: their embeddings, and the runs of letters in their texts (Okapi BM25).

BM25 (Robertson and Zaragoza, 2009) gives high scores to texts that share a question's rare terms. Items are stored in
blocks that never change, so copies of an index share blocks, and a branch needs memory only for its new items.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from sglang_kvq.errors import KVQuantError

#: Items per block; all blocks but the last are full.
SIZE = 64
#: Terms are runs of so many letters within a word: "painted" and "painting" share three of four.
LETTERS = 4
#: Bits of the number to which a term is hashed; the other bits of 32 hold the number of times it occurs in a text.
TERM_BITS = 20
COUNT_BITS = 32 - TERM_BITS
#: Largest count of a term in a text. Higher counts are reduced to it, which changes little because counts saturate.
MOST = (1 << COUNT_BITS) - 1
#: BM25's parameters k1 (how soon repetitions of a term saturate) and b (how much long texts are discounted).
SATURATION, LENGTH = 1.2, 0.75
#: Numbers in a table that is searched at once: 1 MB, so that other threads wait for at most a millisecond.
TABLE = 1 << 17


class Block(Protocol):
    """Consecutive items in arrays."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Sliceable(Block, Protocol):
    """A block that can be cut and joined.

    ``part`` returns a copy of items ``first`` to ``last`` (excluded), ``joined`` a copy with ``other`` appended.
    """

    def part(self: T, first: int, last: int) -> T: ...

    def joined(self: T, other: T) -> T: ...


T = TypeVar("T", bound=Sliceable)


class Blocks(Generic[T]):
    """A list of items in blocks. Appending copies at most one block, and copies of the list share the items' memory."""

    def __init__(self, blocks: Iterable[T] = ()) -> None:
        self.blocks = list(blocks)

    def __len__(self) -> int:
        return (len(self.blocks) - 1) * SIZE + len(self.blocks[-1]) if self.blocks else 0

    def add(self, items: T) -> None:
        """Appends items."""
        if not len(items):
            return
        if len(self) % SIZE:
            items = self.blocks.pop().joined(items)
        self.blocks += [items.part(at, min(at + SIZE, len(items))) for at in range(0, len(items), SIZE)]

    def first(self, count: int) -> Blocks[T]:
        """Returns a list of the first ``count`` items; it shares all blocks, except one that has to be cut."""
        if count >= len(self):
            return Blocks(self.blocks)
        whole, rest = divmod(count, SIZE)
        return Blocks(self.blocks[:whole] + ([self.blocks[whole].part(0, rest)] if rest else []))


@dataclass(frozen=True, eq=False)
class Terms:
    """Terms of consecutive texts.

    Attributes:
        packed: uint32 ``[n]``, text after text: a term's number in the upper ``TERM_BITS`` bits, its count in the lower
            ``COUNT_BITS``.
        ends: int32 ``[texts]``, the end of each text's terms in ``packed``.
        lengths: int32 ``[texts]``, number of terms of each text, repetitions included.
    """

    packed: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.ends.nbytes + self.lengths.nbytes

    def part(self, first: int, last: int) -> Terms:
        """Returns a copy of texts ``first`` to ``last`` (excluded)."""
        start, end = (int(self.ends[at - 1]) if at else 0 for at in (first, last))
        return Terms(
            self.packed[start:end].copy(), self.ends[first:last] - np.int32(start), self.lengths[first:last].copy()
        )

    def joined(self, other: Terms) -> Terms:
        """Returns a copy with ``other``'s texts appended."""
        return Terms(
            np.concatenate([self.packed, other.packed]),
            np.concatenate([self.ends, other.ends + np.int32(len(self.packed))]),
            np.concatenate([self.lengths, other.lengths]),
        )

    def found(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Finds the asked terms, text by text.

        Args:
            number: int32 ``[1 << TERM_BITS]``, a number for each asked term, -1 for all others.

        Returns:
            For each occurrence: the text, the term's number, and its count in the text.
        """
        numbers = number[self.packed >> COUNT_BITS]
        at = np.flatnonzero(numbers >= 0)
        return np.searchsorted(self.ends, at, side="right"), numbers[at], self.packed[at] & MOST


class Lexical:
    """A BM25 index of texts, to which texts can be appended; searching 100,000 tokens takes milliseconds.

    Args:
        letters: number of letters of a term; 0 for whole words.

    Raises:
        KVQuantError: scikit-learn is missing, or ``letters`` is below 0.
    """

    def __init__(self, letters: int = LETTERS) -> None:
        if letters < 0:
            raise KVQuantError(f"terms of {letters} letters: must be at least 1, or 0 for whole words.")
        _hashing(letters)  # raises now if scikit-learn is missing
        self.letters = letters
        self.texts: Blocks[Terms] = Blocks()

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, texts: Sequence[str]) -> None:
        """Appends texts; takes time linear in their length."""
        if texts:
            self.texts.add(split(texts, self.letters))

    def first(self, count: int) -> Lexical:
        """Returns an index of the first ``count`` texts; it shares their memory and grows independently."""
        made = Lexical(self.letters)
        made.texts = self.texts.first(count)
        return made

    def scores(self, question: str, run: int = 1) -> np.ndarray:
        """Scores each run of ``run`` consecutive texts as if it were one text.

        Returns:
            float64 ``[texts - run + 1]``; one number for all texts if there are fewer than ``run``. 0 for runs that
            share no term with the question.

        Raises:
            KVQuantError: ``run`` is below 1.
        """
        if run < 1:
            raise KVQuantError(f"runs of {run} texts: must be at least 1.")
        lengths = runs(_concatenate([block.lengths for block in self.texts.blocks], np.int32).astype(float), run)
        asked = split([question], self.letters).packed >> COUNT_BITS
        at, term, count = self._occurrences(asked, run)
        if not len(at):
            return np.zeros(len(lengths))
        runs_with = np.bincount(term, minlength=len(asked))
        weights = np.log1p((len(lengths) - runs_with + 0.5) / (runs_with + 0.5))
        norms = SATURATION * (1 - LENGTH + LENGTH * lengths / lengths.mean())
        parts = weights[term] * count * (SATURATION + 1) / (count + norms[at])
        return np.bincount(at, weights=parts, minlength=len(lengths))

    def _occurrences(self, asked: np.ndarray, run: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the asked terms in each run, ordered by run: three arrays ``[n]`` of runs, terms and counts."""
        number = np.full(1 << TERM_BITS, -1, np.int32)
        number[asked] = np.arange(len(asked))
        found, first = [], 0
        for block in self.texts.blocks:
            text, term, count = block.found(number)
            found.append((text + first, term, count))
            first += len(block)
        text, term, count = (_concatenate([one[n] for one in found], np.int64) for n in range(3))
        run = min(run, len(self))
        step = max(1, TABLE // max(1, len(asked)))
        parts = []
        for first in range(0, len(self) - run + 1, step):
            last = min(first + step + run - 1, len(self))
            a, b = np.searchsorted(text, [first, last])
            table = np.zeros((last - first, len(asked)))
            table[text[a:b] - first, term[a:b]] = count[a:b]
            table = runs(table, run)
            at, of = np.nonzero(table)
            parts.append((at + first, of, table[at, of]))
        at, of, times = (_concatenate([one[n] for one in parts], np.int64) for n in range(3))
        return at, of, times


def split(texts: Sequence[str], letters: int = LETTERS) -> Terms:
    """Returns the terms of each text; see ``Lexical``.

    Raises:
        KVQuantError: scikit-learn is missing.
    """
    rows = _hashing(letters).transform(list(texts))
    counts = np.minimum(rows.data, MOST).astype(np.uint32)
    packed = (rows.indices.astype(np.uint32) << COUNT_BITS) | counts
    lengths = np.asarray(rows.sum(1)).reshape(-1).astype(np.int32)
    return Terms(packed, rows.indptr[1:].astype(np.int32), lengths)


@functools.cache
def _hashing(letters: int) -> Any:
    """Returns a scikit-learn vectorizer. It has no state, so one for each number of letters is enough."""
    try:
        from sklearn.feature_extraction.text import HashingVectorizer
    except ImportError as error:
        raise KVQuantError(
            "matching a question's words needs scikit-learn: pip install 'sglang-kvq[episodes]'."
        ) from error
    return HashingVectorizer(
        analyzer="char_wb" if letters else "word",
        ngram_range=(letters or 1, letters or 1),
        n_features=1 << TERM_BITS,
        alternate_sign=False,
        norm=None,
        dtype=np.float32,
    )


def _concatenate(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Concatenates arrays; returns an empty array of ``dtype`` if there are none."""
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def runs(rows: np.ndarray, run: int) -> np.ndarray:
    """Returns the sums of ``run`` consecutive rows of ``[n, ...]``: ``[n - run + 1, ...]``.

    If there are fewer than ``run`` rows, the result is one sum of all rows.
    """
    run = max(1, min(run, len(rows)))
    return np.asarray(sum(rows[at : len(rows) - run + 1 + at] for at in range(run)))


@dataclass(frozen=True, eq=False)
class Rows:
    """A block of embeddings, float16 ``[n, D]``. Rounding errors are far below the differences between pages."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def part(self, first: int, last: int) -> Rows:
        """Returns a copy of rows ``first`` to ``last`` (excluded)."""
        return Rows(self.values[first:last].copy())

    def joined(self, other: Rows) -> Rows:
        """Returns a copy with ``other``'s rows appended."""
        return Rows(np.concatenate([self.values, other.values]))


@dataclass(frozen=True, eq=False)
class NewPages:
    """Embeddings and terms of pages that are about to be added to an index."""

    rows: Rows
    terms: Terms

    @classmethod
    def made(cls, rows: np.ndarray, texts: Sequence[str]) -> NewPages:
        """Makes pages of embeddings, float ``[n, D]``, and as many texts."""
        return cls(Rows(rows.astype(np.float16)), split(texts))


class PageIndex:
    """Index of pages by embeddings and by letters; pages can be appended."""

    def __init__(self) -> None:
        self._rows: Blocks[Rows] = Blocks()
        self.letters = Lexical()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, pages: NewPages) -> None:
        """Appends pages."""
        self._rows.add(pages.rows)
        self.letters.texts.add(pages.terms)

    def first(self, count: int) -> PageIndex:
        """Returns an index of the first ``count`` pages; it shares this index's memory and grows independently."""
        made = PageIndex()
        made._rows, made.letters = self._rows.first(count), self.letters.first(count)
        return made

    def rows(self) -> np.ndarray:
        """Returns a copy of all embeddings, float32 ``[pages, D]``; ``[0, 0]`` if there are no pages."""
        values = [block.values for block in self._rows.blocks]
        return np.concatenate(values, dtype=np.float32) if values else np.empty((0, 0), np.float32)

    def blocks(self) -> Iterator[Block]:
        """Yields the blocks that own the index's memory; indexes that share memory yield the same blocks."""
        yield from self._rows.blocks
        yield from self.letters.texts.blocks
