"""Compares the answers of ``benchmarks/soak.py`` with those of a server that serves nobody else.

What an answer reads depends on its past: which pages were computed before it, in which pieces, and whether others took
their BF16 copies in between. A client knows only a part of that. So an answer is compared in several *ways*, one for
each likely past, and the nearest counts (``ways``). Requests that run alone have such pasts on purpose. They are
compared in the same ways, and so are answers with an exchanged page. Bound, check and control thus use one statistic.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from benchmarks.answers import Bound, Difference, another_page, forced, token_difference
from benchmarks.pair_server import PairServer
from benchmarks.soak_traffic import Answer, Scale, Talk, draw_tokens
from benchmarks.tiny_models import VOCABULARY
from benchmarks.tiny_server import TinyServer, body
from launch.server import ServerError
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE

#: The bound relative to the worst measured difference; thousands of answers are compared, but only dozens are measured.
FACTOR = 3.0
#: Kinds of requests that are measured alone, in rotation; see ``Checker.alone``.
CALIBRATED = ("cold", "after a part", "cut", "resumed", "beside another", "next turn", "late")
#: Kinds that HiCache makes common: pages were computed only from records, and are perhaps read from records, too.
LATE_TWICE, LATE_TURN, LATE_BEFORE = "late twice", "late turn", "late before"
#: Several turns, each late or not, as nobody knows.
LATE_TALK = "late talk"
#: With HiCache, answers with more earlier turns are not compared, nor are those of retracted requests: there would be
#: too many ways. ``copy_check`` compares their pages.
KNOWN_TURNS = 3
#: Wrong pages of the second control: as many as two requests of a batch shared when a row was repointed too early.
WRONG_PAGES = 9
LEAST = 0.04  # nats, mean of an answer: the effect of BF16's rounding alone (tests/gpu)


@dataclass(frozen=True)
class Way:
    """A past of a prompt: what an idle server is asked before it, to read the prompt as another server did.

    Attributes:
        cached: tokens at the prompt's beginning that are computed in a request of their own.
        turns: lengths of shorter beginnings, each computed before in a request of its own; whole pages.
        beside: whether other tokens follow the cached ones in their request, so that its window lies elsewhere.
        late: after which of these requests others take all BF16 copies, counted from 0.
    """

    cached: int
    turns: tuple[int, ...] = ()
    beside: bool = False
    late: tuple[int, ...] = ()


def ways(answer: Answer) -> Iterator[Way]:
    """Yields the pasts that an answer may have, as far as its client can know, the cheapest first.

    The client knows how many tokens were cached, and which of the prompt's beginnings were asked earlier. It does not
    know where a chunk ended in a crowded batch, whether the cached part was computed again, or where the windows of
    earlier requests were. Others, an eviction or HiCache may have taken BF16 copies, and a page keeps the effect of the
    pages it was computed from.
    """
    cached = _whole_pages(answer.cached)
    yield Way(cached)
    middle = _whole_pages((cached + len(answer.prompt)) // 2)
    if middle > cached:
        yield Way(middle, (cached,))
    if not cached:
        return
    ends = _cached(answer, answer.turns)
    turns = tuple(sorted({*ends, *_cached(answer, answer.asked)}))
    yield Way(0)
    yield Way(cached, beside=True)
    if turns:
        yield Way(cached, turns)
        yield Way(cached, turns, beside=True)
    yield Way(cached, late=(0,))
    for late in _late((*map(turns.index, ends), len(turns))) if turns else ():
        yield Way(cached, turns, late=late)


def _late(requests: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields which of the requests may have been late: any, if they are few, otherwise all."""
    count = len(requests)
    for size in range(count, 0 if count <= KNOWN_TURNS + 1 else count - 1, -1):
        yield from combinations(requests, size)


def _cached(answer: Answer, lengths: Sequence[int]) -> list[int]:
    """Returns the whole pages, in tokens, of an answer's earlier beginnings, as far as they were cached."""
    return sorted(n for n in set(map(_whole_pages, lengths)) if 0 < n < _whole_pages(answer.cached))


def _whole_pages(tokens: int) -> int:
    return tokens // PAGE_SIZE * PAGE_SIZE


class Checker:
    """Compares answers on a server that nobody else uses."""

    def __init__(self, reference: TinyServer, scale: Scale, fault: bool, hicache: bool = False) -> None:
        self.reference, self.scale, self.fault = reference, scale, fault
        late = (LATE_TWICE, LATE_TURN, LATE_BEFORE, LATE_TALK, LATE_TALK)
        self.kinds = (*CALIBRATED, *late) if hicache else CALIBRATED
        self.known_turns = KNOWN_TURNS if hicache else None
        #: BF16 copies of the server that has the most; an estimate until ``calibrate`` has asked the servers.
        self.copies = 8 * scale.requests
        self.bound = Bound(0.0, 0.0)
        self.calibrated: list[Difference] = []
        #: Differences by the number of wrong pages in the prompt; a row that points elsewhere gives several wrong
        #: pages.
        self.controls: dict[int, list[Difference]] = {1: [], WRONG_PAGES: []}
        self.compared, self.tokens, self.wrong, self.failed, self.again = 0, 0, 0, 0, 0
        self.skipped: Counter[str] = Counter()
        self.seconds = 0.0
        self.worst = Difference(0.0, 0.0, 0)
        self.most = 0.0
        self.examples: list[str] = []
        self.tried: list[Difference] = []  #: differences of the last answer, in the order of its ways
        self.rng = random.Random(11)

    # -- one answer -----------------------------------------------------------------------------------------------

    def difference(self, answer: Answer, way: Way) -> Difference:
        """Returns how far an answer is from the same tokens forced, in nats.

        Raises:
            ServerError, OSError: the reference did not answer.
            ValueError: it answered with another number of tokens.
        """
        there = forced(
            self.reference,
            answer.prompt,
            answer.tokens,
            way.cached,
            tail=self.tail(self.rng)[: max(self.scale.longest - way.cached, 0)] if way.beside else (),
            others=self.others(self.rng) if way.late else (),
            after=way.late,
            turns=way.turns,
        )
        return token_difference(answer.logprobs, there)

    def nearest(self, answer: Answer, within: Bound) -> Difference:
        """Returns the difference in the first of an answer's ways that is within a bound; without one, the least."""
        self.tried = found = []
        for n, way in enumerate(ways(answer)):
            self.again += n == 1
            found.append(self.difference(answer, way))
            if within.holds(found[-1]):
                return found[-1]
        return min(found, key=lambda d: d.mean)

    def tail(self, rng: random.Random) -> list[int]:
        """Returns tokens that push all earlier ones out of a request's window."""
        return [rng.randrange(2, VOCABULARY) for _ in range(KVQuantConfig.recent_tokens + PAGE_SIZE)]

    def others(self, rng: random.Random) -> list[list[int]]:
        """Returns prompts that take all BF16 copies of pages cached before.

        Each takes one for its first page. Copies of first pages give way last, so there are as many prompts as copies.
        """
        return [[rng.randrange(2, VOCABULARY) for _ in range(PAGE_SIZE + 1)] for _ in range(self.copies)]

    def pages_exchanged(self, answer: Answer, count: int = 1) -> Answer | None:
        """Returns the answer with ``count`` adjacent pages of its prompt exchanged; None without a whole page."""
        pages = len(answer.prompt) // PAGE_SIZE
        if not pages:
            return None
        first, prompt = self.rng.randrange(pages), answer.prompt
        for page in range(first, min(first + count, pages)):
            prompt = another_page(prompt, page, self.rng.getrandbits(30), VOCABULARY)
        return replace(answer, prompt=prompt)

    # -- requests alone -------------------------------------------------------------------------------------------

    def alone(
        self, server: TinyServer | PairServer, kind: str, prompt: list[int], count: int, rng: random.Random
    ) -> Answer:
        """Returns a request's answer on an otherwise idle server, after a past of this kind.

        ``cold`` has no past. ``after a part`` of its prompt, the rest is computed in another piece; ``cut`` is the
        same, but its client does not know it. A ``resumed`` request goes on from a part of its answer. One ``beside
        another`` shares its beginning with an earlier, longer prompt: it reads quantized what it would otherwise have
        in BF16, because the cached part lay outside the longer prompt's window. A ``late`` request finds its whole
        prompt cached, but others have taken all its BF16 copies, including those of sinks. ``late twice`` does this for
        half of the prompt, and then for all of it; ``late before`` only for the half. The ``next turn`` follows an
        answer in its prompt, whose tokens were computed one by one. In a ``late turn`` others then took the BF16
        copies. A ``late talk`` has several such turns, about half of them late.
        """
        server.drain()
        talk = Talk()
        turns: list[int] = []
        if kind in ("after a part", "cut"):
            server.json("/generate", body(prompt[: rng.randint(1, len(prompt))], 1), timeout=120)
        elif kind == "beside another":
            tail = self.tail(rng)
            part = rng.randint(1, max(min(len(prompt), self.scale.longest - len(tail)), 1))
            server.json("/generate", body(prompt[:part] + tail, 1), timeout=120)
        elif kind in ("late", LATE_TWICE, LATE_BEFORE):
            turns = [] if kind == "late" else [len(prompt) // 2]
            for part in (*turns, len(prompt)):
                server.json("/generate", body(prompt[:part], 1), timeout=120)
                if kind != LATE_BEFORE or part in turns:
                    server.json("/generate", body(self.others(rng), 1), timeout=120)
        elif kind in ("next turn", LATE_TURN, LATE_TALK):
            number = rng.randint(2, KNOWN_TURNS) if kind == LATE_TALK else 1
            parts = _parts(prompt[: max(self.scale.longest - number * count, number + 1)], rng, number + 1)
            for part in parts[:-1]:
                prompt = [*talk.tokens, *part]
                talk = talk.after(prompt, _reply(server, prompt, count))
                if kind == LATE_TURN or (kind == LATE_TALK and rng.random() < 0.5):
                    server.json("/generate", body(self.others(rng), 1), timeout=120)
            prompt, turns = [*talk.tokens, *parts[-1]], list(talk.turns)
        elif kind == "resumed":
            first = _ask(server, prompt, max(count // 2, 1))
            server.drain()
            rest = _ask(server, prompt + first.tokens, max(count - count // 2, 1))
            return Answer(kind, prompt, first.tokens + rest.tokens, first.logprobs + rest.logprobs, 0)
        answer = replace(_ask(server, prompt, count), kind=kind, turns=turns, asked=list(talk.asked))
        return replace(answer, cached=0) if kind == "cut" else answer

    def calibrate(self, server: TinyServer | PairServer, until: float) -> None:
        """Measures requests alone, sets the bound, and measures how many exchanged pages it finds.

        until: time of ``time.monotonic`` after which no more is asked, except for three requests; the controls take as
            much time again at most.
        """
        rng, answers, begin = random.Random(7), [], time.monotonic()
        self.copies = max([n for one in (server, self.reference) for n in bf16_pages(one)], default=self.copies)
        more = 1 if self.kinds == CALIBRATED else 4  # a page keeps its past: rare cases must be among them
        for n in range(more * self.scale.calibration):
            if time.monotonic() > until and n >= 3:
                break
            prompt = draw_tokens(rng, self.scale.shortest, self.scale.longest)
            count = rng.randint(*(self.scale.long_answer if n % 10 == 2 else self.scale.answer))
            answers.append(self.alone(server, self.kinds[n % len(self.kinds)], prompt, count, rng))
        # The reference may be the same server, so all requests are sent first.
        worst = Bound(0.0, 0.0)
        for answer in answers:
            # A further way could not raise the worst difference, once one is within it.
            found = self.nearest(answer, worst)
            self.calibrated.append(found)
            worst = Bound(max(worst.mean, found.mean), max(worst.max, found.max))
        self.bound = Bound.above(self.calibrated, FACTOR, LEAST)
        end = time.monotonic() + max(until - begin, 0)
        for answer in answers:
            for count, controls in self.controls.items() if answer.kind != "resumed" else ():
                if (time.monotonic() < end or not controls) and (other := self.pages_exchanged(answer, count)):
                    controls.append(self.nearest(other, self.bound))
        self.again = 0

    # -- the traffic's answers ------------------------------------------------------------------------------------

    def check(self, answer: Answer) -> None:
        """Counts one answer; it is wrong if it is beyond the bound in all its ways."""
        if reason := self.unknown(answer):
            self.skipped[reason] += 1
            return
        begin = time.monotonic()
        try:
            if self.fault and self.compared % 10 == 9:
                answer = self.pages_exchanged(answer) or answer
            found = self.nearest(answer, self.bound)
        except (ServerError, OSError, ValueError, KeyError) as error:
            self.failed += 1
            if self.failed <= 3:
                self.examples.append(f"could not compare: {error}"[:600])
            return
        finally:
            self.seconds += time.monotonic() - begin
        self.compared += 1
        self.tokens += found.tokens
        self.worst, self.most = max(self.worst, found, key=lambda d: d.mean), max(self.most, found.max)
        if not self.bound.holds(found):
            self.wrong += 1
            if len(self.examples) < 8:
                self.examples.append(
                    f"{answer.kind}: prompt of {len(answer.prompt)} tokens, {answer.cached} cached, "
                    f"turns {answer.turns} after prompts of {answer.asked}, {len(answer.tokens)} answered: {found}; "
                    f"ways: {', '.join(f'{way.mean:.3f}' for way in self.tried)}"
                )

    def unknown(self, answer: Answer) -> str:
        """Returns why the past of an answer with HiCache has too many ways; empty if it does not."""
        if self.known_turns is None:
            return ""
        if answer.retracted:
            return "retracted"  # at any token, with pages that were late or not when it went on
        return "too_many_turns" if len(_cached(answer, answer.turns)) > self.known_turns else ""

    def seen(self, pages: int = 1) -> float | None:
        """Returns the share of controls with so many wrong pages that the bound finds wrong."""
        found = self.controls[pages]
        return statistics.fmean(not self.bound.holds(d) for d in found) if found else None

    def wrong_page_mean(self) -> float | None:
        """Returns the median control value for one wrong page."""
        return statistics.median(d.mean for d in self.controls[1]) if self.controls[1] else None

    def a_minute(self) -> float | None:
        """Returns the answers compared per minute of comparing."""
        return 60 * self.compared / self.seconds if self.seconds else None


def bf16_pages(server: TinyServer | PairServer) -> list[int]:
    """Returns how many BF16 pages a server has, or both servers of a pair.

    A shared memory has as many as fit beside the records of the prompts that take them, one page each.
    """
    both = server.both if isinstance(server, PairServer) else (server,)
    return [n for one in both if (n := _bf16_pages(one.info().get("kv_quant", {})))]


def _bf16_pages(sizes: dict) -> int:
    """Returns the BF16 pages of one server; sizes: ``kv_quant`` of ``/server_info``."""
    if not sizes.get("shared_memory"):
        return int(sizes.get("bf16_pages") or 0)
    return int(sizes["memory_bytes"] / (PAGE_SIZE * (sizes["token_bytes"] + sizes["bf16_token_bytes"]))) + 1


def _parts(prompt: list[int], rng: random.Random, count: int) -> list[list[int]]:
    """Returns the prompt in ``count`` parts of any lengths, like turns of a conversation."""
    ends = [0, *sorted(rng.sample(range(1, len(prompt)), count - 1)), len(prompt)]
    return [prompt[begin:end] for begin, end in pairwise(ends)]


def _reply(server: TinyServer | PairServer, prompt: list[int], tokens: int) -> dict:
    asked = body(prompt, tokens, return_logprob=True, sampling_params={"temperature": 1.0})
    return server.json("/generate", asked, timeout=120)


def _ask(server: TinyServer | PairServer, prompt: list[int], tokens: int) -> Answer:
    meta = _reply(server, prompt, tokens)["meta_info"]
    pairs = meta["output_token_logprobs"]
    return Answer("alone", prompt, [p[1] for p in pairs], [p[0] for p in pairs], meta.get("cached_tokens") or 0)
