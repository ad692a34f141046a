"""Host memory behind ``scheduler_model``: prefixes that are backed up and loaded by copies that happen late.

SGLang's HiCache in short. A copy is submitted on the stream that runs the model, after what the tiers must do first.
It then happens whenever its own stream comes to it, here at a random later point: right away, or not before somebody
waits for it. Copies of one direction keep their order.

Write-through backs up what enters the tree, and frees nothing that is being copied. Write-back backs up what the tree
evicts, and waits. Pages of a prompt that only the host has are loaded when a request starts. The next prefill waits for
every load before it, and plans for the loads of what they copy or fold. Nobody else waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_kvq.cache.host_pages import HostLayout
from sglang_kvq.cache.pending import Fill
from sglang_kvq.constants import PAGE_SIZE as P

if TYPE_CHECKING:
    from tests.cache.scheduler_model import Model, Request

POISON = 0xFF
#: A prefix of whole pages; names its last page.
Key = tuple[int, ...]


@dataclass(eq=False)
class Copy:
    """One that was submitted: pages of the tree, and what happens when it is their turn."""

    keys: list[Key]
    pages: list[int]
    run: Callable[[], None]


class Host:
    """The host's pages of one ``Model``.

    Attributes:
        held: the host's page of each prefix that it has, or is about to have.
        loads, backups: pages copied so far.
        aborted: loads whose request left before it ran.
    """

    def __init__(self, model: Model, pages: int, rng: random.Random, *, write_back: bool = False) -> None:
        self.model, self.rng, self.write_back = model, rng, write_back
        self.layout = HostLayout(model.pool)
        self.rows = torch.full((pages, self.layout.page_bytes + 16), POISON, dtype=torch.uint8)
        self.free = list(range(pages))
        self.held: dict[Key, int] = {}
        self.used: dict[Key, int] = {}
        self.to_write: list[Key] = []
        self.to_load: list[Key] = []
        self.writing: list[Copy] = []
        self.loading: list[Copy] = []
        self.wanted: set[Key] = set()  # about to be loaded
        self.records: dict[Key, torch.Tensor] = {}
        self.loads = self.backups = self.aborted = 0

    # -- what the tree and requests do ---------------------------------------------------------------

    def locked(self) -> set[Key]:
        """Prefixes whose pages the tree may not evict."""
        copies = [key for copy in self.writing + self.loading for key in copy.keys]
        return {*self.to_write, *self.to_load, *copies}

    def insert(self, keys: list[Key]) -> None:
        """Prefixes entered the tree, or are there already, shorter ones first: queues those to be backed up."""
        for key in [] if self.write_back else keys:
            if key in self.held or key not in self.model.tree:
                continue
            if (len(key) > P and key[:-P] not in self.held) or (row := self.take()) is None:
                return
            self.hold(key, row)
            self.to_write.append(key)

    def demote(self, key: Key) -> None:
        """The tree evicts a prefix; without a host page all that goes on from it goes too."""
        if self.write_back and key not in self.held and (row := self.take()) is not None:
            self.hold(key, row)
            self.submit_backup([key])
            self.finish(self.writing)
        if key not in self.held:
            for longer in [k for k in self.held if len(k) > len(key) and k[: len(key)] == key]:
                self.drop(longer)

    def load(self, request: Request) -> None:
        """A request that has just started gets pages for what only the host has of its prompt, and queues the load."""
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
        if begin == 0 and model.is_first(request.tokens):  # its first token comes back as its record has it
            model.begun[pages[0]] = True
            model.lost.add(pages[0])
        request.stored = request.protected = begin + len(keys) * P
        request.fresh = False
        self.to_load += keys

    def left(self, request: Request) -> None:
        """A request left, perhaps before its load was submitted, or done."""
        mine = {tuple(request.tokens[:end]) for end in range(P, request.stored + 1, P)}
        pending = {*self.to_load, *(key for copy in self.loading for key in copy.keys)}
        self.aborted += bool(mine & pending)

    # -- copies ----------------------------------------------------------------------------------------

    def submit_backups(self) -> None:
        """What the batch's results have queued."""
        keys, self.to_write = self.to_write, []
        if keys:
            self.submit_backup(keys)
        self.happen()

    def submit_backup(self, keys: list[Key]) -> None:
        pages = self._begin(keys, self.model.tiers.before_backup)
        there = self._rows_of(keys)

        def run() -> None:
            self.layout.backup(self.model.pool, pages, self.rows, there)
            for key in keys:
                self.check(key)
            self.backups += len(keys)

        self.writing.append(Copy(keys, pages.tolist(), run))

    def submit_loads(self) -> None:
        """What admission has queued, before the batch is planned."""
        keys, self.to_load = self.to_load, []
        if keys:
            pages, there = self._begin(keys, self.model.tiers.before_load), self._rows_of(keys)

            def run() -> None:
                self.layout.load_layer(self.model.pool, 0, self.rows, there, pages)
                self.loads += len(keys)

            self.loading.append(Copy(keys, pages.tolist(), run))
        self.happen()

    def _begin(self, keys: list[Key], prepare: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """The tiers' work, on the stream of the layers in flight and after them; the pages, int64."""
        self.model.land()
        self.before_plan()
        pages = torch.tensor([self.model.tree[key] for key in keys], dtype=torch.int64)
        prepare(pages)
        return pages

    def _rows_of(self, keys: list[Key]) -> torch.Tensor:
        return torch.tensor([self.held[key] for key in keys], dtype=torch.int64)

    def happen(self) -> None:
        """Some copies happen: none, the next ones or all that wait."""
        for copies in (self.writing, self.loading):
            if copies and self.rng.random() < 0.4:
                self.finish(copies, self.rng.randint(1, len(copies)))

    def finish(self, copies: list[Copy], count: int | None = None) -> None:
        """The first ones have happened: by now they must."""
        for _ in range(len(copies) if count is None else count):
            copies[0].run()
            del copies[0]

    def wait(self, copies: list[Copy]) -> None:
        """Loads that must have happened, and so those before them."""
        last = max((i for i, copy in enumerate(self.loading) if copy in copies), default=-1)
        self.finish(self.loading, last + 1)

    def before_plan(self) -> None:
        """What plans read themselves, sources of copies and folds, they wait for."""
        sources = {page for e in self.model.tiers.pending._events if isinstance(e, Fill) for page in e.source.tolist()}
        self.wait([copy for copy in self.loading if sources & set(copy.pages)])

    def offers(self, pages: list[int]) -> bool:
        """Whether these pages of the tree may be copied or folded; not before their load is submitted, here or there.

        The scheduler may treat a load under way like missing room, or leave the wait to the plan.
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
        """A free page, or that of the least recently used prefix that only the host has."""
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
        """Everything that was queued or submitted has happened."""
        self.submit_backups()
        self.submit_loads()
        self.finish(self.writing)
        self.finish(self.loading)

    def reset(self) -> None:
        """As a flush does, which is refused until copies are done."""
        self.settle()
        for key in list(self.held):
            self.drop(key)

    def check(self, key: Key) -> None:
        """The host's page of a prefix is the record of its last 64 tokens, and the row's tail is untouched."""
        got, size = self.rows[self.held[key]], self.layout.page_bytes
        assert torch.equal(got[:size], self.record(key)), f"the host holds another page for {len(key) // P} pages"
        assert (got[size:] == POISON).all()

    def check_all(self) -> None:
        assert sorted(self.free + list(self.held.values())) == list(range(len(self.rows))), "a host page is lost"
        writing = {*self.to_write, *(key for copy in self.writing for key in copy.keys)}
        for key in self.held.keys() - writing:
            self.check(key)

    def record(self, key: Key) -> torch.Tensor:
        """uint8 ``[page_bytes]``: the record that the oracle expects."""
        if key not in self.records:
            k, v = self.model.page_of(key)[:, None, None]
            self.records[key] = self.model.format.quantize_pages(k, v).flatten()
        return self.records[key]
