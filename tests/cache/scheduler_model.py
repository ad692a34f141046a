"""A scheduler in plain Python dictionaries that drives a TierManager the way SGLang does.

Keys and values are a function of the tokens before them, so what any page must hold is known
without looking at the pool: that is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.cache.integrity import check_integrity
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.config import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.cache.split import split_new_tokens

TABLE = torch.randn(4096, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def row_indices(tokens: list[int], known: list[int]) -> list[int]:
    """Index into ``TABLE`` of each token given all before it; ``known`` holds those of a prefix."""
    state = known[-1] if known else 17
    for token in tokens[len(known) :]:
        state = (state * 31 + token + 7) % len(TABLE)
        known.append(state)
    return known


@dataclass
class Request:
    tokens: list[int]  # known tokens: prompt and generated
    row: int
    stored: int = 0  # tokens in the cache
    protected: int = 0  # tokens of it that belong to the tree
    fresh: bool = True  # never hit the tree: its window must be complete
    indices: list[int] = field(default_factory=list)

    def expected(self, start: int, end: int) -> torch.Tensor:
        """BF16 ``[end - start, 2, 64]``: K and V that these tokens must have."""
        return TABLE[row_indices(self.tokens, self.indices)[start:end]]


@dataclass
class Model:
    """Pages, rows and tree of one worker, and the device state they drive."""

    pages: int
    slots: int
    rows: int
    sink_pages: int
    recent_pages: int
    manager: type[TierManager] = TierManager
    tree: dict[tuple, int] = field(default_factory=dict)  # whole-page prefix -> page
    used: dict[tuple, int] = field(default_factory=dict)  # prefix -> last use
    running: list[Request] = field(default_factory=list)
    clock: int = 0

    def __post_init__(self) -> None:
        r2t = torch.zeros(self.rows + 1, (self.pages + 2) * P, dtype=torch.int32)
        self.pool = PagePool.allocate(
            [PageFormat(64, 64, 0.96, 0.92)], kv_heads=1, pages=self.pages, slots=self.slots, req_to_token=r2t
        )
        self.pool.overlays.fill_(float("nan"))
        self.ops = ReferenceOps(self.pool, LayerRotations())
        self.tiers = self.manager(self.pool, self.sink_pages, self.recent_pages, self.ops.quantise_slots)
        self.free = list(range(1, self.pages + 1))
        self.free_rows = list(range(1, self.rows + 1))

    # -- memory, as SGLang's allocator and tree -----------------------------------------------------

    def release(self, pages: list[int]) -> None:
        self.free += pages
        self.tiers.pending.free_pages(torch.tensor(pages, dtype=torch.int64))

    def locked(self) -> set[tuple]:
        return {tuple(r.tokens[: n * P]) for r in self.running for n in range(1, r.protected // P + 1)}

    def evict(self, count: int) -> None:
        """Free up to ``count`` unlocked leaf pages of the tree, least recently used first."""
        for _ in range(count):
            locked = self.locked()
            parents = {key[:-P] for key in self.tree}
            leaves = [key for key in self.tree if key not in parents and key not in locked]
            if not leaves:
                return
            key = min(leaves, key=self.used.__getitem__)
            self.release([self.tree.pop(key)])

    def take_pages(self, count: int) -> list[int] | None:
        if count > len(self.free):
            self.evict(count - len(self.free))
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def row_pages(self, request: Request, upto: int) -> list[int]:
        return (self.pool.req_to_token[request.row, :upto:P] // P).tolist()

    # -- requests -----------------------------------------------------------------------------------

    def start(self, tokens: list[int]) -> Request | None:
        if not self.free_rows:
            return None
        request = Request(list(tokens), self.free_rows.pop(0))
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
        return request

    def write_row(self, row: int, at: int, pages: list[int]) -> None:
        loc = torch.tensor([p * P + i for p in pages for i in range(P)], dtype=torch.int32)
        self.pool.req_to_token[row, at : at + len(loc)] = loc

    def extend(self, requests: list[tuple[Request, int]]) -> bool:
        """One prefill batch: each request stores its next ``n`` tokens. False if memory ran out."""
        for request, n in requests:
            have, want = -(-request.stored // P), -(-(request.stored + n) // P)
            pages = self.take_pages(want - have)
            if pages is None:
                return False
            self.write_row(request.row, have * P, pages)
            # Pages are charged to the row at once, as SGLang does.
            request.stored += n
        prefix = [r.stored - n for r, n in requests]
        new = [n for _, n in requests]
        overlay, direct = split_new_tokens(prefix, new, self.sink_pages, self.recent_pages)
        rows = torch.tensor([r.row for r, _ in requests])
        loc = torch.cat([self.pool.req_to_token[r.row, p : p + n] for (r, n), p in zip(requests, prefix)]).long()
        overlay, direct = torch.from_numpy(overlay), torch.from_numpy(direct)
        seq = torch.tensor([p + n for p, n in zip(prefix, new)])
        self.tiers.plan_extend(rows, torch.tensor(prefix), seq, max(prefix), loc[direct] // P)
        for (request, _), p in zip(requests, prefix):
            self.check_reads(request, p, request.stored)
        kv = torch.cat([r.expected(p, p + n) for (r, n), p in zip(requests, prefix)])
        k, v = kv[:, :1], kv[:, 1:]
        self.ops.store_tokens(0, loc[overlay], k[overlay], v[overlay])
        self.ops.quantise_tokens(0, direct, loc[direct] // P, k, v)
        return True

    def decode(self, requests: list[Request], padding: int = 0) -> bool:
        """One decode step of requests whose known tokens are one more than those stored."""
        for request in requests:
            if request.stored % P == 0:
                pages = self.take_pages(1)
                if pages is None:
                    return False
                self.write_row(request.row, request.stored, pages)
            request.stored += 1
        rows = torch.tensor([r.row for r in requests] + [0] * padding)
        seq = torch.tensor([r.stored for r in requests] + [1] * padding)
        if self.tiers.decode_needs_plan(seq):
            self.tiers.plan_decode(rows, seq, int(seq.max()))
        loc = torch.cat(
            [self.pool.req_to_token[r.row, r.stored - 1 : r.stored] for r in requests]
            + [torch.zeros(padding, dtype=torch.int32)]
        ).long()
        kv = torch.stack([r.expected(r.stored - 1, r.stored)[0] for r in requests])
        kv = torch.cat([kv, torch.full((padding, 2, 64), 99.0).bfloat16()])
        self.ops.store_tokens(0, loc, kv[:, :1], kv[:, 1:])
        for request in requests:
            self.check_reads(request, request.stored, request.stored)
        return True

    def publish(self, request: Request, finished: bool) -> None:
        """Insert whole pages into the tree; duplicates are freed and the row is repointed."""
        self.clock += 1
        full = request.stored // P
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
        request.protected = full * P

    def leave(self, request: Request, publish: bool) -> None:
        """Finish (publish) or abort/retract (do not): the row and private pages are given back."""
        own = self.row_pages(request, request.stored)
        start = request.protected // P
        if publish:
            start = request.stored // P
            self.publish(request, finished=True)
        self.release(own[start:])
        self.running.remove(request)
        self.free_rows.append(request.row)
        self.tiers.pending.free_rows([request.row])

    def flush(self) -> None:
        assert not self.running
        self.tree.clear()
        self.free = list(range(1, self.pages + 1))
        self.tiers.reset()

    # -- the oracle -----------------------------------------------------------------------------------

    def check_reads(self, request: Request, length: int, after: int) -> None:
        """What the request would read of its first ``length`` tokens is exactly what they say.

        ``after`` counts the tokens stored once the batch has run.
        """
        sink_end = int(self.pool.row_sink_end[request.row])
        history_end = int(self.pool.row_history_end[request.row])
        rows = request.expected(0, length)
        for i, page in enumerate(self.row_pages(request, length)):
            n = min(P, length - i * P)
            want = rows[i * P : i * P + n].transpose(0, 1)  # [2, n, 64]
            if sink_end <= i * P < history_end:
                record = self.pool.formats[0].quantise_pages(want[0], want[1])
                assert torch.equal(self.pool.records[0][page, 0], record), f"record of page {page}"
            else:
                slot = int(self.pool.page_slot[page])
                assert slot > 0, f"page {page} at {i * P} has no overlay, history ends at {history_end}"
                got = self.pool.overlays[0, slot, :, 0, :n]
                assert torch.equal(got, want), f"overlay of page {page}"
        target = max(after // P - self.recent_pages, self.sink_pages) * P
        if request.fresh:
            # A request that computed everything itself never loses a window page; while a prefill
            # batch runs, the window it leaves behind may already have given way to the next.
            assert sink_end >= min(self.sink_pages * P, length)
            assert history_end <= max(target, sink_end), (history_end, target)

    def check(self) -> None:
        check_integrity(self.tiers, torch.tensor(self.free, dtype=torch.int64))
        owned = [p for r in self.running for p in self.row_pages(r, r.stored)[r.protected // P :]]
        everything = self.free + owned + list(self.tree.values())
        assert sorted(everything) == list(range(1, self.pages + 1)), "a page is lost or owned twice"

    def check_empty(self) -> None:
        """After everything finished and the tree is flushed, both pools are empty."""
        self.evict(self.pages)
        self.check()
        assert len(self.free) == self.pages and not self.tree
        assert self.tiers.counts().slots_used == 0

