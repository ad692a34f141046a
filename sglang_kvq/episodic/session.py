"""One session: the branches of its conversation, and what its last request read."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field

import numpy as np

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.episodic.branch import Branch, Namespace
from sglang_kvq.episodic.episodes import EpisodesOfSession
from sglang_kvq.episodic.page_index import PageIndex

#: Branches of a conversation that are remembered.
BRANCHES = 4
#: Memory of a session, of each branch and of each block beside their arrays, and of each page or window that was read.
SESSION_BYTES, BRANCH_BYTES, BLOCK_BYTES, READ_BYTES = 1200, 700, 360, 40


@dataclass(frozen=True)
class Match:
    """A window that the last question read: tokens ``start`` to ``end`` (excluded), and its cosine to the question."""

    start: int
    end: int
    score: float


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

    def nearest(self, ids: np.ndarray) -> Branch:
        """The branch that shares most tokens with ``ids``, of several one that they go on with."""
        return max(self.branches, key=lambda branch: ((same := branch.common(ids)), branch.goes_on(same)))

    def follow(self, ids: np.ndarray, namespace: Namespace, asked: int | None = None) -> int:
        """Go on with ``ids``, in the branch that they continue or in a new one.

        Args:
            asked: tokens of the prompt, where an answer follows it.

        Returns:
            How many tokens were known.
        """
        branch, asked = self.nearest(ids), len(ids) if asked is None else asked
        if branch.goes_on(same := branch.common(ids)):
            self.branches.remove(branch)
            branch.follow(ids, asked, namespace)
        else:
            branch = branch.fork(ids, asked, namespace)
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
        branch = self.nearest(ids)
        return branch.index.first(branch.common(ids) // PAGE_SIZE)

    def learn(self, ids: np.ndarray, index: PageIndex) -> None:
        """Keep what was embedded of the first pages of ``ids``."""
        for branch in self.branches:
            branch.learn(ids, index)

    def divided(self, ids: np.ndarray, episodes: EpisodesOfSession) -> None:
        """Keep episodes of the first tokens of ``ids``, if those were said."""
        if (branch := self.nearest(ids)).common(ids) >= episodes.tokens:
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
