"""Search index of a conversation's first pages: embeddings and letters, in memory that branches share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_kvq.episodic.blocks import Block, Blocks
from sglang_kvq.episodic.lexical import Lexical, Terms, split


@dataclass(frozen=True, eq=False)
class Rows:
    """Embeddings: float16 ``[n, D]``. Their rounding is far below what tells one page from another."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def part(self, first: int, last: int) -> Rows:
        """A copy of rows ``first`` to ``last``."""
        return Rows(self.values[first:last].copy())

    def joined(self, other: Rows) -> Rows:
        """These rows and then ``other``'s."""
        return Rows(np.concatenate([self.values, other.values]))


@dataclass(frozen=True, eq=False)
class NewPages:
    """Pages that are about to enter an index."""

    rows: Rows
    terms: Terms

    @classmethod
    def made(cls, rows: np.ndarray, texts: Sequence[str]) -> NewPages:
        """Pages of embeddings float ``[n, D]`` and as many texts."""
        return cls(Rows(rows.astype(np.float16)), split(texts))


class PageIndex:
    """Embeddings and letters of the same pages, which grow at their end."""

    def __init__(self) -> None:
        self._rows: Blocks[Rows] = Blocks()
        self.letters = Lexical()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, pages: NewPages) -> None:
        """Append pages."""
        self._rows.add(pages.rows)
        self.letters.texts.add(pages.terms)

    def first(self, count: int) -> PageIndex:
        """The first ``count`` pages, which share this index's memory and grow by themselves."""
        made = PageIndex()
        made._rows, made.letters = self._rows.first(count), self.letters.first(count)
        return made

    def rows(self) -> np.ndarray:
        """All embeddings: float32 ``[pages, D]``, ``[0, 0]`` of none. A copy."""
        values = [block.values for block in self._rows.blocks]
        return np.concatenate(values, dtype=np.float32) if values else np.empty((0, 0), np.float32)

    def blocks(self) -> Iterator[Block]:
        """Owners of the memory; indexes that share memory share owners."""
        yield from self._rows.blocks
        yield from self.letters.texts.blocks
