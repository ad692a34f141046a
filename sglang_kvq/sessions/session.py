"""One session: the branches of its conversation, and the pages that its last request read."""

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

#: A request's ``extra_key`` and ``cache_salt``; equal tokens in different namespaces share no cached prefix.
Namespace: TypeAlias = tuple[str | None, str | None]
#: Most branches of a conversation that are remembered.
BRANCHES = 4
#: Bytes of a session, a branch and a block in addition to their arrays, and of each page or window that was read.
SESSION_BYTES, BRANCH_BYTES, BLOCK_BYTES, READ_BYTES = 1200, 700, 360, 40


@dataclass(eq=False)
class Branch:
    """One course of a conversation. Everything here can be made again from the tokens.

    Attributes:
        tokens: int32, the conversation up to the last request: a prompt, or a prompt and its answer. The caller's
            array, not a copy.
        asked: how many of these tokens are the prompt.
        namespace: the namespace for which ``exact`` holds.
        exact: number of first tokens that were computed, each with all tokens before it, and entered SGLang's cache.
            They may have been evicted since.
        index: index of the first whole pages, as far as they are embedded.
        episodes: clusters of the conversation, for the policy ``epicache``.
    """

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    asked: int = 0
    namespace: Namespace = (None, None)
    exact: int = 0
    index: PageIndex = field(default_factory=PageIndex, repr=False)
    episodes: EpisodesOfSession = field(default_factory=EpisodesOfSession)
    #: The last array that was compared with ``tokens``, and the length of their common beginning. Kept because each
    #: turn compares the same array several times.
    _compared: tuple[weakref.ref[np.ndarray], int] | None = field(default=None, repr=False)

    def common(self, ids: np.ndarray) -> int:
        """Returns how many first tokens ``ids`` shares with this branch.

        The result is kept for the next call, because arrays of tokens are never modified.
        """
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
        """Returns True if a prompt that shares ``same`` first tokens with this branch continues it.

        The prompt must share the branch's last prompt, except for its last page. The end may differ, because a chat
        template may render it differently once an answer follows, or because the answer is tokenized differently.
        """
        return same >= self.asked - PAGE_SIZE

    def follow(self, ids: np.ndarray, same: int, asked: int, namespace: Namespace) -> None:
        """Makes ``ids`` the branch's tokens; keeps what is known about the first ``same`` tokens, which both share."""
        if len(self.index) > same // PAGE_SIZE:
            self.index = self.index.first(same // PAGE_SIZE)
        self.episodes.keep(same)
        self.exact = min(self.exact, whole(same)) if namespace == self.namespace else 0
        self.tokens, self.asked, self.namespace = np.asarray(ids, np.int32), asked, namespace
        self._compared = None

    def fork(self, ids: np.ndarray, same: int, asked: int, namespace: Namespace) -> Branch:
        """Returns a new branch with the tokens ``ids``, and with all that this branch knows about their beginning."""
        made = Branch(self.tokens, self.asked, self.namespace, self.exact, self.index, self.episodes.copy())
        made.follow(ids, same, asked, namespace)
        return made

    def computed(self, ids: np.ndarray, namespace: Namespace) -> None:
        """Records that ``ids``, whole pages, are now cached, as far as this branch begins with them."""
        if namespace == self.namespace:
            self.exact = max(self.exact, whole(self.common(ids)))

    def exact_of(self, ids: np.ndarray, namespace: Namespace) -> int:
        """Returns how many first tokens of ``ids`` are known to be computed, in whole pages."""
        return whole(min(self.exact, self.common(ids))) if namespace == self.namespace else 0

    def learn(self, ids: np.ndarray, index: PageIndex) -> None:
        """Takes over an index of the first pages of ``ids``, as far as this branch has them, if that is longer."""
        if len(index) > len(self.index) and (pages := min(self.common(ids) // PAGE_SIZE, len(index))) > len(self.index):
            self.index = index.first(pages)

    def blocks(self) -> Iterator[Block]:
        """Returns the blocks that own the index's memory; branches may share blocks."""
        return self.index.blocks()

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and episodes, without ``blocks``."""
        return self.tokens.nbytes + self.episodes.nbytes


def _begin_alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns True if both arrays begin at the same address, so that one is the beginning of the other."""
    places = (a.__array_interface__, b.__array_interface__)
    first, second = ((place["data"], place["typestr"], place["strides"]) for place in places)
    return first == second


@dataclass(eq=False)
class Session:
    """State of one conversation of one tenant.

    A request that continues no branch (a title, a summary, an edit, an older turn again) begins a new branch and leaves
    the others unchanged. So the next request may continue any of them.

    Attributes:
        tenant: the owner; "" if requests send no key.
        id: the client's name for the session.
        branches: the branch used last comes first.
        hot: number of tokens that the last request read when its answer began.
        history: number of tokens of the last prompt from which pages were chosen; 0 if the prompt was read whole.
        pages: the pages that were chosen from this history.
        matches: windows among these pages, the nearest to the question first.
        requests: number of requests.
        selected: number of requests with chosen pages.
        rebuilt: number of histories that were computed again because they had been evicted.
        created, used: times at which the session was created, and at which its last answer began or ended.
        idle_since: ``used`` by the store's clock.
        answering: number of requests whose answers are being generated.
        preparing: number of requests whose next turn is being prepared.
        planning: held while a prompt is planned, so that requests of one session are planned one after the other.
        computing: held while a history is computed, so that no history is computed twice at the same time.
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
    idle_since: float = 0.0
    answering: int = 0
    preparing: int = 0
    planning: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    computing: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def latest(self) -> Branch:
        """The branch that was used last."""
        return self.branches[0]

    def nearest(self, ids: np.ndarray) -> tuple[Branch, int]:
        """Returns the branch that shares the most first tokens with ``ids``, and their number.

        If several branches share as many, one that ``ids`` continues is preferred.
        """
        found = [(branch, branch.common(ids)) for branch in self.branches]
        return max(found, key=lambda one: (one[1], one[0].goes_on(one[1])))

    def follow(self, ids: np.ndarray, namespace: Namespace, asked: int | None = None) -> int:
        """Continues the session with ``ids``, in the branch that they continue or in a new one.

        Args:
            asked: number of tokens of the prompt, if ``ids`` also contains the answer; None if not.

        Returns:
            The number of first tokens that were already known.
        """
        (branch, same), asked = self.nearest(ids), len(ids) if asked is None else asked
        if branch.goes_on(same):
            self.branches.remove(branch)
            branch.follow(ids, same, asked, namespace)
        else:
            branch = branch.fork(ids, same, asked, namespace)
            if len(self.branches) == BRANCHES:
                # Of the two branches used longest ago, drop the shorter, because a longer one costs more to make again.
                self.branches.remove(min(self.branches[-2:], key=lambda one: len(one.tokens)))
        self.branches.insert(0, branch)
        return same

    def computed(self, ids: np.ndarray, namespace: Namespace) -> None:
        """Records that ``ids``, whole pages, are now cached, as far as each branch begins with them."""
        for branch in self.branches:
            branch.computed(ids, namespace)

    def exact_of(self, ids: np.ndarray, namespace: Namespace) -> int:
        """Returns how many first tokens of ``ids`` are known to be computed, in whole pages."""
        return max(branch.exact_of(ids, namespace) for branch in self.branches)

    def said(self, ids: np.ndarray, namespace: Namespace) -> int:
        """Returns how many first tokens of ``ids`` a branch of this namespace still has."""
        return max((branch.common(ids) for branch in self.branches if branch.namespace == namespace), default=0)

    def lost(self) -> None:
        """Forgets that tokens were cached."""
        for branch in self.branches:
            branch.exact = 0

    def index_of(self, ids: np.ndarray) -> PageIndex:
        """Returns an index of the known first pages of ``ids``; later requests do not change it."""
        branch, same = self.nearest(ids)
        return branch.index.first(same // PAGE_SIZE)

    def learn(self, ids: np.ndarray, index: PageIndex) -> None:
        """Keeps an index of the first pages of ``ids``."""
        for branch in self.branches:
            branch.learn(ids, index)

    def divided(self, ids: np.ndarray, episodes: EpisodesOfSession) -> None:
        """Keeps episodes of the first tokens of ``ids``, if the nearest branch still has all of these tokens."""
        branch, same = self.nearest(ids)
        if same >= episodes.tokens:
            branch.episodes = episodes

    @property
    def nbytes(self) -> int:
        """Bytes that are freed if this session is forgotten."""
        blocks = {id(block): block for branch in self.branches for block in branch.blocks()}
        own = SESSION_BYTES + sys.getsizeof(self.id) + READ_BYTES * (len(self.pages) + 4 * len(self.matches))
        return (
            own
            + sum(BRANCH_BYTES + branch.nbytes for branch in self.branches)
            + sum(BLOCK_BYTES + block.nbytes for block in blocks.values())
        )
