"""Two servers' caches and the wire between them: the decode server reads what the prefill server computed."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang.disaggregation.handover import Handover
from sglang_kvq.sglang.disaggregation.staging import MOST_ENTRIES, entries_for, window_of
from tests.cache.scheduler_model import PLANES, TWO_BITS, Model, Request
from tests.pairs import each, few

ENTRIES = 3


def transfers(model: Model, decode: bool) -> Handover:
    return Handover(
        model.pool,
        decode=decode,
        sink_pages=model.sink_pages,
        recent_pages=model.recent_pages,
        entries=ENTRIES,
    )


@dataclass(eq=False)
class Sent:
    """A request between the servers: its two halves, and the transfers still on the wire."""

    prefill: Request
    decode: Request
    prefix: int
    wire: list[Callable[[], None]] = field(default_factory=list)


class Pair:
    """A prefill server and a decode server; bytes move as SGLang moves them, by pointers and bytes per page.

    ``drafts`` is how many tokens a decode step writes for each request; 1 means that nothing is drafted.
    """

    def __init__(
        self,
        rng: random.Random,
        overlap: bool,
        format=TWO_BITS,
        radix: bool = False,
        manager=TierManager,
        drafts: int = 1,
    ) -> None:
        rows, sinks, recent = rng.randint(2, 4), rng.randint(0, 2), rng.randint(1, 3)
        slots, more = rows * (sinks + recent + 1), {"overlap": overlap, "format": format, "manager": manager}
        self.rng, self.radix, self.drafts = rng, radix, drafts
        self.p = Model(60, slots + rows, rows, sinks, recent, prefill_pages=2, **more)
        self.d = Model(60, slots, rows + 2, sinks, recent, **more)
        self.most_running = rows  # the decode server's other rows wait for their cache
        self.hp, self.hd = transfers(self.p, False), transfers(self.d, True)
        self.under_way: list[Sent] = []
        self.decoding: list[Request] = []
        self.retracted: list[tuple[Request, object]] = []
        self.counts = {"arrived": 0, "aborted": 0, "restored": 0, "prefix": 0}

    # -- the prefill server --------------------------------------------------------------------------

    def compute(self, tokens: list[int], entry: int) -> Request | None:
        """Computes a prompt in chunks of whole pages; the last chunk packs the window."""
        p, rng = self.p, self.rng
        request = p.start(tokens)
        if request is None:
            return None
        while request.stored < len(tokens):
            left = len(tokens) - request.stored
            chunk = rng.choice((left, min(left, P * rng.randint(1, 4))))
            if not p.extend([(request, chunk)]):
                p.leave(request, publish=False)
                return None
            ends = request.stored == len(tokens)
            work = self.hp.computing(request.row, request.stored, entry if ends else None)
            layers = p.flying or (lambda: None)

            def fly(layers=layers, work=work) -> None:
                layers()
                self.hp.computed(work, p.tiers)

            p.flying = fly
            if not p.overlap:
                p.land()
            p.publish(request, finished=False)
        p.land()
        return request

    # -- between the servers -------------------------------------------------------------------------

    def send(self, tokens: list[int]) -> None:
        d = self.d
        if not self.hd.staging.available() or not d.free_rows:
            return
        request = self.compute(tokens, entry=self.rng.randrange(ENTRIES))
        if request is None:
            return
        theirs = d.start(tokens)
        if theirs is None:
            self.p.leave(request, publish=True)
            return
        if not self.radix:
            assert theirs.protected == 0
        pages = d.take_pages(-(-len(tokens) // P) - theirs.held)
        if pages is None:
            d.leave(theirs, publish=False)
            self.p.leave(request, publish=True)
            return
        d.write_row(theirs.row, theirs.held * P, pages)
        prefix, theirs.stored, theirs.fresh = theirs.protected, len(tokens), request.fresh
        self.counts["prefix"] += prefix > 0
        sent = Sent(request, theirs, prefix)
        source = self.p.row_pages(request, len(tokens))[prefix // P :]
        target = d.row_pages(theirs, len(tokens))[prefix // P :]
        sent.wire.append(lambda: move(self.hp.buffers(), self.hd.buffers(), source, target))
        rows = self.hp.staged_rows(request.row, len(tokens)), self.hd.staged_rows(theirs.row, len(tokens))
        assert len(rows[0]) == len(rows[1])
        move(self.hp.staging.buffers(), self.hd.staging.buffers(), *rows)  # the entry is free for the next request
        self.under_way.append(sent)

    def arrive(self, sent: Sent) -> None:
        for part in sent.wire:
            part()
        self.under_way.remove(sent)
        self.p.leave(sent.prefill, publish=True)
        request = sent.decode
        self.hd.arrive(request.row, request.stored, sent.prefix, self.d.tiers)
        if self.radix:
            self.d.publish(request, finished=False)
        self.decoding.append(request)
        self.counts["arrived"] += 1

    def abort(self, sent: Sent) -> None:
        for part in sent.wire[: self.rng.randint(0, 1)]:
            part()
        self.under_way.remove(sent)
        self.p.leave(sent.prefill, publish=True)
        self.leave_unrun(sent.decode)
        self.counts["aborted"] += 1

    def leave_unrun(self, request: Request) -> None:
        """Ends a request that has not run; SGLang asks to publish it if it was aborted when its cache was there."""
        wanted = self.radix and self.rng.random() < 0.5
        self.d.leave(request, publish=wanted and not self.hd.waits(request.row))
        self.hd.free_row(request.row)

    # -- the decode server ---------------------------------------------------------------------------

    def decode(self, steps: int) -> None:
        d = self.d
        for _ in range(steps):
            while self.pages_wanted() > len(d.free):
                d.evict(1)
                if self.pages_wanted() > len(d.free) and self.decoding:
                    self.retract(self.decoding[-1])
            if not self.decoding:
                return
            for request in self.decoding:
                request.tokens.append(self.rng.randint(0, 3))
            if self.drafts == 1:
                assert d.decode(self.decoding)
                continue
            drafts = [[self.rng.randint(0, 3) for _ in range(self.drafts - 1)] for _ in self.decoding]
            assert d.verify(self.decoding, drafts, [self.rng.randint(1, self.drafts) for _ in self.decoding])

    def pages_wanted(self) -> int:
        return sum(request.pages_wanted(self.drafts) for request in self.decoding)

    def retract(self, request: Request) -> None:
        """Retracts a request, and forgets tokens that a batch in flight accepts, because they are not known yet."""
        d = self.d
        d.land()
        self.decoding.remove(request)
        request.stored -= request.unknown
        del request.tokens[request.stored :], request.indices[request.stored :]
        saved = self.hd.save(d.pool.req_to_token[request.row, : request.stored], d.tiers)
        d.leave(request, publish=False)
        self.retracted.append((request, saved))

    def resume(self) -> None:
        request, saved = self.retracted[0]
        d = self.d
        pages = d.take_pages(-(-request.stored // P)) if d.free_rows else None
        if pages is None:
            return
        d.land()
        del self.retracted[0]
        back = Request(request.tokens[: request.stored], d.free_rows.pop(0), stored=request.stored, fresh=request.fresh)
        back.tokens, back.indices = list(request.tokens), request.indices
        d.running.append(back)
        d.write_row(back.row, 0, pages)
        self.hd.restore(saved, d.pool.req_to_token[back.row, : back.stored], back.row)
        self.hd.arrive(back.row, back.stored, 0, d.tiers)
        self.decoding.append(back)
        self.counts["restored"] += 1

    def leave(self, request: Request) -> None:
        self.decoding.remove(request)
        self.d.land()
        self.d.leave(request, publish=self.radix and self.rng.random() < 0.7)

    def check(self) -> None:
        self.p.check()
        self.d.check()

    def run(self, events: int) -> None:
        rng = self.rng
        for _ in range(events):
            kind = rng.choice(("send", "send", "arrive", "arrive", "decode", "decode", "leave", "abort", "retract"))
            room = self.most_running - len(self.decoding)
            if kind == "send":
                length, stride = rng.randint(1, 9 * P), rng.choice((1, 1, 5))
                self.send([i * stride % 241 for i in range(length)])
            elif kind == "arrive" and room > 0:
                if self.retracted:
                    self.resume()
                elif self.under_way:
                    self.arrive(rng.choice(self.under_way))
            elif kind == "decode":
                self.decode(rng.choice((1, 3, 70)))
            elif kind == "leave" and self.decoding:
                self.leave(rng.choice(self.decoding))
            elif kind == "abort" and self.under_way and rng.random() < 0.3:
                self.abort(rng.choice(self.under_way))
            elif kind == "retract" and len(self.decoding) > 1 and rng.random() < 0.5:
                self.retract(rng.choice(self.decoding))
            self.check()

    def finish(self) -> None:
        for sent in list(self.under_way):
            self.abort(sent)
        for request in list(self.decoding):
            self.leave(request)
        for model in (self.p, self.d):
            model.check_empty()
        assert self.hd.staging.available() == ENTRIES


def move(source: tuple, target: tuple, pages: list[int], others: list[int]) -> None:
    """Copies pages of all entries, paired half by half as SGLang pairs keys and values."""
    half = len(source[0]) // 2
    assert half * 2 == len(source[0]) == len(target[0])
    for first, second, size in zip(source[0], target[0], source[2]):
        for page, other in zip(pages, others, strict=True):
            ctypes.memmove(second + other * size, first + page * size, size)


@each(seed=few(range(4), 2), overlap={"in-flight": True, "alone": False})
def test_random_schedules(seed, overlap):
    """On random schedules, the decode server's reads and both servers' tables are right after every event."""
    pair = Pair(random.Random(700 + seed), overlap)
    pair.run(120)
    assert pair.counts["arrived"] > 5 and pair.counts["aborted"], pair.counts
    pair.finish()


@each(seed=range(2), overlap={"in-flight": True, "alone": False}, drafts={"two": 2, "five": 5})
def test_random_schedules_of_a_decode_server_that_drafts(seed, overlap, drafts):
    """With drafts, the first step after an arrival or a retraction writes tokens that may begin a page."""
    pair = Pair(random.Random(900 + seed), overlap, drafts=drafts)
    pair.run(160)
    assert pair.counts["arrived"] > 5 and pair.counts["aborted"], pair.counts
    pair.finish()


@pytest.mark.parametrize("steps", [1, 40, 64, 130])
def test_a_retracted_request_goes_on_where_it_was(steps):
    """One of two running requests leaves its pages and its row, and resumes in others."""
    pair = Pair(random.Random(9), overlap=True)
    for first in (0, 1000):
        pair.send(list(range(first, first + 5 * P + 3)))
        pair.arrive(pair.under_way[0])
    pair.decode(steps)
    before = pair.decoding[0]
    pages = pair.d.row_pages(before, before.stored)
    pair.retract(before)
    pair.decode(P)
    pair.resume()
    assert pair.d.row_pages(pair.decoding[-1], before.stored) != pages
    pair.decode(P)
    pair.check()
    pair.finish()


@each(seed=range(2), format={"two bits": TWO_BITS, "planes": PLANES})
def test_random_schedules_with_a_radix_tree_on_the_decode_server(seed, format):
    pair = Pair(random.Random(800 + seed), True, format, radix=True)
    pair.run(120)
    assert pair.counts["prefix"], pair.counts
    pair.finish()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 192, 193, 448, 700])
def test_the_first_step_reads_the_window_in_bf16_and_the_rest_from_records(length):
    pair = Pair(random.Random(3), overlap=False)
    pair.send(list(range(length)))
    (sent,) = pair.under_way
    pair.arrive(sent)
    pair.decode(1)  # the model compares every key and value
    row, d = sent.decode.row, pair.d
    whole = (length + 1) // P
    assert int(d.pool.row_history_end[row]) == max(whole - d.recent_pages, d.sink_pages) * P or whole <= d.sink_pages
    assert d.tiers.counts().slots_used == len(window_of(length, d.sink_pages, d.recent_pages)) + (length % P == 0)


def test_window_of_is_the_tiers_window():
    for sinks, recent in ((0, 1), (1, 2), (2, 3)):
        model = Model(60, 30, 2, sinks, recent)
        for length in range(1, 12 * P, 13):
            index, exists, _ = model.tiers.window(torch.tensor([1]), torch.tensor([length]))
            assert index[exists].tolist() == window_of(length, sinks, recent)


def test_a_page_being_filled_without_a_bf16_copy_is_an_error():
    model = Model(20, 12, 2, 1, 2)
    handover = transfers(model, False)
    request = model.start(list(range(P + 5)))
    assert model.extend([(request, P + 5)])
    work = handover.computing(request.row, P + 5, 0)
    model.pool.page_slot[work.pages[1]] = -1
    handover.computed(work, model.tiers)
    assert model.tiers.counts().errors == 1


def test_a_window_of_another_length_is_refused():
    model = Model(20, 12, 2, 1, 2)
    handover = transfers(model, True)
    handover.staged_rows(1, 100)
    with pytest.raises(RuntimeError, match="100"):
        handover.staged_rows(1, 101)
    for row in range(2, 1 + ENTRIES):
        handover.staged_rows(row, 100)
    with pytest.raises(RuntimeError, match="without room"):
        handover.staged_rows(1 + ENTRIES, 100)


def test_requests_that_end_without_a_plan_do_not_keep_their_entries():
    """Requests of one token arrive and end before any plan; even so, their entries become free again."""
    pair = Pair(random.Random(5), overlap=False)
    for n in range(ENTRIES):
        pair.send(list(range(100 + n)))
    for sent in list(pair.under_way):
        pair.arrive(sent)
    assert pair.hd.staging.available() == 0
    moving = pair.d.tiers.pending.reserve_move()
    pair.hd.settle(pair.d.tiers)
    assert pair.hd.staging.available() == 0, "not in the middle of an insertion"
    pair.d.tiers.pending.fill_move(moving, *[torch.zeros(0, dtype=torch.int64)] * 2)
    pair.hd.settle(pair.d.tiers)
    assert pair.hd.staging.available() == ENTRIES and not pair.d.tiers.pending
    assert pair.d.tiers.decode_needs_plan(torch.tensor([101]))
    assert int(pair.d.tiers.errors) == 0


def test_a_flush_gives_back_what_has_arrived():
    pair = Pair(random.Random(5), overlap=False)
    pair.send(list(range(100)))
    (sent,) = pair.under_way
    pair.arrive(sent)
    assert pair.hd.staging.available() == ENTRIES - 1
    pair.d.tiers.reset()
    assert pair.hd.staging.available() == ENTRIES


def test_entries():
    assert [entries_for(n) for n in (None, 1, 8, 1000)] == [MOST_ENTRIES, 2, 8, MOST_ENTRIES]
