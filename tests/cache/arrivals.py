"""A prefill server and a decode server around ``scheduler_model``: requests are computed in one and go on in the other.

SGLang gives a request pages and a row of the decode server, and its cache arrives there later. Requests that then begin
to run together are recorded as arrivals. With a prefix cache on the decode server their whole pages enter the tree
before the next plan, and equal pages of the tree replace them. A retracted request is saved in host memory and arrives
once more. The decode server never prefills.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_kvq.cache.pool import PACKED_TAIL
from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.sglang.disaggregation.handover import Handover, SavedRow
from tests.cache.scheduler_model import TWO_BITS, Model, Request
from tests.cache.schedules import Driver

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
    """A request that waits at the decode server: its two halves, and the transfers still on the wire.

    ``prefill`` is None for a retracted request, which was restored from host memory.
    """

    prefill: Request | None
    decode: Request
    prefix: int = 0
    wire: list[Callable[[], None]] = field(default_factory=list)


class Pair(Driver):
    """Draws events of both servers; bytes move as SGLang moves them, by pointers and bytes per page.

    ``model`` is the decode server. ``radix`` gives it a prefix cache.
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
        slots, more = rows * (sinks + recent + 1), {"overlap": overlap, "format": format, "look_every": 4}
        super().__init__(Model(60, slots, rows + 3, sinks, recent, manager, **more), rng, drafts=drafts)
        self.prefiller = Model(60, slots + rows, rows, sinks, recent, prefill_pages=2, **more)
        self.radix = radix
        self.most_running = rows  # the decode server's other rows wait for their cache
        self.sender, self.receiver = transfers(self.prefiller, False), transfers(self.model, True)
        self.prompts: list[list[int]] = []
        self.under_way: list[Sent] = []
        self.retracted: list[tuple[Request, SavedRow]] = []
        self.counts = {"arrived": 0, "aborted": 0, "restored": 0, "prefix": 0}

    # -- the prefill server --------------------------------------------------------------------------

    def compute(self, tokens: list[int], entry: int) -> Request | None:
        """Computes a prompt in chunks of whole pages; the last chunk packs the window."""
        p, rng = self.prefiller, self.rng
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
            work = self.sender.computing(request.row, request.stored, entry if ends else None)
            layers = p.flying or (lambda: None)

            def fly(layers=layers, work=work) -> None:
                layers()
                self.sender.computed(work, p.tiers)

            p.flying = fly
            if not p.overlap:
                p.land()
            p.publish(request, finished=False)
        p.land()
        return request

    # -- between the servers -------------------------------------------------------------------------

    def prompt(self) -> list[int]:
        """Returns a new prompt, or one of the last: sent before, or the next turn of a request that has ended."""
        rng = self.rng
        if self.prompts and rng.random() < 0.7:
            return rng.choice(self.prompts[-2:])
        stride = rng.choice((1, 1, 5))
        return [i * stride % 241 for i in range(rng.randint(1, 9 * P))]

    def send(self, tokens: list[int]) -> None:
        d = self.model
        if not self.receiver.staging.available():
            d.land()
            self.receiver.settle(d.tiers)
        if not self.receiver.staging.available() or not d.free_rows:
            return
        self.prompts.append(tokens)
        request = self.compute(tokens, entry=self.rng.randrange(ENTRIES))
        if request is None:
            return
        theirs = d.start(tokens)
        assert self.radix or theirs.protected == 0
        pages = d.take_pages(-(-len(tokens) // P) - theirs.held)
        if pages is None:
            d.leave(theirs, publish=False)
            self.prefiller.leave(request, publish=True)
            return
        d.write_row(theirs.row, theirs.held * P, pages)
        prefix, theirs.stored = theirs.protected, len(tokens)
        self.counts["prefix"] += prefix > 0
        sent = Sent(request, theirs, prefix)
        source = self.prefiller.row_pages(request, len(tokens))[prefix // P :]
        target = d.row_pages(theirs, len(tokens))[prefix // P :]
        sent.wire.append(lambda: move(self.sender.buffers(), self.receiver.buffers(), source, target))
        rows = [side.staged_rows(x.row, len(tokens)) for side, x in ((self.sender, request), (self.receiver, theirs))]
        assert len(rows[0]) == len(rows[1])
        move(self.sender.staging.buffers(), self.receiver.staging.buffers(), *rows)  # frees the entry for the next one
        theirs.fresh = bool((self.receiver.staging.table[0, rows[1], -PACKED_TAIL] > 0).all())
        self.under_way.append(sent)

    def arrive(self, *batch: Sent) -> None:
        """Lets requests run, as one batch: all arrivals are recorded before the tree gets their pages."""
        for sent in batch:
            self.landed(sent, len(sent.wire))
            self.receiver.arrive(sent.decode.row, sent.decode.stored, sent.prefix, self.model.tiers)
            self.counts["restored" if sent.prefill is None else "arrived"] += 1
        for sent in batch if self.radix else ():
            self.model.publish(sent.decode, finished=False)
        self.decoding += [sent.decode for sent in batch]

    def abort(self, sent: Sent) -> None:
        """Ends a request that has not run; SGLang asks to publish it if it was aborted when its cache was there."""
        self.landed(sent, self.rng.randint(0, len(sent.wire)))
        wanted = self.radix and self.rng.random() < 0.5
        self.model.leave(sent.decode, publish=wanted and not self.receiver.waits(sent.decode.row))
        self.receiver.free_row(sent.decode.row)
        self.counts["aborted"] += 1

    def landed(self, sent: Sent, parts: int) -> None:
        """Moves the first ``parts`` of what is on the wire; the request no longer waits."""
        for part in sent.wire[:parts]:
            part()
        self.under_way.remove(sent)
        if sent.prefill is not None:
            self.prefiller.leave(sent.prefill, publish=True)

    # -- the decode server ---------------------------------------------------------------------------

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.decode(padding=self.rng.randint(0, 2))

    def leave(self, request: Request, publish: bool) -> None:
        super().leave(request, publish and self.radix)
        self.prompts.append(request.tokens[: min(request.stored, 9 * P)] + [9] * self.rng.randint(1, 100))

    def retract(self, request: Request) -> None:
        """Retracts a request, and forgets tokens of batches whose results are not known yet."""
        d, tokens = self.model, self.end(request)
        d.land()
        saved = self.receiver.save(d.pool.req_to_token[request.row, :tokens], d.tiers)
        d.leave(request, publish=False)
        kept = Request(request.tokens[:tokens], 0, tokens, fresh=request.fresh, indices=request.indices[:tokens])
        self.retracted.append((kept, saved))

    def resume(self) -> None:
        """Restores the request that was retracted first, if there is room; it then waits to run."""
        d, (request, saved) = self.model, self.retracted[0]
        pages = d.take_pages(-(-request.stored // P)) if d.free_rows else None
        if pages is None:
            return
        d.land()
        del self.retracted[0]
        request.row = d.free_rows.pop(0)
        d.running.append(request)
        d.write_row(request.row, 0, pages)
        self.receiver.restore(saved, d.pool.req_to_token[request.row, : request.stored], request.row)
        self.under_way.append(Sent(None, request))

    def event(self) -> None:
        rng = self.rng
        kind = rng.choice(
            ("send", "send", "arrive", "arrive", "decode", "decode", "leave", "abort", "retract", "evict")
        )
        room = self.most_running - len(self.decoding)
        if kind == "send" and self.retracted:
            self.resume()
        elif kind == "send":
            self.send(self.prompt())
        elif kind == "arrive" and room > 0:
            self.arrive(*rng.sample(self.under_way, min(len(self.under_way), rng.choice((1, room)))))
        elif kind == "decode":
            self.steps(-(-rng.choice((1, 3, 3, 70)) // self.drafts))
        elif kind == "leave" and self.decoding:
            self.leave(rng.choice(self.decoding), publish=rng.random() < 0.7)
        elif kind == "abort" and self.under_way and rng.random() < 0.3:
            self.abort(rng.choice(self.under_way))
        elif kind == "retract" and len(self.decoding) > 1 and rng.random() < 0.5:
            self.retract(rng.choice(self.decoding))
        elif kind == "evict":
            self.evict(rng.choice((0, 1, 5)))
        self.prefiller.check()

    def finish(self) -> None:
        for sent in list(self.under_way):
            self.abort(sent)
        super().finish()
        self.prefiller.check_empty()
        assert self.receiver.staging.available() == ENTRIES


def move(source: tuple, target: tuple, pages: list[int], others: list[int]) -> None:
    """Copies pages of all entries, paired half by half as SGLang pairs keys and values."""
    half = len(source[0]) // 2
    assert half * 2 == len(source[0]) == len(target[0])
    for first, second, size in zip(source[0], target[0], source[2]):
        for page, other in zip(pages, others, strict=True):
            ctypes.memmove(second + other * size, first + page * size, size)
