"""Compares servers by log-probabilities: of forced tokens, and of greedy answers up to a near tie.

An answer is checked by *forcing* it. A server that does nothing else caches the answer's prompt. It then gets prompt
and answer as one prompt and returns the log-probability of each answered token. From the cached prompt it reads what
decoding read: the quantized pages outside the window. Both results thus differ only by rounding, unless something went
wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.tiny_server import body
from launch.server import Server
from sglang_kvq.constants import PAGE_SIZE

#: Difference counted for a token that a server did not list among its likely ones; it exceeds every bound.
UNLISTED = 99.0
TOP = 16


@dataclass(frozen=True)
class Difference:
    """Absolute differences of log-probabilities, in nats."""

    mean: float
    max: float
    tokens: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Difference:
        values = list(values)
        return cls(statistics.fmean(values), max(values), len(values)) if values else cls(0.0, 0.0, 0)

    def __str__(self) -> str:
        return f"{self.mean:.4f} mean, {self.max:.3f} max of {self.tokens}"


@dataclass(frozen=True)
class Bound:
    """Limits of a difference: its mean and its maximum."""

    mean: float
    max: float

    def holds(self, found: Difference) -> bool:
        """Returns whether the difference is within the bound; False also if nothing was compared."""
        return found.tokens > 0 and found.mean <= self.mean and found.max <= self.max

    @classmethod
    def above(cls, measured: Sequence[Difference], factor: float, least: float = 0.01) -> Bound:
        """Returns ``factor`` times the worst measured difference, at least ``least`` (mean) and 10 times that (max)."""
        mean = max((d.mean for d in measured), default=0.0)
        largest = max((d.max for d in measured), default=0.0)
        return cls(max(factor * mean, least), max(factor * largest, 10 * least))


@dataclass(frozen=True)
class Step:
    """One generated token, its log-probability, and those of the likeliest tokens."""

    token: int
    logprob: float
    top: dict[int, float]


def input_logprobs(reply: dict) -> list[float]:
    """Returns log-probabilities of the prompt's tokens, from the second one after ``logprob_start_len`` on."""
    return [pair[0] for pair in reply["meta_info"]["input_token_logprobs"][1:]]


def steps(reply: dict) -> list[Step]:
    meta = reply["meta_info"]
    tops = meta.get("output_top_logprobs") or [[]] * len(meta["output_token_logprobs"])
    return [
        Step(pair[1], pair[0], {token: logprob for logprob, token, *_ in top or []})
        for pair, top in zip(meta["output_token_logprobs"], tops)
    ]


def token_difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Compares log-probabilities of the same tokens.

    Raises:
        ValueError: the numbers of tokens differ.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} log-probabilities against {len(theirs)}")
    return Difference.of(abs(a - b) for a, b in zip(ours, theirs))


def greedy_difference(ours: Sequence[Step], theirs: Sequence[Step]) -> Difference:
    """Compares tokens that both servers list as likely, step by step, until the servers choose differently.

    At that step only the two chosen tokens count. If both servers agree on their log-probabilities within a bound, the
    choice was a near tie within that bound.
    """
    values: list[float] = []
    for a, b in zip(ours, theirs):
        if a.token != b.token:
            pairs = ((a.logprob, b.top.get(a.token)), (b.logprob, a.top.get(b.token)))
            values += [UNLISTED if other is None else abs(own - other) for own, other in pairs]
            break
        values.append(abs(a.logprob - b.logprob))
        likely = sorted(set(a.top) & set(b.top), key=lambda token: -a.top[token])[:4]
        values += [abs(a.top[token] - b.top[token]) for token in likely if token != a.token]
    return Difference.of(values)


def greedy(server: Server, prompt: list, tokens: int, **options) -> list:
    """Returns replies (a list for a list of prompts) with the fields that ``steps`` needs."""
    asked = body(prompt, tokens, return_logprob=True, top_logprobs_num=TOP, **options)
    return server.json("/generate", asked, timeout=180)


def forced(
    server: Server,
    prompt: list[int],
    answer: list[int],
    cached: int = 0,
    timeout: float = 120,
    tail: Sequence[int] = (),
    others: Sequence[list[int]] = (),
    after: Collection[int] | None = None,
    turns: Sequence[int] = (),
    **options,
) -> list[float]:
    """Returns the log-probability of each answered token, from a server that serves nobody else now.

    Args:
        cached: tokens of the prompt that were cached when it was answered; they are cached first here, too.
        tail: tokens that follow the cached ones in that request. Without a tail, the window at their end stays in BF16.
        others: prompts asked in between. Enough of them take all BF16 copies of cached pages, those of sinks too.
        after: which of the earlier requests ``others`` follow, counted from 0; all by default.
        turns: lengths of earlier prompts that this prompt begins with; they are asked first, one after the other.
        options: fields of each request, such as its adapter.
    """
    server.drain()
    for n, prefix in enumerate((*turns, cached // PAGE_SIZE * PAGE_SIZE)):
        if not 0 < prefix < len(prompt):
            continue
        server.json("/generate", body([*prompt[:prefix], *tail], 1, **options), timeout=timeout)
        if others and (after is None or n in after):
            server.json("/generate", body(list(others), 1, **options), timeout=timeout)
    server.json("/generate", body(prompt, 1, **options), timeout=timeout)
    # The first entry is about the prompt's last token and has no log-probability.
    asked = body(prompt + answer, 1, return_logprob=True, logprob_start_len=len(prompt) - 1, **options)
    found = input_logprobs(server.json("/generate", asked, timeout=timeout))
    if len(found) != len(answer):
        raise ValueError(f"{len(found)} log-probabilities for {len(answer)} tokens")
    return found


def answered(reply: dict) -> tuple[list[int], list[float]]:
    """Returns the tokens of a reply and their log-probabilities."""
    pairs = reply["meta_info"]["output_token_logprobs"]
    return [pair[1] for pair in pairs], [pair[0] for pair in pairs]


def check(server: Server, prompt: list[int], reply: dict, cached: int | None = None, **options) -> Difference:
    """Returns how far an answer's log-probabilities are from those of the same tokens when forced."""
    tokens, logprobs = answered(reply)
    known = reply["meta_info"].get("cached_tokens", 0) if cached is None else cached
    return token_difference(logprobs, forced(server, prompt, tokens, known, **options))


def another_page(prompt: list[int], page: int, seed: int, vocabulary: int) -> list[int]:
    """Returns the prompt with one page of other tokens, like a cache that confuses two pages."""
    import random

    rng, changed = random.Random(seed), list(prompt)
    begin = page * PAGE_SIZE
    for at in range(begin, min(begin + PAGE_SIZE, len(prompt))):
        changed[at] = rng.randrange(2, vocabulary)
    return changed


def behind(server: Server, prompt: list[int], answer: list[int]) -> Difference:
    """Returns how far an answer's tokens fall behind the likeliest ones, on a server that serves nobody else now.

    This is for answers that were requested without log-probabilities: a greedy answer falls behind only by rounding.
    """
    server.drain()
    server.json("/generate", body(prompt, 1))  # the answer's prompt is cached, as when it was decoded
    asked = body(prompt + answer, 1, return_logprob=True, logprob_start_len=len(prompt) - 1, top_logprobs_num=1)
    meta = server.json("/generate", asked)["meta_info"]
    pairs = list(zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:]))
    if [own[1] for own, _ in pairs] != answer:
        raise ValueError("the log-probabilities are not of the answer's tokens")
    return Difference.of(top[0][0] - own[0] for own, top in pairs)
