"""One session: the branches of its conversation, and what its last request read."""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sessions.episodes import EpisodesOfSession
from sglang_kvq.sessions.index import Block, PageIndex
from sglang_kvq.sessions.planning import common_length, whole
from sglang_kvq.sessions.search import Match

#: Key that separates cached prefixes of equal tokens: ``extra_key`` and ``cache_salt``.
Namespace: TypeAlias = tuple[str | None, str | None]
#: Branches of a conversation that are remembered.
BRANCHES = 4
#: Memory of a session, of each branch and of each block beside their arrays, and of each page or window that was read.
SESSION_BYTES, BRANCH_BYTES, BLOCK_BYTES, READ_BYTES = 1200, 700, 360, 40


@dataclass(eq=False)
class Branch:
    """Text is the only thing that lasts: everything else is made from it.

    Attributes:
        tokens: int32, what was said last: a prompt, or a prompt and its answer. Shared with who gave it.
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
    #: The last array that was compared, and how many first tokens it shares. A turn asks several times.
    _compared: tuple[weakref.ref[np.ndarray], int] | None = field(default=None, repr=False)

    def common(self, ids: np.ndarray) -> int:
        """First tokens that ``ids`` shares with what was said. Arrays of tokens are never written to again."""
        if _begin_alike(self.tokens, ids):
            return min(len(self.tokens), len(ids))
        if self._compared is not None and (other := self._compared[0]()) is not None and _begin_alike(other, ids):
            same = self._compared[1]
            if same < len(other) or len(ids) <= len(other):
                return min(same, len(ids))
        same = common_length(self.tokens, ids)
        self._compared = weakref.ref(ids), same
        return same

    def goes_on(self, same: int) -> bool:
        """Returns True if a prompt that shares ``same`` tokens continues this branch.

        It has to share the last prompt. A chat template may end a prompt otherwise once its answer follows, and an
        answer may come back in other tokens, so the last page does not count.
        """
        return same >= self.asked - PAGE_SIZE

    def follow(self, ids: np.ndarray, same: int, asked: int, namespace: Namespace) -> None:
        """Goes on with ``ids``: first the ``same`` tokens that this branch shares with them, then others."""
        if len(self.index) > same // PAGE_SIZE:
            self.index = self.index.first(same // PAGE_SIZE)
        self.episodes.keep(same)
        self.exact = min(self.exact, whole(same)) if namespace == self.namespace else 0
        self.tokens, self.asked, self.namespace = np.asarray(ids, np.int32), asked, namespace
        self._compared = None

    def fork(self, ids: np.ndarray, same: int, asked: int, namespace: Namespace) -> Branch:
        """Another branch that says ``ids`` and knows what this one knows of them."""
        made = Branch(self.tokens, self.asked, self.namespace, self.exact, self.index, self.episodes.copy())
        made.follow(ids, same, asked, namespace)
        return made

    def computed(self, ids: np.ndarray, namespace: Namespace) -> None:
        """``ids``, whole pages, are cached now; what of them was said in this branch counts."""
        if namespace == self.namespace:
            self.exact = max(self.exact, whole(self.common(ids)))

    def exact_of(self, ids: np.ndarray, namespace: Namespace) -> int:
        """First tokens of ``ids`` that are known to be computed, in whole pages."""
        return whole(min(self.exact, self.common(ids))) if namespace == self.namespace else 0

    def learn(self, ids: np.ndarray, index: PageIndex) -> None:
        """Takes over the index of the first pages of ``ids`` as far as it is longer and they were said here."""
        if len(index) > len(self.index) and (pages := min(self.common(ids) // PAGE_SIZE, len(index))) > len(self.index):
            self.index = index.first(pages)

    def blocks(self) -> Iterator[Block]:
        """Owners of the index's memory, some of which branches may share."""
        return self.index.blocks()

    @property
    def nbytes(self) -> int:
        """Memory of its own: without ``blocks``."""
        return self.tokens.nbytes + self.episodes.nbytes


def _begin_alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns True if one array is the beginning of the other, in the same memory."""
    places = (a.__array_interface__, b.__array_interface__)
    first, second = ((place["data"], place["typestr"], place["strides"]) for place in places)
    return bool(len(a) and len(b)) and first == second


@dataclass(eq=False)
class Session:
    """State of one conversation of one tenant.

    A request that goes on with no branch (a title, a summary, an edit, an older turn once more) makes one of its own
    and leaves the others as they are. So the next request may go on with either.

    Attributes:
        tenant: who it belongs to; "" where no key is sent.
        id: the client's name for it.
        branches: the one used last first.
        hot: tokens that the last request read when its answer began.
        history: of its prompt, tokens of which pages were chosen; 0 if it was read whole.
        pages: of that history, those chosen.
        matches: windows that these hold, the nearest to its question first.
        requests, selected, rebuilt: requests; those with chosen pages; histories computed again as they were evicted.
        used: when its last answer began or ended; answering: requests whose answers are made; preparing: those whose
            next turn is.
        planning: held while a prompt is looked at, so that requests of one session do so one after the other.
        computing: held while a history is computed, so that none is computed twice at once.
    """

    tenant: str
    id: str
    branches: list[Branch] = field(default_factory=lambda: [Branch()])
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
    preparing: int = 0
    planning: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    computing: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def latest(self) -> Branch:
        """The branch that was used last."""
        return self.branches[0]

    def nearest(self, ids: np.ndarray) -> tuple[Branch, int]:
        """The branch that shares most tokens with ``ids``, of several one that they go on with; how many it shares."""
        found = [(branch, branch.common(ids)) for branch in self.branches]
        return max(found, key=lambda one: (one[1], one[0].goes_on(one[1])))

    def follow(self, ids: np.ndarray, namespace: Namespace, asked: int | None = None) -> int:
        """Goes on with ``ids``, in the branch that they continue or in a new one.

        Args:
            asked: tokens of the prompt, where an answer follows it.

        Returns:
            How many tokens were known.
        """
        (branch, same), asked = self.nearest(ids), len(ids) if asked is None else asked
        if branch.goes_on(same):
            self.branches.remove(branch)
            branch.follow(ids, same, asked, namespace)
        else:
            branch = branch.fork(ids, same, asked, namespace)
            if len(self.branches) == BRANCHES:
                # The longest is what costs most to make again, however many titles were asked for since.
                self.branches.remove(min(self.branches[-2:], key=lambda one: len(one.tokens)))
        self.branches.insert(0, branch)
        return same

    def computed(self, ids: np.ndarray, namespace: Namespace) -> None:
        """``ids``, whole pages, are cached now; what of them was said in this session counts."""
        for branch in self.branches:
            branch.computed(ids, namespace)

    def exact_of(self, ids: np.ndarray, namespace: Namespace) -> int:
        """First tokens of ``ids`` that are known to be computed, in whole pages."""
        return max(branch.exact_of(ids, namespace) for branch in self.branches)

    def said(self, ids: np.ndarray, namespace: Namespace) -> int:
        """First tokens of ``ids`` that a branch of this namespace still says."""
        return max((branch.common(ids) for branch in self.branches if branch.namespace == namespace), default=0)

    def lost(self) -> None:
        """Nothing is known to be cached any more."""
        for branch in self.branches:
            branch.exact = 0

    def index_of(self, ids: np.ndarray) -> PageIndex:
        """An index of the first pages of ``ids`` that are known, which later requests do not change."""
        branch, same = self.nearest(ids)
        return branch.index.first(same // PAGE_SIZE)

    def learn(self, ids: np.ndarray, index: PageIndex) -> None:
        """Keeps what was embedded of the first pages of ``ids``."""
        for branch in self.branches:
            branch.learn(ids, index)

    def divided(self, ids: np.ndarray, episodes: EpisodesOfSession) -> None:
        """Keeps episodes of the first tokens of ``ids``, if those were said."""
        branch, same = self.nearest(ids)
        if same >= episodes.tokens:
            branch.episodes = episodes

    @property
    def nbytes(self) -> int:
        """Memory that forgetting this session frees."""
        blocks = {id(block): block for branch in self.branches for block in branch.blocks()}
        own = SESSION_BYTES + sys.getsizeof(self.id) + READ_BYTES * (len(self.pages) + 4 * len(self.matches))
        return (
            own
            + sum(BRANCH_BYTES + branch.nbytes for branch in self.branches)
            + sum(BLOCK_BYTES + block.nbytes for block in blocks.values())
        )
