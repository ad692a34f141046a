"""Long random schedules for ``scheduler_model`` whose steps mostly decode, which a shrinking search rarely tries."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sglang_kvq.cache.shared.split import WindowSlots
from sglang_kvq.constants import PAGE_SIZE as P
from tests.cache.scheduler_model import Model, Request

#: Values of a model's ``overlap``, by their names in test ids.
OVERLAP = {"in-flight": True, "alone": False}


def random_model(rng: random.Random, overlap: bool = True, **more) -> Model:
    """Returns a model with a small pool under pressure: few BF16 pages beyond those that rows may pin."""
    rows, sinks, recent = rng.randint(1, 5), rng.randint(0, 2), rng.randint(1, 3)
    # Each row has one BF16 page beyond its window, because it may resume in the middle of a page.
    slots = rows * (sinks + recent + 2) + rng.randint(0, 6)
    more.setdefault("prefill_pages", rng.choice([0, 1, 4, 20]))
    return Model(rng.randint(30, 60), slots, rows, sinks, recent, overlap=overlap, **more)


def shared_model(rng: random.Random, drafts: int = 1, **more) -> Model:
    """Returns a model whose shared memory is nearly filled by the pages of a few requests, or by BF16 pages."""
    rows, recent = more.pop("rows", rng.randint(2, 5)), more.pop("recent", rng.randint(1, 4))
    sinks, kept = more.pop("sinks", rng.randint(0, 2)), more.pop("kept", rng.randint(0, recent))
    # A batch writes the windows of some requests, each of which may resume in the middle of a page.
    least = sinks + kept + 1 + (drafts > 1)  # drafts may span two pages
    windows = WindowSlots(sinks + recent + 1, least, more.pop("batch", 3) * (recent - kept + 1))
    slots = windows.needed(rows) + more.pop("room", rng.randint(3, 12))
    more = {"kept_pages": kept, "written": drafts, "prefill_pages": rng.choice([0, 1, 4]), "shared": windows, **more}
    return Model(0, slots, rows, sinks, recent, wanders=rng if rng.random() < 0.8 else None, **more)


def soft_model(rng: random.Random, drafts: int = 1, **more) -> Model:
    """Returns a model in which one request's prefill must take recent pages of other rows."""
    rows, sinks, recent = rng.randint(3, 5), rng.randint(0, 1), rng.randint(3, 5)
    kept = rng.randint(0, 1)
    # Drafts may span two pages, and a row that a prefill resumes in the middle of a page needs one more.
    slots = rows * (sinks + kept + 1 + (drafts > 1)) + recent - kept + 1
    more = {"kept_pages": kept, "written": drafts, "prefill_pages": rng.choice([0, 1, 4]), **more}
    return Model(16 * rows, slots, rows, sinks, recent, **more)


@dataclass
class Driver:
    """Draws random events of every kind, mostly decoding; prompts share prefixes, fork and are computed twice.

    With batches in flight (``Model.overlap``), events come in SGLang's order: a batch is launched, then the results of
    the batch before it are processed. Prompts are thus published, and requests end, while the next step runs.

    Attributes:
        operations: events of requests and pages so far: started, extended, decoded, published, left, evicted, selected,
            folded.
        late: prompts computed by the last batch, with their lengths, not yet in the tree.
        stepping: requests of the step in flight, and how many tokens it adds to them.
        drafts: tokens that a step verifies for each request; 1 is decoding.
    """

    model: Model
    rng: random.Random
    prefilling: list[Request] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)
    late: list[tuple[Request, int]] = field(default_factory=list)
    stepping: dict[Request, int] = field(default_factory=dict)
    operations: int = 0
    drafts: int = 1

    def run(self, events: int) -> None:
        for _ in range(events):
            self.event()
            self.model.check()

    def finish(self) -> None:
        """Lets all requests leave, perhaps flushes, and checks that nothing is held."""
        for request in self.prefilling + self.decoding:
            self.leave(request, publish=self.rng.random() < 0.7)
        if self.rng.random() < 0.5:
            self.model.flush()
        self.model.check_empty()

    def event(self) -> None:
        rng, running = self.rng, self.prefilling + self.decoding
        kinds = {"prefill": 4, "decode": 6, "leave": 1, "fork": 1, "evict": 1, "start": 3, "select": 1, "fold": 1}
        kinds["flush"] = 0.2
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        if kind == "flush" and rng.random() < 0.2:
            for request in running:
                self.leave(request, publish=False)
            self.model.flush()
        elif kind == "start" or not running:
            stride, length = rng.choice((1, 1, 5)), rng.randint(1, 11 * P)
            self.start([i * stride % 241 for i in range(length)])
        elif kind == "prefill" and self.prefilling:
            self.prefill(self.prefilling[: rng.randint(1, 3)])
        elif kind == "decode":
            padding = rng.randint(0, 2)
            for _ in range(-(-rng.choice((1, 3, 64)) // self.drafts)):
                self.decode(padding)
        elif kind == "leave":
            self.leave(rng.choice(running), publish=rng.random() < 0.7)
        elif kind == "fork" and self.decoding:
            source = rng.choice(self.decoding)
            self.start(source.tokens[: source.stored] + [9] * rng.randint(1, 100))
        elif kind == "evict":
            self.evict(rng.randint(1, 5))
        elif kind == "select":
            self.select()
        elif kind == "fold":
            self.fold(rng.choice(running), publish=rng.random() < 0.3)

    def select(self) -> None:
        """Starts a request that begins with some pages of a prefix in the tree."""
        sources = [key for key in self.model.tree if key[0] >= 0]
        if sources:
            source, rng = self.rng.choice(sources), self.rng
            chosen = sorted(rng.sample(range(len(source) // P), rng.randint(1, len(source) // P)))
            request = self.model.select(source, chosen, [5] * rng.randint(1, 3 * P))
            if request is not None:
                self.prefilling.append(request)
                self.operations += 1

    def fold(self, request: Request, publish: bool) -> None:
        """Ends a request and keeps some of its tokens, often its sinks too; another request goes on from them."""
        rng, length = self.rng, self.end(request)
        full = length // P
        if not full:
            self.model.leave(request, publish, length)
            return
        count = rng.randint(1, full)
        pinned = min(rng.choice((0, self.model.sink_pages)), count)
        rest = rng.sample(range(pinned * P, full * P), (count - pinned) * P)
        if rng.random() < 0.7:
            rest.sort()
        names = self.model.fold(request, [*range(pinned * P), *rest], publish, length)
        if names is not None:
            self.start(names + [7] * rng.randint(1, 3 * P))

    def start(self, tokens: list[int]) -> None:
        if len(tokens) // P + 2 < self.model.pages and (request := self.model.start(tokens)):
            self.prefilling.append(request)
            self.operations += 1

    def evict(self, count: int) -> None:
        if count > 0:
            self.model.evict(count)
            self.operations += count

    def leave(self, request: Request, publish: bool) -> None:
        self.model.leave(request, publish, self.end(request))

    def retract(self, request: Request) -> None:
        self.leave(request, publish=False)

    def end(self, request: Request) -> int:
        """Returns the tokens of a request that leaves, without those of the step that already runs.

        The request may end anywhere among the drafts that the step before accepted.
        """
        (self.prefilling if request in self.prefilling else self.decoding).remove(request)
        known = request.stored - self.stepping.get(request, 0)
        past = self.rng.randint(0, self.drafts - 1) if request.unknown else 0
        self.operations += 1
        return max(known - past, request.protected)

    def prefill(self, chosen: list[Request]) -> None:
        for request, length in self.late:  # a chunk enters the tree before the next one is launched
            if request in chosen:
                self.publish(request, length)
        self.late = [(r, n) for r, n in self.late if r not in chosen]
        rng = self.rng
        batch = [(r, rng.choice((n := len(r.tokens) - r.stored, n, rng.randint(1, n)))) for r in chosen]
        if not self.model.extend(batch):  # undone by retraction, as SGLang would not have admitted it
            for request, _ in batch:
                self.leave(request, publish=False)
            return
        self.operations += len(batch)
        self.launched({})
        for request in chosen:
            self.late.append((request, request.stored))
            if request.stored == len(request.tokens):
                self.prefilling.remove(request)
                self.decoding.append(request)
        if not self.model.overlap:
            self.process()

    def decode(self, padding: int) -> None:
        model, rng = self.model, self.rng
        self.evict(self.pages_wanted() - model.room())
        while self.decoding and self.pages_wanted() > model.room():
            self.retract(self.decoding[-1])
        if not self.decoding:
            return
        for request in self.decoding:
            request.tokens.append(rng.randint(0, 3))
        accepted = [rng.randint(1, self.drafts) for _ in self.decoding]
        if self.drafts == 1:
            assert model.decode(self.decoding, padding)
        else:
            drafts = [[rng.randint(0, 3) for _ in range(self.drafts - 1)] for _ in self.decoding]
            assert model.verify(self.decoding, drafts, accepted, padding)
        self.operations += len(self.decoding)
        self.launched(dict(zip(self.decoding, accepted)))

    def pages_wanted(self) -> int:
        return sum(request.pages_wanted(self.drafts) for request in self.decoding)

    def launched(self, stepping: dict[Request, int]) -> None:
        """Notes a launched batch and processes the results of the batch before it, while the new one runs."""
        self.stepping = dict(stepping) if self.model.overlap else {}
        self.process()

    def process(self) -> None:
        late, self.late = self.late, []
        for request, length in late:
            self.publish(request, length)
        self.model.submit_backups()

    def publish(self, request: Request, length: int) -> None:
        if request in self.prefilling + self.decoding:
            self.model.publish(request, finished=False, length=length)
            self.operations += 1


@dataclass
class Returning(Driver):
    """A driver whose tree often evicts prompts that come back later, as host memory is meant for."""

    prompts: list[list[int]] = field(default_factory=list)

    def event(self) -> None:
        rng, running = self.rng, self.prefilling + self.decoding
        if rng.random() < 0.6 or not self.prompts:
            super().event()
            if rng.random() < 0.5:
                self.model.submit_backups()
            return
        if not self.model.free_rows:
            self.leave(rng.choice(running), publish=True)
        if rng.random() < 0.3:
            self.select()  # its source pages may be evicted before they are copied
        self.evict(rng.choice((0, 5, 20, 40)))
        self.start(rng.choice(self.prompts) + [7] * rng.randint(0, 40))
        if rng.random() < 0.5 and self.prefilling:
            self.prefill(self.prefilling[-1:])

    def start(self, tokens: list[int]) -> None:
        super().start(tokens)
        self.prompts = [*self.prompts[-5:], tokens]


def crowd(model: Model, rng: random.Random, turns: int, drafts: int = 1) -> None:
    """Fills every row with a request; one at a time leaves and another begins. Ends with nothing held."""
    driver = Driver(model, rng, drafts=drafts)
    for _ in range(turns):
        while model.free_rows:
            kind = rng.randint(0, 3)
            driver.start([(i * 3 + kind * 29) % 241 for i in range(rng.randint(3 * P, 7 * P))])
        while driver.prefilling:
            driver.prefill(driver.prefilling[:1])
        for _ in range(P // drafts + 3):
            driver.decode(padding=rng.randint(0, 1))
        if driver.decoding:
            driver.leave(rng.choice(driver.decoding), publish=rng.random() < 0.5)
        model.check()
    driver.finish()


def converse(model: Model, rng: random.Random, turns: int) -> None:
    """Runs more conversations than BF16 pages allow: each idles, loses its sinks, and later goes on.

    Some go on twice at once, from copies of their own pages or as a fold; some are evicted. Ends with nothing held.
    """
    driver = Driver(model, rng)
    for _ in range(turns):
        kinds = rng.choices(range(8), k=rng.randint(1, model.rows))
        if rng.random() < 0.2:
            kinds = kinds[:1] * len(kinds)
        for kind in kinds:
            driver.start([(i * 3 + kind * 29) % 241 for i in range(rng.randint(20, 4 * P))])
        if rng.random() < 0.3:
            driver.select()
        while driver.prefilling:
            driver.prefill(list(driver.prefilling))
        for _ in range(rng.choice((0, 0, 1, 70))):  # most end with the first token, which prefill gives
            driver.decode(padding=rng.randint(0, 1))
        if driver.decoding and rng.random() < 0.2:
            driver.fold(driver.decoding[0], publish=True)
        for request in driver.prefilling + driver.decoding:
            driver.leave(request, publish=rng.random() < 0.9)
        if rng.random() < 0.2:
            driver.evict(rng.randint(1, 9))
        model.check()
    driver.finish()
