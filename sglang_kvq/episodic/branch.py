"""One course of a conversation: its tokens, what a question searches of it, and how much of it was computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.episodic.blocks import Block
from sglang_kvq.episodic.episodes import EpisodesOfSession
from sglang_kvq.episodic.page_index import PageIndex
from sglang_kvq.episodic.question import common_length

#: Key that separates cached prefixes of equal tokens: ``extra_key`` and ``cache_salt``.
Namespace: TypeAlias = tuple[str | None, str | None]


@dataclass(eq=False)
class Branch:
    """Text is the only thing that lasts: everything else is made from it.

    Attributes:
        tokens: int32, what was said last: a prompt, or a prompt and its answer.
        asked: how many of them are the prompt.
        namespace: under which ``exact`` holds.
        exact: first tokens that were computed with all before them and entered SGLang's cache. They may have been
            evicted since.
        index: of the first whole pages; as many as are embedded.
        episodes: of the policy epicache.
    """

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    asked: int = 0
    namespace: Namespace = (None, None)
    exact: int = 0
    index: PageIndex = field(default_factory=PageIndex, repr=False)
    episodes: EpisodesOfSession = field(default_factory=EpisodesOfSession)

    def common(self, ids: np.ndarray) -> int:
        """First tokens that ``ids`` shares with what was said."""
        return common_length(self.tokens, ids)

    def goes_on(self, same: int) -> bool:
        """Returns True if a prompt that shares ``same`` tokens continues this branch.

        It has to share the last prompt. A chat template may end a prompt otherwise once its answer follows, and an
        answer may come back in other tokens, so the last page does not count.
        """
        return same >= self.asked - PAGE_SIZE

    def follow(self, ids: np.ndarray, asked: int, namespace: Namespace) -> None:
        """Go on with ``ids``: what was said up to where they part from it, and then something else."""
        same = self.common(ids)
        if len(self.index) > same // PAGE_SIZE:
            self.index = self.index.first(same // PAGE_SIZE)
        self.episodes.keep(same)
        self.exact = min(self.exact, _whole(same)) if namespace == self.namespace else 0
        self.tokens, self.asked, self.namespace = ids.astype(np.int32, copy=True), asked, namespace

    def fork(self, ids: np.ndarray, asked: int, namespace: Namespace) -> Branch:
        """Another branch that says ``ids`` and knows what this one knows of them."""
        made = Branch(self.tokens, self.asked, self.namespace, self.exact, self.index, self.episodes.copy())
        made.follow(ids, asked, namespace)
        return made

    def computed(self, ids: np.ndarray, namespace: Namespace) -> None:
        """``ids``, whole pages, are cached now; what of them was said in this branch counts."""
        if namespace == self.namespace:
            self.exact = max(self.exact, _whole(self.common(ids)))

    def exact_of(self, ids: np.ndarray, namespace: Namespace) -> int:
        """First tokens of ``ids`` that are known to be computed, in whole pages."""
        return _whole(min(self.exact, self.common(ids))) if namespace == self.namespace else 0

    def learn(self, ids: np.ndarray, index: PageIndex) -> None:
        """Take over the index of the first pages of ``ids`` as far as it is longer and they were said here."""
        if len(index) > len(self.index) and (pages := min(self.common(ids) // PAGE_SIZE, len(index))) > len(self.index):
            self.index = index.first(pages)

    def blocks(self) -> Iterator[Block]:
        """Owners of the index's memory, some of which branches may share."""
        return self.index.blocks()

    @property
    def nbytes(self) -> int:
        """Memory of its own: without ``blocks``."""
        return self.tokens.nbytes + self.episodes.nbytes


def _whole(tokens: int) -> int:
    return tokens // PAGE_SIZE * PAGE_SIZE
