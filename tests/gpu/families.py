"""Every served family: log-probabilities of a server with ``--kv-quant`` against those of plain BF16.

Short prompts fit sinks and window, so everything they read is BF16. There both servers must agree within BF16's own
noise, which the plain server shows by serving the same prompts twice. Long prompts read quantized history. There the
servers must be closer to each other than a single wrong page would put them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.answers import (
    Bound,
    Difference,
    another_page,
    greedy,
    greedy_difference,
    input_logprobs,
    steps,
    token_difference,
)
from benchmarks.tiny_models import VOCABULARY
from benchmarks.tiny_server import TinyServer, body

#: Mean difference that BF16's rounding alone may cause, in nats. These models' log-probabilities in BF16 differ by
#: 0.015 to 0.042 from those in FP32. A wrong token moves them by 0.1 and a wrong page by 0.8.
ROUNDING = 0.04


@dataclass(frozen=True)
class Scale:
    """Sizes in tokens; ``short`` prompts with their answers fit sinks (64) and window."""

    recent: int
    chunk: int
    short: tuple[int, ...]
    long: tuple[int, ...]
    turn: int
    answer: int
    pool: int
    requests: int

    def flags(self) -> list[str]:
        """Returns the flags of both servers."""
        return [
            *("--chunked-prefill-size", str(self.chunk), "--context-length", str(max(self.long) + 256)),
            *("--max-total-tokens", str(self.pool), "--max-running-requests", str(self.requests)),
        ]

    def quantized_flags(self, method: str = "int4") -> list[str]:
        """Returns the quantizing server's flags: 4 bits are nearly lossless, so a wrong page stands out."""
        return ["--kv-quant", method, "--kv-quant-recent", str(self.recent), "--kv-quant-prefill-window", "0"]


GPU = Scale(512, 256, (70, 150, 230, 300, 370, 440, 500, 545), (1500, 2100, 1801), 70, 24, 16384, 16)
CPU = Scale(256, 128, (90, 190, 290), (600, 500), 20, 6, 4096, 8)


def prompt(seed: str, tokens: int) -> list[int]:
    """Returns random ids that depend on the seed only."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY) for _ in range(tokens)]


@dataclass
class Said:
    """One server's results by request name: log-probabilities of prompts' tokens, and greedy answers."""

    inputs: dict[str, list[list[float]]] = field(default_factory=dict)
    answers: dict[str, list[list]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    quantized: int = 0
    seconds: float = 0.0


def ask(server: TinyServer, scale: Scale, plain: bool) -> Said:
    """Sends all requests to one server; a plain one also shows its noise and the effect of a wrong page."""
    begin, said = time.monotonic(), Said()
    short = [prompt(f"short {n}", length) for n, length in enumerate(scale.short)]
    long = [prompt(f"long {n}", length) for n, length in enumerate(scale.long)]

    def read(name: str, prompts: list[list[int]], start: int = 0) -> None:
        asked = (body(ids, 1, return_logprob=True, logprob_start_len=min(start, len(ids) - 2)) for ids in prompts)
        said.inputs[name] = [input_logprobs(server.json("/generate", each, timeout=180)) for each in asked]

    def turns(prompts: list[list[int]]) -> list[list[int]]:
        return [ids + prompt(f"turn {n}", scale.turn) for n, ids in enumerate(prompts)]

    read("short", short)
    said.answers["short after its prefix"] = [steps(greedy(server, ids, scale.answer)) for ids in short]
    server.drain()
    together = greedy(server, short, scale.answer, logprob_start_len=0)
    said.inputs["short together"] = [input_logprobs(reply) for reply in together]
    said.answers["short"] = [steps(reply) for reply in together]
    server.drain()
    read("long", long)
    # The next turns: a prefix hit, then a few new tokens after a long stored prefix.
    longer = turns(long)
    said.inputs["long turn"] = []
    for ids, more in zip(long, longer):
        asked = body(more, 1, return_logprob=True, logprob_start_len=len(ids))
        said.inputs["long turn"].append(input_logprobs(server.json("/generate", asked, timeout=180)))
    said.answers["long"] = [steps(reply) for reply in greedy(server, [[*ids, 7] for ids in longer], scale.answer)]
    if plain:
        server.drain()
        said.inputs["forced"] = []
        for ids, answer in zip(short, said.answers["short"]):
            asked = body(ids + [s.token for s in answer], 1, return_logprob=True, logprob_start_len=len(ids) - 1)
            said.inputs["forced"].append(input_logprobs(server.json("/generate", asked, timeout=180)))
        server.drain()
        read("short, a page exchanged", [another_page(ids, 0, n, VOCABULARY) for n, ids in enumerate(short)])
        read("long, a page exchanged", [another_page(ids, 2, n, VOCABULARY) for n, ids in enumerate(long)])
    if not plain:
        said.quantized = sum(state["kv_quant"]["tiers"]["quantized_tokens"] for state in server.states())
    said.left = server.held_when_empty()
    said.seconds = time.monotonic() - begin
    return said


def _joined(parts: list[list[float]], skip: Callable[[int], int] = lambda length: 0) -> list[float]:
    return [value for part in parts for value in part[skip(len(part)) :]]


def _inputs(a: Said, b: Said, first: str, second: str | None = None, skip: int = 0) -> Difference:
    after = lambda length: min(skip, length)  # noqa: E731
    return token_difference(_joined(a.inputs[first], after), _joined(b.inputs[second or first], after))


def compare(
    ours: Said, plain: Said, scale: Scale, method: str = "int4"
) -> Iterator[tuple[str, bool, Difference, Bound, str]]:
    """Yields (case, passed, difference, bound, more) for one model."""
    noise = [
        _inputs(plain, plain, "short", "short together"),
        token_difference(
            _joined(plain.inputs["forced"]), [s.logprob for answer in plain.answers["short"] for s in answer]
        ),
        _answers(plain, plain, "short", "short after its prefix"),
    ]
    bound = Bound.above(noise, 3, ROUNDING)
    spread = "BF16 against itself: " + "; ".join(map(str, noise))
    for case, found in (
        ("all in BF16: prompts alone", _inputs(ours, plain, "short")),
        ("all in BF16: prompts together", _inputs(ours, plain, "short together")),
        ("all in BF16: answers", _answers(ours, plain, "short")),
        ("all in BF16: answers after a cached prefix", _answers(ours, plain, "short after its prefix")),
    ):
        yield f"{method}, {case}", bound.holds(found), found, bound, spread
    if method == "int4":
        # The first page is exchanged; only the tokens after it are compared.
        wrong = _inputs(plain, plain, "short", "short, a page exchanged", skip=64)
        yield "control: a wrong page beside BF16", wrong.mean > 5 * bound.mean, wrong, bound, "must be far outside"

    # A history is read once a chunk begins after sinks, window and a page; before that, everything is BF16.
    begin = scale.recent + 64 + scale.chunk
    wrong = _inputs(plain, plain, "long", "long, a page exchanged", skip=begin)
    near = Bound(wrong.mean / 2, max(wrong.max, 1.0))
    read = _inputs(ours, plain, "long", skip=begin)
    if method != "int4":
        yield f"control: {method}, history in 2 bits", read.mean > 5 * bound.mean, read, bound, "must be far outside"
        return
    for case, found in (
        ("int4: prompts", read),
        ("int4: next turns", _inputs(ours, plain, "long turn")),
        ("int4: answers", _answers(ours, plain, "long")),
    ):
        yield case, near.holds(found), found, near, f"a wrong page: {wrong}"
    few = sum(max(length - scale.recent - 128, 0) for length in scale.long) // 2
    yield "int4: history is quantized", ours.quantized >= few, read, near, f"{ours.quantized} tokens, at least {few}"


def _answers(a: Said, b: Said, first: str, second: str | None = None) -> Difference:
    found = [greedy_difference(x, y) for x, y in zip(a.answers[first], b.answers[second or first])]
    tokens = sum(d.tokens for d in found)
    mean = sum(d.mean * d.tokens for d in found) / tokens if tokens else 0.0
    return Difference(mean, max((d.max for d in found), default=0.0), tokens)
