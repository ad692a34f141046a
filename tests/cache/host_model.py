"""Host memory behind ``scheduler_model``: prefixes are backed up and loaded by copies that happen late.

This is SGLang's HiCache in short. A copy is submitted on the stream that runs the model, after the work that the tiers
must do first. It then happens when its own stream reaches it, which is here a random later point: immediately, or only
when somebody waits for it. Copies in one direction keep their order.

Write-through backs up prefixes that enter the tree, and frees no page that is being copied. Write-back backs up
prefixes that the tree evicts, and waits for the copies. When a request starts, pages of its prompt that only the host
has are loaded. The next prefill waits for every load submitted before it. A plan waits for loads of pages that it
copies or folds. A move of pages in a shared memory waits for all copies. Nothing else waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_kvq.cache.host_pages import HostLayout
from sglang_kvq.cache.pending import CopiedPages, FoldedPages
from sglang_kvq.constants import PAGE_SIZE as P

if TYPE_CHECKING:
    from tests.cache.scheduler_model import Model, Request

POISON = 0xFF
#: A prefix of whole pages; it identifies its last page.
Key = tuple[int, ...]


@dataclass(eq=False)
class Copy:
    """A submitted copy: prefixes in the tree, their page ids, and the function that copies when it is their turn."""

    keys: list[Key]
    pages: list[int]
    run: Callable[[], None]


class Host:
    """The host's pages of one ``Model``.

    Attributes:
        held: host page of each prefix that the host has, or is about to have.
        loads, backups: pages copied so far.
        aborted: loads whose request left before they ran.
        waited: moves of pages that waited for copies.
    """

    def __init__(
        self, model: Model, pages: int, rng: random.Random, *, write_back: bool = False, soon: float = 0.4
    ) -> None:
        """
        Args:
            soon: how likely some copies happen whenever they may.
        """
        self.model, self.rng, self.write_back, self.soon = model, rng, write_back, soon
        self.layout = HostLayout(model.pool)
        self.rows = torch.full((pages, self.layout.page_bytes + 16), POISON, dtype=torch.uint8)
        self.free = list(range(pages))
        self.held: dict[Key, int] = {}
        self.used: dict[Key, int] = {}
        self.to_write: list[Key] = []
        self.to_load: list[Key] = []
        self.writing: list[Copy] = []
        self.loading: list[Copy] = []
        self.awaited = True  # False: loads were submitted, and no batch that waits for them was launched since
        self.wanted: set[Key] = set()  # about to be loaded
        self.records: dict[Key, torch.Tensor] = {}
        self.loads = self.backups = self.aborted = self.waited = 0
        model.tiers.wait_for_copies = self.wait_for_copies

    # -- what the tree and requests do ---------------------------------------------------------------

    def locked(self) -> set[Key]:
        """Returns the prefixes whose pages the tree may not evict."""
        copies = [key for copy in self.writing + self.loading for key in copy.keys]
        return {*self.to_write, *self.to_load, *copies}

    def insert(self, keys: list[Key]) -> None:
        """Queues backups of prefixes that have entered the tree or are already in it; shorter prefixes come first."""
        for key in [] if self.write_back else keys:
            if key in self.held or key not in self.model.tree:
                continue
            if (len(key) > P and key[:-P] not in self.held) or (row := self.take()) is None:
                return
            self.hold(key, row)
            self.to_write.append(key)

    def demote(self, key: Key) -> None:
        """Lets the tree evict a prefix; if the host cannot keep it, all prefixes that extend it are dropped too."""
        if self.write_back and key not in self.held and (row := self.take()) is not None:
            self.hold(key, row)
            self.submit_backup([key])
            self.finish(self.writing)
        if key not in self.held:
            for longer in [k for k in self.held if len(k) > len(key) and k[: len(key)] == key]:
                self.drop(longer)

    def load(self, request: Request) -> None:
        """Gives a new request pages for the part of its prompt that only the host has, and queues the load."""
        model, begin = self.model, request.stored
        keys = []
        for end in range(begin + P, len(request.tokens), P):
            key = tuple(request.tokens[:end])
            if key not in self.held:
                break
            keys.append(key)
        if not keys or self.rng.random() < 0.2:
            return
        self.wanted = set(keys)
        pages = model.take_pages(len(keys))
        self.wanted = set()
        if pages is None:
            return
        model.write_row(request.row, begin, pages)
        for key, page in zip(keys, pages):
            model.tree[key], model.used[key], self.used[key] = page, model.clock, model.clock
        if begin == 0 and model.is_first(request.tokens):  # its first token comes back as stored in the record
            model.begun[pages[0]] = True
            model.lost.add(pages[0])
        request.stored = request.protected = begin + len(keys) * P
        request.fresh = False
        self.to_load += keys

    def left(self, request: Request) -> None:
        """Counts a load as aborted if its request left before the load was submitted or done."""
        mine = {tuple(request.tokens[:end]) for end in range(P, request.stored + 1, P)}
        pending = {*self.to_load, *(key for copy in self.loading for key in copy.keys)}
        self.aborted += bool(mine & pending)

    # -- copies ----------------------------------------------------------------------------------------

    def submit_backups(self) -> None:
        """Submits the backups that the results of a batch have queued."""
        keys, self.to_write = self.to_write, []
        if keys:
            self.submit_backup(keys)
        self.happen()

    def submit_backup(self, keys: list[Key]) -> None:
        ids, pages = self._begin(keys, self.model.tiers.before_backup)
        there = self._rows_of(keys)

        def run() -> None:
            self.layout.backup(self.model.pool, pages, self.rows, there)
            for key in keys:
                self.check(key)
            self.backups += len(keys)

        self.writing.append(Copy(keys, ids, run))

    def submit_loads(self) -> None:
        """Submits the loads that admission has queued, before the batch is planned."""
        keys, self.to_load = self.to_load, []
        if keys:
            (ids, pages), there = self._begin(keys, self.model.tiers.before_load), self._rows_of(keys)

            def run() -> None:
                self.layout.load_layer(self.model.pool, 0, self.rows, there, pages)
                self.loads += len(keys)

            self.loading.append(Copy(keys, ids, run))
            self.awaited = False
        self.happen()

    def before_insert(self) -> None:
        """Finishes loads for which no batch waits. SGLang queues them only for its next batch, so inserts none before.

        Otherwise a request would be given equal pages of the tree that are still to come.
        """
        if self.to_load or not self.awaited:
            self.submit_loads()
            self.finish(self.loading)

    def _begin(self, keys: list[Key], prepare: Callable[[torch.Tensor], None]) -> tuple[list[int], torch.Tensor]:
        """Runs the tiers' preparation on the stream of the layers in flight, after them. Returns page ids and pages."""
        self.model.land()
        self.before_plan()
        ids = [self.model.tree[key] for key in keys]
        on_device = torch.tensor(ids, dtype=torch.int64)
        prepare(on_device)
        return ids, self.model.tiers.pages_of(on_device)

    def _rows_of(self, keys: list[Key]) -> torch.Tensor:
        return torch.tensor([self.held[key] for key in keys], dtype=torch.int64)

    def happen(self) -> None:
        """Lets some copies happen in each direction: none, the next few, or all that wait."""
        for copies in (self.writing, self.loading):
            if copies and self.rng.random() < self.soon:
                self.finish(copies, self.rng.randint(1, len(copies)))

    def finish(self, copies: list[Copy], count: int | None = None) -> None:
        """Runs the first ``count`` copies (default: all), as if somebody waited for them."""
        for _ in range(len(copies) if count is None else count):
            copies[0].run()
            del copies[0]

    def wait(self, copies: list[Copy]) -> None:
        """Runs these loads, and the loads before them."""
        last = max((i for i, copy in enumerate(self.loading) if copy in copies), default=-1)
        self.finish(self.loading, last + 1)

    def before_plan(self) -> None:
        """Waits for loads of pages that the plan itself reads: sources of copies and folds."""
        fills = [e for e in self.model.tiers.pending._events if isinstance(e, CopiedPages | FoldedPages)]
        sources = {page for e in fills for page in e.source.tolist()}
        self.wait([copy for copy in self.loading if sources & set(copy.pages)])

    def wait_for_copies(self) -> None:
        """Waits for all copies, because pages are about to move in a shared memory."""
        self.waited += bool(self.writing or self.loading)
        self.finish(self.writing)
        self.finish(self.loading)

    def offers(self, pages: list[int]) -> bool:
        """Returns whether these pages may be copied or folded; submits their load first if it is queued.

        The scheduler may treat a load in progress like missing room, or leave the waiting to the plan.
        """
        queued = {self.model.tree[key] for key in self.to_load}
        under_way = {page for copy in self.loading for page in copy.pages}
        if set(pages) & (queued | under_way) and self.rng.random() < 0.5:
            return False
        if queued & set(pages):
            self.submit_loads()
        return True

    # -- the host's memory ---------------------------------------------------------------------------

    def take(self) -> int | None:
        """Returns a free page, or frees that of the least recently used prefix that only the host has."""
        if not self.free:
            locked = self.locked() | self.wanted
            parents = {key[:-P] for key in self.held}
            leaves = [k for k in self.held if not (k in parents or k in locked or k in self.model.tree)]
            if leaves:
                self.drop(min(leaves, key=self.used.__getitem__))
        return self.free.pop(0) if self.free else None

    def hold(self, key: Key, row: int) -> None:
        self.held[key], self.used[key] = row, self.model.clock

    def drop(self, key: Key) -> None:
        self.rows[self.held[key]] = POISON
        self.free.append(self.held.pop(key))

    def settle(self) -> None:
        """Lets everything happen that was queued or submitted."""
        self.submit_backups()
        self.submit_loads()
        self.finish(self.writing)
        self.finish(self.loading)

    def reset(self) -> None:
        """Empties the host as a flush does, which SGLang refuses until all copies are done."""
        self.settle()
        for key in list(self.held):
            self.drop(key)

    def check(self, key: Key) -> None:
        """Checks that a prefix's host page holds the record of its last 64 tokens, with an untouched tail."""
        got, size = self.rows[self.held[key]], self.layout.page_bytes
        assert torch.equal(got[:size], self.record(key)), f"the host holds another page for {len(key) // P} pages"
        assert (got[size:] == POISON).all()

    def check_all(self) -> None:
        assert sorted(self.free + list(self.held.values())) == list(range(len(self.rows))), "a host page is lost"
        writing = {*self.to_write, *(key for copy in self.writing for key in copy.keys)}
        for key in self.held.keys() - writing:
            self.check(key)

    def record(self, key: Key) -> torch.Tensor:
        """Returns the record that the oracle expects, uint8 ``[page_bytes]``."""
        if key not in self.records:
            k, v = self.model.page_of(key)[:, None, None]
            self.records[key] = self.model.format.quantize_pages(k, v).flatten()
        return self.records[key]
