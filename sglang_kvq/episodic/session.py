"""One session: what was said as tokens, its segments' embeddings, and how much of it is known to be cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.episodic.episodes import EpisodesOfSession
from sglang_kvq.episodic.lexical import Lexical
from sglang_kvq.episodic.question import common_length

#: Key that separates cached prefixes of equal tokens: ``extra_key`` and ``cache_salt``.
Namespace = tuple[str | None, str | None]


@dataclass(frozen=True)
class Match:
    """A window that the last question read: tokens ``start`` to ``end`` (excluded), and its cosine to the question."""

    start: int
    end: int
    score: float


@dataclass(eq=False)
class Session:
    """State of one conversation of one tenant. Text is the only thing that lasts: everything else is made from it.

    Attributes:
        tenant: who it belongs to; "" where the server asks for no key.
        id: the client's name for it.
        tokens: int32, what was said last: a prompt, or a prompt and its answer.
        rows: float32 ``[pages, D]``, embeddings of the first whole pages of ``tokens``; as many as are embedded.
        letters: index of the same pages' texts.
        exact: first tokens that were computed with all before them and entered SGLang's cache, under ``namespace``.
            They may have been evicted since.
        hot: tokens that the last request read when its answer began.
        history: of its prompt, tokens of which pages were chosen; 0 if it was read whole.
        pages: of that history, those chosen.
        matches: windows that these hold, the nearest to its question first.
        requests, selected, rebuilt: requests; those with chosen pages; histories computed again as they were evicted.
        used: when its last answer began or ended; answering: requests whose answers are made.
        episodes: of the policy epicache.
        planning: held while a prompt is looked at, so that requests of one session do so one after the other.
        computing: held while a history is computed, so that none is computed twice at once.
    """

    tenant: str
    id: str
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    letters: Lexical = field(default_factory=Lexical, repr=False)
    exact: int = 0
    namespace: Namespace = (None, None)
    hot: int = 0
    history: int = 0
    pages: tuple[int, ...] = ()
    matches: tuple[Match, ...] = ()
    requests: int = 0
    selected: int = 0
    rebuilt: int = 0
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)
    answering: int = 0
    episodes: EpisodesOfSession = field(default_factory=EpisodesOfSession)
    planning: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    computing: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    def common(self, ids: np.ndarray) -> int:
        """First tokens that ``ids`` shares with what was said."""
        return common_length(self.tokens, ids)

    def follow(self, ids: np.ndarray, namespace: Namespace) -> int:
        """Go on with ``ids``: what was said up to where they part from it, and then something else.

        Returns:
            How many tokens are the same.
        """
        same = self.common(ids)
        self.rows = self.rows[: same // PAGE_SIZE]
        self.letters.truncate(len(self.rows))
        self.exact = min(self.exact, same // PAGE_SIZE * PAGE_SIZE) if namespace == self.namespace else 0
        self.tokens, self.namespace = ids.astype(np.int32, copy=True), namespace
        return same

    def computed(self, ids: np.ndarray, namespace: Namespace) -> None:
        """``ids``, whole pages, are cached now; what of them was said in this session counts."""
        if namespace == self.namespace:
            self.exact = max(self.exact, self.common(ids) // PAGE_SIZE * PAGE_SIZE)

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Embeddings of the first pages of ``ids`` that are known: float32 ``[<= len(ids) // PAGE_SIZE, D]``."""
        return self.rows[: self.common(ids) // PAGE_SIZE]

    def add_rows(self, ids: np.ndarray, first: int, rows: np.ndarray, texts: Sequence[str]) -> None:
        """Keep embeddings and texts of pages ``first`` and on of ``ids``, if they are the next ones of this session."""
        if len(self.rows) == first and self.common(ids) >= (first + len(rows)) * PAGE_SIZE:
            self.rows = np.concatenate([self.rows, rows]) if first else rows
            self.letters.add(texts)
