"""One server whose schedulers do everything at once: each answer must be the one that the request gets alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.answers import (
    Bound,
    Difference,
    another_page,
    behind,
    check,
    forced,
    greedy,
    greedy_difference,
    steps,
    token_difference,
)
from benchmarks.tiny_models import VOCABULARY
from benchmarks.tiny_server import BUSY_CHECK, TinyServer, body
from launch.server import ServerError
from tests.gpu.families import prompt

Row = tuple[str, bool, Difference, Bound, str]


@dataclass(frozen=True)
class Scale:
    """Sizes of the cases.

    Attributes:
        shared, short, long: tokens of a shared prefix, and of the two prompts that begin with it.
        pairs, rounds: pairs in a batch, and batches.
        answers, length: requests of the retraction case, and tokens to answer.
        aborts: prompts aborted in mid-prefill.
    """

    shared: int
    short: int
    long: int
    pairs: int
    rounds: int
    answer: int
    answers: int
    length: int
    aborts: int
    huge: int
    pool: int
    pressed_pool: int
    chunk: int

    def crowd_flags(self) -> list[str]:
        """Returns flags of a server that takes a whole batch of pairs in one prefill."""
        budget = str(-(-(self.pairs * (self.short + self.long) + self.huge) // 1024) * 1024)
        return [
            *("--kv-quant", "int4", "--chunked-prefill-size", budget, "--max-prefill-tokens", budget),
            *("--max-total-tokens", str(self.pool), "--context-length", str(self.huge + 2048)),
            *("--max-running-requests", str(2 * self.pairs + 8)),
        ]

    def pressed_flags(self, sessions: bool = True) -> list[str]:
        """Returns flags of a server with little room.

        It has small chunks, retraction, priorities, and sessions that keep their rows.
        """
        return [
            *(
                "--kv-quant",
                "int4",
                "--chunked-prefill-size",
                str(self.chunk),
                "--context-length",
                str(self.huge + 1024),
            ),
            *("--max-total-tokens", str(self.pressed_pool), "--max-running-requests", str(self.answers)),
            *("--schedule-conservativeness", "0.01", "--enable-priority-scheduling"),
            *(["--enable-streaming-session"] if sessions else []),
        ]

    def mixed_flags(self) -> list[str]:
        """Returns flags of a server that prefills and decodes in one batch."""
        return [
            *("--kv-quant", "int4", "--chunked-prefill-size", str(self.chunk), "--context-length", str(self.huge)),
            *("--max-total-tokens", str(self.pool), "--max-running-requests", str(self.answers)),
            "--enable-mixed-chunk",
        ]

    def window_flags(self) -> list[str]:
        """Returns flags of a server with little room in both pools, for a model with sliding windows."""
        flags = [flag for flag in self.pressed_flags() if flag != "--enable-streaming-session"]
        return [*flags, "--swa-full-tokens-ratio", "0.4"]


GPU = Scale(576, 600, 1576, 8, 10, 8, 8, 160, 24, 6000, 65536, 8192, 256)
CPU = Scale(128, 150, 500, 2, 2, 4, 4, 40, 3, 1200, 8192, 2048, 128)
#: SGLang's own switch retracts at intervals, as if memory had run out. Its check between steps counts the tokens of
#: two batches. With sessions, aborts and preemption other requests hold tokens too, so here only the idle server is
#: checked.
PRESSED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40", BUSY_CHECK: "0"}


def crowd(server: TinyServer, scale: Scale, deadline: float) -> Iterator[Row]:
    """Yields the cases of ``crowd_flags``."""
    for n in range(2):  # kernels compile at their first use
        greedy(server, [prompt(f"warm {n} {i}", scale.long + 70 * i) for i in range(2)], 3)
    bound = yield from _noise(server, scale)
    yield _overlapping(server, scale, bound, deadline)
    yield _parallel(server, scale, bound)
    yield _flushed_while_busy(server, scale, bound)
    yield _sessions(server, scale, streaming=False)
    yield _empty(server)


def pressed(server: TinyServer, scale: Scale, deadline: float, sessions: bool = True) -> Iterator[Row]:
    """Yields the cases of ``pressed_flags``."""
    greedy(server, [prompt(f"warm {i}", 3 * scale.chunk + 70 * i) for i in range(2)], 3)
    bound = yield from _forced_noise(server, scale)
    yield _retracted(server, scale, bound)
    yield _aborted(server, scale, bound)
    yield _prioritised(server, scale, bound)
    if sessions:
        yield _sessions(server, scale, streaming=True)
    yield _empty(server)


def pressed_windows(server: TinyServer, scale: Scale, deadline: float) -> Iterator[Row]:
    """Yields the cases of ``window_flags``."""
    greedy(server, [prompt(f"warm {i}", 3 * scale.chunk + 70 * i) for i in range(2)], 3)
    bound = yield from _forced_noise(server, scale)
    yield _retracted(server, scale, bound)
    yield _aborted(server, scale, bound)
    yield _prioritised(server, scale, bound)
    yield _sessions(server, scale, streaming=False)
    yield _empty(server)


def mixed(server: TinyServer, scale: Scale, deadline: float) -> Iterator[Row]:
    """Yields the cases of ``mixed_flags``."""
    greedy(server, [prompt(f"warm {i}", 3 * scale.chunk + 70 * i) for i in range(2)], 3)
    yield from _mixed(server, scale)
    yield _empty(server)


def hybrid(server: TinyServer, scale: Scale, deadline: float) -> Iterator[Row]:
    """Yields the cases of ``pressed_flags`` for a model with recurrent states, whose prefixes end at a kept state."""
    greedy(server, [prompt(f"warm {i}", 3 * scale.chunk + 70 * i) for i in range(2)], 3)
    bound = yield from _forced_noise(server, scale)
    yield _retracted(server, scale, bound)
    yield _aborted(server, scale, bound)
    yield _prioritised(server, scale, bound)
    yield _flushed_while_busy(server, scale, bound)
    yield _empty(server)


def together(jobs: list[Callable]) -> list:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [job.result(timeout=240) for job in [pool.submit(job) for job in jobs]]


def joined(found: list[Difference]) -> Difference:
    tokens = sum(d.tokens for d in found)
    mean = sum(d.mean * d.tokens for d in found) / tokens if tokens else 0.0
    return Difference(mean, max((d.max for d in found), default=0.0), tokens)


def alone(server: TinyServer, ids: list[int], tokens: int) -> list:
    server.drain()
    return steps(greedy(server, ids, tokens))


def _noise(server: TinyServer, scale: Scale):
    """Sets the bound by unrelated prompts in one batch against each alone, and shows a wrong page's effect."""
    prompts = [prompt(f"noise {n}", (scale.short, scale.long)[n % 2]) for n in range(2 * scale.pairs)]
    server.drain()
    batch = [steps(reply) for reply in greedy(server, prompts, scale.answer)]
    single = [alone(server, ids, scale.answer) for ids in prompts]
    found = [greedy_difference(a, b) for a, b in zip(batch, single)]
    bound = Bound.above([joined(found)], 3, 0.04)
    yield "requests that share nothing, together", joined(found).max < 1, joined(found), bound, "sets the bound"
    wrong = [alone(server, another_page(ids, 2, n, VOCABULARY), scale.answer) for n, ids in enumerate(prompts)]
    seen = joined([greedy_difference(a, b) for a, b in zip(wrong, single)])
    yield "control: a wrong page", seen.mean > 3 * bound.mean, seen, bound, "must be far outside"
    return bound


def _overlapping(server: TinyServer, scale: Scale, bound: Bound, deadline: float) -> Row:
    """Compares cold requests that share a prefix in one prefill batch and differ in length, in several rounds."""
    found, cold, rounds = [], 0, 0
    for n in range(scale.rounds):
        if time.monotonic() > deadline:
            break
        pairs = []
        for p in range(scale.pairs):
            prefix = prompt(f"shared {n} {p}", scale.shared)
            lengths = (scale.short, scale.long) if (n + p) % 2 else (scale.long, scale.short)
            pairs += [prefix + prompt(f"own {n} {p} {length}", length - scale.shared) for length in lengths]
        server.drain()
        # All others arrive while the first one is in prefill, so that they form one batch.
        replies = greedy(server, [prompt(f"first {n}", scale.huge), *pairs], scale.answer)[1:]
        cold += sum(reply["meta_info"]["cached_tokens"] == 0 for reply in replies)
        rounds += 1
        for ids, reply in zip(pairs, replies):
            if reply["meta_info"]["cached_tokens"] == 0:
                found.append(greedy_difference(steps(reply), alone(server, ids, scale.answer)))
    seen = joined(found)
    worst = sum(not bound.holds(d) and d.max > bound.max for d in found)
    more = f"{cold} cold of {rounds * 2 * scale.pairs} requests, {worst} wrong"
    return "overlapping prefixes in one batch", bool(cold) and bound.holds(seen), seen, bound, more


def _parallel(server: TinyServer, scale: Scale, bound: Bound) -> Row:
    ids = prompt("parallel", scale.long)
    single = alone(server, ids, scale.answer)
    server.drain()
    replies = greedy(server, ids, scale.answer, sampling_params={"n": 4})
    cold = [greedy_difference(steps(reply), single) for reply in replies]
    # All answers but the first may read the first one's quantized pages; then they are compared with such an answer.
    warm = steps(greedy(server, ids, scale.answer))
    found = joined(
        [min(a, greedy_difference(steps(reply), warm), key=lambda d: d.max) for a, reply in zip(cold, replies)]
    )
    return "n = 4", len(replies) == 4 and bound.holds(found), found, bound, ""


def _flushed_while_busy(server: TinyServer, scale: Scale, bound: Bound) -> Row:
    ids = prompt("flushed", scale.long)
    single = alone(server, ids, 6 * scale.answer)
    server.drain()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(greedy, server, ids, 6 * scale.answer)
        refused = 0
        while not job.done():
            try:
                server.flush()
            except ServerError:
                refused += 1
            time.sleep(0.005)
        found = greedy_difference(steps(job.result(timeout=180)), single)
    return "flush while busy and idle", bound.holds(found), found, bound, f"refused {refused} times"


def _sessions(server: TinyServer, scale: Scale, streaming: bool) -> Row:
    """Compares a session's turns, which alternate with other requests, with their answers forced over all history."""
    options = {"streaming": True} if streaming else {}
    session = server.json("/open_session", {"capacity_of_str_len": 1 << 20, **options}, timeout=60)
    history, rid, turns, cached = [], None, [], []
    for turn in range(4):
        ids = prompt(f"session {streaming} {turn}", scale.short + 11)
        params = {"id": session} if streaming else {"id": session, "rid": rid}
        reply = greedy(server, ids, scale.answer, session_params=params)
        rid = reply["meta_info"]["id"]
        cached.append(reply["meta_info"]["cached_tokens"])
        answer = [step.token for step in steps(reply)]
        turns.append((history + ids, answer, [step.logprob for step in steps(reply)]))
        history = history + ids + answer
        greedy(server, [prompt(f"between {turn} {n}", 130 + 64 * n) for n in range(2)], 3)
    server.request("/close_session", {"session_id": session}, timeout=60)
    found = [token_difference(said, forced(server, before, answer)) for before, answer, said in turns]
    # A later turn's prefix was quantized in pieces, the forced one's at once: they differ as much as 4 bits from BF16.
    seen, bound = joined(found), Bound(0.15, 2.0)
    reused = all(now >= before for before, now in pairwise(cached)) and cached[-1] >= scale.short
    name = "streaming session" if streaming else "session"
    return name, reused and bound.holds(seen), seen, bound, f"cached tokens by turn {cached}"


def _empty(server: TinyServer) -> Row:
    left = server.held_when_empty()
    return "nothing left when idle and flushed", not left, Difference(0.0, 0.0, 0), Bound(0, 0), "; ".join(left)


def _forced_noise(server: TinyServer, scale: Scale):
    """Compares single requests' answers with the same answers forced afterwards, which gives the bound for forcing."""
    prompts = [prompt(f"alone {n}", 3 * scale.chunk + 40 * n) for n in range(3)]
    found = []
    for ids in prompts:
        server.drain()
        found.append(check(server, ids, greedy(server, ids, scale.length)))
    bound = Bound.above(found, 3, 0.06)
    yield "answers alone, forced", joined(found).max < 1, joined(found), bound, "sets the bound"
    wrong = []
    for n, ids in enumerate(prompts):
        server.drain()
        wrong.append(check(server, another_page(ids, 1, n, VOCABULARY), greedy(server, ids, scale.length), 0))
    seen = joined(wrong)
    yield "control: a wrong page, forced", seen.mean > 2 * bound.mean, seen, bound, "must be far outside"
    return bound


def _retracted(server: TinyServer, scale: Scale, bound: Bound) -> Row:
    server.drain()
    prompts = [prompt(f"retracted {n}", 2 * scale.chunk + 50 * n) for n in range(scale.answers)]
    replies = greedy(server, prompts, scale.length)
    count = sum(reply["meta_info"].get("num_retractions", 0) for reply in replies)
    count = count or server.log().count("#retracted_reqs")
    seen = joined([check(server, ids, reply) for ids, reply in zip(prompts, replies)])
    # A retracted request's answer becomes prompt, so its pages are quantized with other tokens than while decoding.
    wider = Bound(2 * bound.mean, 3 * bound.max)
    return "retraction", count > 0 and wider.holds(seen), seen, wider, f"{count} retractions"


def _aborted(server: TinyServer, scale: Scale, bound: Bound) -> Row:
    """Aborts long prompts in mid-prefill, by request or by closing the connection, while another request ends."""
    rng = random.Random(5)
    ids = prompt("witness", 2 * scale.chunk + 30)
    server.drain()

    def cancel(n: int) -> None:
        rid = f"abort-{n}-{time.monotonic_ns()}"
        asked = body(prompt(f"aborted {n}", scale.huge - 64 * n), 400, rid=rid, stream=True)
        delay = rng.uniform(0.0, 2.0 if server.cpu else 0.05)
        if n % 2:
            threading.Timer(delay, _quietly, (server, "/abort_request", {"rid": rid})).start()
        with suppress(OSError), server.stream("/generate", asked) as response:
            if n % 2 == 0:
                time.sleep(delay)  # the connection is closed next
            else:
                response.read()

    with ThreadPoolExecutor(3) as pool:
        witness = pool.submit(greedy, server, ids, scale.length)
        jobs = [pool.submit(cancel, n) for n in range(scale.aborts)]
        reply = witness.result(timeout=240)
        for job in jobs:
            job.result(timeout=240)
    _quietly(server, "/abort_request", {"rid": "", "abort_all": True})
    wider = Bound(2 * bound.mean, 3 * bound.max)  # the request may have been retracted
    seen = check(server, ids, reply)
    left = server.held_when_empty()
    return (
        "abort in mid-prefill",
        wider.holds(seen) and not left,
        seen,
        wider,
        f"{scale.aborts} aborted {'; '.join(left)}",
    )


def _quietly(server: TinyServer, path: str, asked: dict) -> None:
    with suppress(ServerError):
        server.request(path, asked, timeout=60)


def _prioritised(server: TinyServer, scale: Scale, bound: Bound) -> Row:
    """Checks all answers while urgent requests preempt running ones."""
    server.drain()
    low = [prompt(f"low {n}", scale.chunk + 40 * n) for n in range(scale.answers)]
    high = [prompt(f"high {n}", 2 * scale.chunk + 40 * n) for n in range(2)]
    jobs = [lambda ids=ids: greedy(server, ids, scale.length, priority=0) for ids in low]

    def later(ids: list[int]) -> dict:
        time.sleep(0.15 if not server.cpu else 4.0)
        return greedy(server, ids, scale.length // 2, priority=100)

    replies = together(jobs + [lambda ids=ids: later(ids) for ids in high])
    seen = joined([check(server, ids, reply) for ids, reply in zip(low + high, replies)])
    wider = Bound(2 * bound.mean, 3 * bound.max)
    moved = sum(reply["meta_info"].get("num_retractions", 0) for reply in replies)
    return "priority preemption", wider.holds(seen), seen, wider, f"{moved} retractions and preemptions"


def _mixed(server: TinyServer, scale: Scale) -> Iterator[Row]:
    """Checks answers of prompts that arrive while others decode.

    SGLang mixes no batch that returns log-probabilities, so these come from ``behind``.
    """
    prompts = [prompt(f"mixed {n}", 2 * scale.chunk + 90 * n) for n in range(scale.answers)]

    def ask(n: int) -> list[int]:
        time.sleep((0.7 if server.cpu else 0.03) * n)
        return server.json("/generate", body(prompts[n], scale.length), timeout=240)["output_ids"]

    noise = behind(server, prompts[0], ask(0))
    bound = Bound.above([noise], 3)
    yield "an answer alone, behind the likeliest", noise.mean < 0.1, noise, bound, "sets the bound"
    server.drain()
    before = len(server.log())
    answers = together([lambda n=n: ask(n) for n in range(scale.answers)])
    lines = [line for line in server.log()[before:].splitlines() if "Prefill batch" in line]
    beside = sum("#running-req: 0" not in line for line in lines)
    seen = joined([behind(server, ids, answer) for ids, answer in zip(prompts, answers)])
    more = f"{beside} of {len(lines)} prefill batches beside running requests"
    yield "mixed batches", beside > 2 and bound.holds(seen), seen, bound, more
    # All answers count, because a random model may begin to repeat a few tokens, which no page changes.
    read = [another_page(ids, 1, 1, VOCABULARY) for ids in prompts]
    wrong = joined([behind(server, ids, answer) for ids, answer in zip(read, answers)])
    yield "control: a wrong page, mixed", wrong.mean > 3 * bound.mean, wrong, bound, "must be far outside"
