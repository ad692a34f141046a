"""A scheduler in plain Python dictionaries that drives a TierManager as SGLang does.

Keys and values are a function of the tokens up to theirs. The oracle thus knows what each page must hold without
looking at the pool.

With ``overlap``, a batch is in flight: its plan runs when it is launched, but its layers only when the next batch is
launched. Whatever the scheduler does in between (publish, repoint, free, retract, evict, flush) must not change what
the layers read and write.

With drafts, the device knows how many drafts of a batch in flight are accepted, but the scheduler learns it only when
the batch has landed. Pages are therefore allocated for the largest possible number, and only tokens that the scheduler
knows are published.

If pages and BF16 pages share one memory (``shared``), ids differ from page numbers, and the scheduler divides the
memory (``cache.shared.split``).

With host memory (``add_host``), pages are backed up and loaded by copies that happen late (``host_model``). Requests
that another server has computed arrive in ``arrivals``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.planning.new_tokens import direct_tokens
from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.arena import Arena, padded
from sglang_kvq.cache.shared.split import Split, WindowSlots
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.formats.record import RecordFormat
from tests.cache.host_model import Copy, Host
from tests.cache.remembering_ops import RememberingOps

TABLE = torch.randn(4096, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


TWO_BITS = PageFormat(64, 64, 0.96, 0.92)
#: A format that keeps first tokens.
PLANES = PlaneFormat(64, PlaneCode((4, 3, 1, 0)), PlaneCode((3, 2, 2, 1)))


def row_indices(tokens: list[int], known: list[int]) -> list[int]:
    """Returns each token's index into ``TABLE``, given all tokens before; ``known`` holds those of a prefix."""
    state = known[-1] if known else 17
    for token in tokens[len(known) :]:
        state = (state * 31 + token + 7) % len(TABLE)
        known.append(state)
    return known


@dataclass(eq=False)
class Request:
    tokens: list[int]  # known tokens: prompt and generated
    row: int
    stored: int = 0  # tokens in the cache; of drafts, only accepted ones
    unknown: int = 0  # part of ``stored`` accepted by a batch in flight, so the scheduler does not know it
    reserved: int = 0  # tokens that the row has pages for, if more than ``stored``
    protected: int = 0  # tokens whose pages belong to the tree
    fresh: bool = True  # the request never hit the tree: its window must be complete
    indices: list[int] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Number of pages in the request's row."""
        return -(-max(self.stored, self.reserved) // P)

    def pages_wanted(self, drafts: int) -> int:
        """Returns how many pages SGLang adds for a step: a round of drafts beyond what the scheduler knows."""
        ahead = self.stored + 1 if drafts == 1 else self.stored - self.unknown + 2 * drafts
        return max(-(-ahead // P) - self.held, 0)

    def drafted(self, drafts: list[int]) -> torch.Tensor:
        """Returns keys and values like ``expected``, for the first token not stored and these drafts after it."""
        path = self.tokens[: self.stored + 1] + drafts
        indices = row_indices(path, self.indices[: self.stored])
        return TABLE[torch.tensor(indices[self.stored :], dtype=torch.int64)]

    def expected(self, start: int, end: int) -> torch.Tensor:
        """Returns the K and V that these tokens must have, BF16 ``[end - start, 2, 64]``."""
        return TABLE[torch.from_numpy(np.array(row_indices(self.tokens, self.indices)[start:end], dtype=np.int64))]


@dataclass
class Model:
    """Pages, rows and tree of one worker, and the device state that they drive."""

    pages: int
    slots: int
    rows: int
    sink_pages: int
    recent_pages: int
    manager: type[TierManager] = TierManager
    tree: dict[tuple, int] = field(default_factory=dict)  # whole-page prefix -> page
    used: dict[tuple, int] = field(default_factory=dict)  # prefix -> last use
    running: list[Request] = field(default_factory=list)
    overlap: bool = False  # the layers of a batch run when the next one is launched
    look_every: int = 1  # steps between page boundaries whose reads are checked
    flying: Callable[[], None] | None = None
    known: dict[bytes, torch.Tensor] = field(default_factory=dict)
    clock: int = 0
    steps: int = 0
    copied: int = 0  # prefixes made of copies
    folded: int = 0  # prefixes made of chosen tokens
    named: dict[int, list[int]] = field(default_factory=dict)  # ``indices`` of a named prefix, by its first token
    format: RecordFormat = TWO_BITS
    restored: int = 0  # BF16 reads of first pages in which only the first token is as written
    unkept: int = 0  # reads of such pages from records, if first tokens are kept
    begins: set[int] = field(default_factory=set)  # first tokens of ``named`` whose first page is a prompt's
    begun: dict[int, bool] = field(default_factory=dict)  # pages that begin a sequence: whether a prompt began with it
    idle: set[int] = field(default_factory=set)  # of ``begun``, in entries without BF16 copies after the last plan
    lost: set[int] = field(default_factory=set)  # of ``begun``, without first tokens: more idled than entries
    prefill_pages: int = 0
    reached: int = 0  # pages before their window that prefills read in BF16
    kept_pages: int | None = None  # recent pages that a running request never loses; None: all
    written: int = 1  # tokens that a step writes
    shortened: int = 0  # reads of requests that had lost recent pages
    host: Host | None = None
    shared: WindowSlots | None = None  # BF16 pages that requests want and need in a shared memory
    split: Split | None = None
    wanders: random.Random | None = None  # moves the boundary to any valid place, not only the best one
    moved: int = 0  # times that the boundary moved

    def __post_init__(self) -> None:
        arena = None
        if self.shared:
            page_bytes = padded(self.format.record_bytes)
            arena = Arena(page_bytes, 4 * P * 64, self.slots, 10**9)
            self.pages = arena.pages_beside(self.shared.needed(1))
            arena = replace(arena, pages=self.pages)
            self.split = Split(arena, self.shared)
        r2t = torch.zeros(self.rows + 1, (self.pages + 2) * P, dtype=torch.int32)
        sizes = {"pages": self.pages, "slots": self.slots, "arena": arena}
        self.pool = PagePool.allocate([self.format], kv_heads=1, req_to_token=r2t, **sizes)
        self.pool.bf16_pages.fill_(float("nan"))
        self.ops = RememberingOps(self.pool, LayerRotations())
        operations = (self.ops.quantize_slots, self.ops.restore_pages)
        soft = (self.kept_pages, self.written)
        self.tiers = self.manager(self.pool, self.sink_pages, self.recent_pages, *operations, self.prefill_pages, *soft)
        self.free = list(range(1, self.pages + 1))
        self.free_rows = list(range(1, self.rows + 1))

    # -- memory, as SGLang's allocator and tree -----------------------------------------------------

    def add_host(self, pages: int, rng: random.Random, **more) -> Model:
        """Adds host memory of ``pages`` pages and returns the model; more: further arguments of ``Host``."""
        self.host = Host(self, pages, rng, **more)
        return self

    def release(self, pages: list[int]) -> None:
        self.happen()
        self.free += pages
        for page in pages:
            self.begun.pop(page, None)
        self.tiers.pending.free_pages(torch.tensor(pages, dtype=torch.int64))

    def locked(self) -> set[tuple]:
        prefixes = {tuple(r.tokens[: n * P]) for r in self.running for n in range(1, r.protected // P + 1)}
        return prefixes | (self.host.locked() if self.host else set())

    def evict(self, count: int) -> None:
        """Frees up to ``count`` unlocked leaf pages of the tree, least recently used first."""
        for _ in range(count):
            locked = self.locked()
            parents = {key[:-P] for key in self.tree}
            leaves = [key for key in self.tree if key not in parents and key not in locked]
            if not leaves:
                return
            key = min(leaves, key=self.used.__getitem__)
            if self.host:
                self.host.demote(key)
            self.release([self.tree.pop(key)])

    def take_pages(self, count: int) -> list[int] | None:
        if count > len(self.free):
            self.evict(count - len(self.free))
        if self.split and not self.divide(count):
            return None
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        self.happen()
        if self.split:
            self.tiers.pending.allocate_pages(torch.tensor(taken, dtype=torch.int64))
        return taken

    def divide(self, count: int) -> bool:
        """Divides the shared memory so that ``count`` more pages fit; False if BF16 pages then lack room."""
        used, rows, before = self.pages - len(self.free), len(self.running), self.split.first_slot
        self.evict(self.split.excess(used + count, rows))
        used = self.pages - len(self.free)
        if not self.split.fit(used + count, rows):
            return False
        if self.wanders:
            room = (self.shared.needed(rows), self.split.arena.slots_beside(used + count))
            self.split.first_slot = self.split.arena.slots + 1 - self.wanders.randint(*room)
        if self.split.first_slot != before:
            self.moved += 1
            self.tiers.pending.move_boundary(self.split.first_slot)
        return True

    def room(self) -> int:
        """Returns how many pages may still be taken without an eviction."""
        if self.split is None:
            return len(self.free)
        return self.split.room(len(self.running)) - (self.pages - len(self.free))

    def place(self, page: int) -> int:
        """Returns the page of an id, according to the events applied so far."""
        return int(self.pool.places[page])

    def row_pages(self, request: Request, upto: int) -> list[int]:
        """Returns the row's page ids, as the scheduler knows them."""
        return (self.pool.req_to_token[request.row, :upto:P] // P).tolist()

    # -- requests -----------------------------------------------------------------------------------

    def start(self, tokens: list[int]) -> Request | None:
        if not self.free_rows:
            return None
        request = Request(list(tokens), self.free_rows.pop(0), indices=list(self.named.get(tokens[0], [])))
        self.clock += 1
        for end in range(P, len(tokens), P):  # SGLang keeps one token to compute
            key = tuple(tokens[:end])
            if key not in self.tree:
                break
            self.write_row(request.row, end - P, [self.tree[key]])
            self.used[key] = self.clock
            request.stored = request.protected = end
            request.fresh = False
        self.running.append(request)
        if self.host:
            self.host.load(request)
        return request

    def select(self, source: tuple[int, ...], chosen: list[int], tail: list[int]) -> Request | None:
        """Starts a request with copies of whole pages of a prefix in the tree, under tokens of their own.

        Returns None if there is no room, or if the prefix had to be evicted.
        """
        target = self.take_pages(len(chosen))
        if target is None:
            return None
        keys = [source[: (i + 1) * P] for i in chosen]
        if any(key not in self.tree for key in keys) or not self.may_copy([self.tree[key] for key in keys]):
            self.release(target)
            return None
        names = self._enter(target)
        windows = [i for i in range(len(chosen)) if i < self.sink_pages or i >= len(chosen) - self.recent_pages]
        self.tiers.pending.copy_pages(
            *(torch.tensor(ids, dtype=torch.int64) for ids in ([self.tree[key] for key in keys], target, windows))
        )
        self.copied += 1
        states = row_indices(list(source), [])
        if chosen[0] == 0 and self.is_first(source):
            self._begin(names, self.tree[keys[0]], target[0])
        self.named[names[0]] = [state for i in chosen for state in states[i * P : (i + 1) * P]]
        return self.start(names + tail)

    def fold(self, request: Request, chosen: list[int], publish: bool, length: int | None = None) -> list[int] | None:
        """Ends a request and keeps chosen tokens of its whole pages as a prefix in the tree, under new tokens.

        Without room the request only ends. Returns the tokens that name the prefix, or None.
        """
        full = (request.stored if length is None else length) // P
        own = self.row_pages(request, full * P)
        target = self.take_pages(len(chosen) // P) if self.may_copy(own) else None
        if target is None:
            self.leave(request, publish, length)
            return None
        names = self._enter(target)
        whole = [i for i in range(len(target)) if chosen[i * P : (i + 1) * P] == list(range(i * P, (i + 1) * P))]
        sinks = [i for i in whole if i < self.sink_pages]
        if 0 in sinks and self.is_first(request.tokens):
            self._begin(names, own[0], target[0])
        source, target, sinks = (torch.tensor(ids, dtype=torch.int64) for ids in (own, target, sinks))
        self.tiers.pending.fold_pages(source, target, torch.tensor(chosen)[None, None], sinks)
        self.folded += 1
        states = row_indices(request.tokens, request.indices)
        self.named[names[0]] = [states[i] for i in chosen]
        self.leave(request, publish, length)
        return names

    def _enter(self, pages: list[int]) -> list[int]:
        """Adds new pages to the tree under tokens that nothing else uses. Returns these tokens."""
        self.clock += 1
        names = [-(self.clock * 10**6 + i) for i in range(len(pages) * P)]
        for i, page in enumerate(pages):
            key = tuple(names[: (i + 1) * P])
            self.tree[key], self.used[key] = page, self.clock
        self.back_up(names, len(names))
        return names

    def may_copy(self, pages: list[int]) -> bool:
        """Returns False if the scheduler treats a pending or running load of these pages like missing room."""
        return self.host is None or self.host.offers(pages)

    def back_up(self, tokens: list[int], length: int) -> None:
        """Backs up whole pages of the first ``length`` tokens, which are in the tree."""
        if self.host:
            self.host.insert([tuple(tokens[:end]) for end in range(P, length + 1, P)])

    def _begin(self, names: list[int], source: int, target: int) -> None:
        """Notes a copy of a page that a prompt began with; the copy has the first token if the source has it."""
        self.begins.add(names[0])
        self.begun[target] = True
        self.lost |= {target} if source in self.lost else set()

    def write_row(self, row: int, at: int, pages: list[int]) -> None:
        loc = torch.tensor([p * P + i for p in pages for i in range(P)], dtype=torch.int32)
        self.pool.req_to_token[row, at : at + len(loc)] = loc

    def extend(self, requests: list[tuple[Request, int]]) -> bool:
        """Runs one prefill batch: each request stores its next ``n`` tokens. False if memory ran out."""
        self.land()
        if self.host:
            self.host.submit_loads()
        for request, n in requests:
            have, want = request.held, -(-(request.stored + n) // P)
            pages = self.take_pages(max(want - have, 0))
            if pages is None:
                return False
            self.write_row(request.row, have * P, pages)
            # SGLang, too, assigns pages to the row immediately.
            request.stored += n
        prefix = [r.stored - n for r, n in requests]
        new = [n for _, n in requests]
        direct = torch.from_numpy(direct_tokens(prefix, new, self.sink_pages, self.recent_pages))
        bf16_page = torch.ones(sum(new), dtype=torch.bool)
        bf16_page[(direct[:, None] + torch.arange(P)).flatten()] = False
        rows = torch.tensor([r.row for r, _ in requests])
        loc = torch.cat([self.pool.req_to_token[r.row, p : p + n] for (r, n), p in zip(requests, prefix)]).long()
        seq = torch.tensor([p + n for p, n in zip(prefix, new)])
        longest = max(p + (n == 1) for p, n in zip(prefix, new))
        loads = self.before_plan()
        if self.host:
            self.host.awaited = True
        direct_pages = self.tiers.plan_extend(rows, torch.tensor(prefix), seq, longest, loc[direct] // P)
        self.check_sink_tokens([request for request, _ in requests])
        for (request, n), p in zip(requests, prefix):
            self.check_reach(request.row, p + (n == 1), self.prefill_pages if n > 1 else 0)
        kv = torch.cat([r.expected(p, p + n) for (r, n), p in zip(requests, prefix)])
        k, v = kv[:, :1], kv[:, 1:]
        reads = [self.read(r, p, p + n) for (r, n), p in zip(requests, prefix)]
        copied = self.pool.page_slot[self.pool.places[loc // P].long()] > 0
        assert torch.equal(copied, bf16_page), "a page that is quantized directly has a BF16 copy, or another has none"

        def layers() -> None:
            if self.host:
                self.host.wait(loads)
            for check in reads:
                check()
            self.ops.store_tokens(0, loc[bf16_page], k[bf16_page], v[bf16_page])
            self.ops.quantize_tokens(0, direct, direct_pages, k, v)

        return self.fly(layers)

    def decode(self, requests: list[Request], padding: int = 0) -> bool:
        """Runs one decode step of requests whose known tokens are one more than those stored."""
        self.land()
        for request in requests:
            if not self.reserve(request, 1):
                return False
            request.stored += 1
        rows = torch.tensor([r.row for r in requests] + [0] * padding)
        seq = torch.tensor([r.stored for r in requests] + [1] * padding)
        planned = self.tiers.decode_needs_plan(seq)
        if planned:
            self.before_plan()
            self.tiers.plan_decode(rows, seq, int(seq.max()))
            self.check_sink_tokens(requests)
        loc = torch.cat(
            [self.pool.req_to_token[r.row, r.stored - 1 : r.stored] for r in requests]
            + [torch.zeros(padding, dtype=torch.int32)]
        ).long()
        kv = torch.stack([r.expected(r.stored - 1, r.stored)[0] for r in requests])
        kv = torch.cat([kv, torch.full((padding, 2, 64), 99.0).bfloat16()])
        self.steps += 1
        look = planned or self.steps % self.look_every == 0
        reads = [self.read(r, r.stored, r.stored) for r in requests] if look else []

        def layers() -> None:
            self.ops.store_tokens(0, loc, kv[:, :1], kv[:, 1:])
            for check in reads:
                check()

        return self.fly(layers)

    def reserve(self, request: Request, drafts: int) -> bool:
        """Gives a request pages for a step with ``drafts`` tokens; False if memory ran out."""
        pages = self.take_pages(request.pages_wanted(drafts))
        if pages is None:
            return False
        self.write_row(request.row, request.held * P, pages)
        request.reserved = (request.held + len(pages)) * P
        return True

    def verify(self, requests: list[Request], drafts: list[list[int]], accepted: list[int], padding: int = 0) -> bool:
        """Runs one verify step of requests that have one known token not yet stored, followed by equally many drafts.

        ``accepted`` counts that token and the drafts after it that are kept, at least one; all of them are written.
        """
        self.land()
        count = 1 + len(drafts[0])
        if not all(self.reserve(request, count) for request in requests):
            return False
        rows = torch.tensor([r.row for r in requests] + [0] * padding)
        seq = torch.tensor([r.stored + count for r in requests] + [1 + count] * padding)
        self.before_plan()
        self.tiers.plan_drafts(rows, seq, int(seq.max()), count)
        self.check_sink_tokens(requests)
        loc = torch.cat(
            [self.pool.req_to_token[r.row, r.stored : r.stored + count] for r in requests]
            + [torch.zeros(padding * count, dtype=torch.int32)]
        ).long()
        new = [r.drafted(guessed) for r, guessed in zip(requests, drafts)]
        kv = torch.cat([*new, torch.full((padding * count, 2, 64), 99.0).bfloat16()])
        self.steps += 1
        look = any(r.stored % P + count >= P for r in requests) or self.steps % self.look_every == 0
        reads = [self.read(r, r.stored, r.stored + count, own) for r, own in zip(requests, new)] if look else []

        def layers() -> None:
            self.ops.store_tokens(0, loc, kv[:, :1], kv[:, 1:])
            for check in reads:
                check()

        for request, guessed, kept in zip(requests, drafts, accepted):
            request.tokens += guessed[: kept - 1]
            request.stored += kept
            request.unknown = kept if self.overlap else 0
        return self.fly(layers)

    # -- batches in flight ----------------------------------------------------------------------------

    def fly(self, layers: Callable[[], None]) -> bool:
        """Launches a batch whose plan has run; its layers run at the next launch, or now without ``overlap``."""
        self.flying = layers
        if not self.overlap:
            self.land()
        self.happen()
        return True

    def land(self) -> None:
        """Runs the layers of the batch in flight, after all that the scheduler did since the launch."""
        layers, self.flying = self.flying, None
        if layers is not None:
            self.happen()
            layers()

    def happen(self) -> None:
        """Lets submitted copies to and from the host happen now."""
        if self.host:
            self.host.happen()

    def before_plan(self) -> list[Copy]:
        """Waits for loads that the plan itself reads. Returns other loads, for which a prefill's layers wait."""
        if self.host is None:
            return []
        self.host.before_plan()
        return list(self.host.loading)

    def submit_backups(self) -> None:
        """Submits backups, because the results of a batch have been processed."""
        if self.host:
            self.host.submit_backups()

    def publish(self, request: Request, finished: bool, length: int | None = None) -> None:
        """Inserts whole pages of the first ``length`` tokens (default: all stored) into the tree.

        Duplicates are freed and the row is repointed. Tokens that a batch in flight adds are not published.
        """
        self.clock += 1
        if self.host:
            self.host.before_insert()
        full = (request.stored if length is None else length) // P
        own = self.row_pages(request, full * P)
        place = self.tiers.pending.reserve_move()
        kept = []
        for i, page in enumerate(own):
            key = tuple(request.tokens[: (i + 1) * P])
            kept.append(self.tree.setdefault(key, page))
            self.used[key] = self.clock
            if kept[-1] != page and i * P >= request.protected:
                self.release([page])
        self.tiers.pending.fill_move(place, torch.tensor(own, dtype=torch.int64), torch.tensor(kept, dtype=torch.int64))
        if not finished:
            self.write_row(request.row, 0, kept)
        request.protected = max(full * P, request.protected)
        self.back_up(request.tokens, full * P)

    def leave(self, request: Request, publish: bool, length: int | None = None) -> None:
        """Ends a request (``publish``), or aborts or retracts it (without); its row and private pages are freed."""
        own = self.row_pages(request, request.held * P)
        if self.host:
            self.host.left(request)
        if publish:
            self.publish(request, finished=True, length=length)
        self.release(own[request.protected // P :])
        self.running.remove(request)
        self.free_rows.append(request.row)
        self.tiers.pending.free_rows([request.row])

    def flush(self) -> None:
        assert not self.running
        if self.host:
            self.host.reset()
        self.tree.clear()
        self.free = list(range(1, self.pages + 1))
        self.begun.clear()
        self.tiers.reset()

    # -- the oracle -----------------------------------------------------------------------------------

    def read(self, request: Request, length: int, after: int, own: torch.Tensor | None = None) -> Callable[[], None]:
        """Returns a check, for when the layers run, that the request reads exactly its first ``length`` tokens.

        ``after`` counts the tokens stored once the batch has run; ``own`` holds tokens that the batch writes first and
        then also reads.
        """
        row, fresh, want = request.row, request.fresh, request.expected(0, length)
        if own is not None:
            want, length = torch.cat([want, own]), length + len(own)
        want = want.permute(1, 0, 2)  # [2, length, 64]
        first = self.first_page(row)
        kept = self.tiers.sink_cache is not None and length > 0 and bool(self.pool.sink_cache.kept(first))
        lost = not self.is_first(request.tokens) or int(first) in {self.place(page) for page in self.lost}

        def check() -> None:
            sink_end, history_end = int(self.pool.row_sink_end[row]), int(self.pool.row_history_end[row])
            # Kernels read all 64 tokens of a page of the history.
            assert history_end % P == 0 and history_end <= max(length // P * P, sink_end), (history_end, length)
            got = torch.stack(self.ops._stored(0, row, length))[:, 0]
            for i in range(-(-length // P)):
                span = slice(i * P, min(i * P + P, length))
                page = want[:, span]
                if sink_end <= i * P < history_end:
                    page = self.rounded(page)
                    if i == 0 and self.tiers.sink_cache is not None:
                        assert not kept, f"row {row} reads a record's first token, and a better one is kept"
                        assert lost, f"row {row} reads a record's first token, and no more idle than there are entries"
                        self.unkept += self.is_first(request.tokens)
                elif i == 0 and self.tiers.sink_cache is not None and not torch.equal(got[:, span], page):
                    page = torch.cat([page[:, :1], self.rounded(page)[:, 1:]], dim=1)
                    self.restored += 1
                assert torch.equal(got[:, span], page), (
                    f"row {row} reads other keys and values in page {i}; history {sink_end} to {history_end}"
                )
            if fresh:
                # A request that computed everything itself never loses a window page. While a prefill batch runs,
                # however, the previous window may already have lost pages to the next one.
                target = max(after // P - self.recent_pages, self.sink_pages) * P
                assert sink_end >= min(self.sink_pages * P, length)
                self.shortened += history_end > max(target, sink_end)
                pinned = (after - self.written) // P - self.tiers.kept_pages
                assert history_end <= max(target, pinned * P, sink_end), (history_end, target, pinned)

        return check

    def page_of(self, key: tuple[int, ...]) -> torch.Tensor:
        """Returns K and V of the last page of a prefix, BF16 ``[2, P, 64]``."""
        states = row_indices(list(key), self.named.get(key[0], [])[: len(key)])
        return TABLE[torch.tensor(states[-P:], dtype=torch.int64)].permute(1, 0, 2)

    def check_reach(self, row: int, length: int, more: int) -> None:
        """Checks that a prefill's history ends as early as BF16 pages allow, at most ``more`` pages early."""
        lost = (self.pool.page_slot[self.pool.row_pages[row, : -(-length // P)].long()] < 0).tolist()
        window = max(length // P - self.recent_pages, self.sink_pages)
        earliest = max(length // P - self.recent_pages - more, self.sink_pages)
        end = int(self.pool.row_history_end[row]) // P
        assert not any(lost[max(end, self.sink_pages) :]), f"row {row} reads BF16 pages from page {end}: {lost}"
        assert end <= earliest or lost[end - 1], f"row {row} reads page {end - 1} from its record: {lost}"
        assert end >= min(earliest, len(lost)) or end <= self.sink_pages, (end, earliest)
        self.reached += max(window - max(end, self.sink_pages), 0)

    def check_sink_tokens(self, requests: Sequence[Request]) -> None:
        """Checks invariant 12 after a plan: a first token is in a BF16 copy or, while entries suffice, kept.

        Pages compete for entries if they were idle before the plan or are now: an entry freed by a restored page is
        available only to the next plan.
        """
        sink_cache = self.tiers.sink_cache
        if sink_cache is None:
            return
        for request in requests:
            self.begun[self.row_pages(request, 1)[0]] = self.is_first(request.tokens)
        slots, entries = self.pool.page_slot.tolist(), sink_cache.entry.tolist()
        idle = {page for page in self.begun if slots[self.place(page)] < 0}
        kept = {page for page in idle if entries[self.place(page)] > 0}
        unkept = {page for page in idle - kept if self.begun[page]}
        wanted = kept | (unkept - self.lost) | (self.idle & self.begun.keys())
        for page in unkept - self.lost:
            assert len(wanted) > sink_cache.count, (
                f"the first token of page {page} is lost: {len(wanted)} idle, {sink_cache.count} entries"
            )
        self.idle, self.lost = kept, unkept

    def is_first(self, tokens: Sequence[int]) -> bool:
        """Returns whether these tokens' first page is one that a prompt began with, or a whole copy of one."""
        return tokens[0] >= 0 or tokens[0] in self.begins

    def first_page(self, row: int) -> torch.Tensor:
        """Returns the row's first page as the last plan found it, int64 ``[1]``."""
        return self.pool.row_pages[row, :1].long()

    def rounded(self, page: torch.Tensor) -> torch.Tensor:
        """Returns the values that the record of a page, BF16 ``[2, P, 64]``, is read as."""
        key = page.view(torch.int16).numpy().tobytes()
        if key not in self.known:
            format = self.pool.formats[0]
            record = format.quantize_pages(page[0][None, None], page[1][None, None])
            self.known[key] = torch.stack(format.dequantize_pages(record))[:, 0, 0].bfloat16()
        return self.known[key]

    def check(self) -> None:
        """Checks that every page is in one place and, with no batch in flight, that the device agrees."""
        if self.flying is None:
            self.before_plan()
            free = torch.tensor(self.free, dtype=torch.int64)
            loading = self.host and self.host.to_load
            check_integrity(self.tiers, free, idle=not (self.running or loading))
        if self.host:
            self.host.check_all()
        owned = [p for r in self.running for p in self.row_pages(r, r.held * P)[r.protected // P :]]
        everything = self.free + owned + list(self.tree.values())
        assert sorted(everything) == list(range(1, self.pages + 1)), "a page is lost or owned twice"

    def check_empty(self) -> None:
        """Flushes the tree after everything finished, and checks that both pools are empty."""
        self.land()
        if self.host:
            self.host.settle()
        self.evict(self.pages)
        self.check()
        assert len(self.free) == self.pages and not self.tree
        assert self.tiers.counts().slots_used == 0
