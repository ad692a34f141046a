"""Retrieval tasks: at each length, a model finds and copies keys, numbers, variables or arguments of a tool call.

Prose hides the cost of coarse keys, because a needle in filler differs from everything around it. Here the haystack
consists of needles (``haystacks``), and an answer counts only if it is copied to the last character. While a model
generates its answer, it reads its context from the cache, at any chunk size. While it computes its prompt, this depends
on ``--chunked-prefill-size``.

``exact_keys`` also gives the log-likelihood of the right value. It distinguishes methods even if a small model's copies
are all wrong. The prompt is cached first and the value's tokens are scored after it, so they read the same data as
decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.tasks.base import Bench, Outcome, fitting, listed, settings_of, short
from sglang_kvq.evaluation.tasks.haystacks import KINDS, Haystack
from sglang_kvq.evaluation.tasks.problems import answer_lengths
from sglang_kvq.evaluation.tasks.statistics import clustered, mean_and_error

#: Tokens reserved for answer, question and chat template.
RESERVED = 384
ANSWER_TOKENS = 256
#: Number of lines from which the tokens per line are measured.
SAMPLE = 40


@dataclass(frozen=True)
class RetrievalTask:
    """Settings of a retrieval task.

    Attributes:
        name: a kind of ``haystacks.KINDS``.
        lengths: tokens of a whole request; lengths that the server cannot take are left out.
        cases: haystacks per length.
        style: ``chat``, ``completion``, or ``auto``: chat if the model has a template.
    """

    name: str
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    cases: int = 40
    style: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise KVQuantError(f"retrieval task {self.name!r}: must be one of {', '.join(KINDS)}.")
        if not self.lengths or min(self.lengths) < 2 * RESERVED:
            raise KVQuantError(
                f"--retrieval-lengths {listed(self.lengths)}: each must be at least {2 * RESERVED} tokens."
            )
        if self.cases < 1:
            raise KVQuantError(f"--retrieval-cases {self.cases}: must be at least 1.")

    def identity(self) -> dict[str, Any]:
        return settings_of(self)

    def run(self, client: Client, bench: Bench) -> Outcome:
        style = client.style(self.style)
        lengths = fitting("--retrieval-lengths", self.lengths, client)
        sizes = {length: self.lines(length, client, bench) for length in lengths}

        def ask(cell: tuple[int, int]) -> dict[str, Any]:
            length, number = cell
            case = KINDS[self.name](f"{self.seed}/{length}/{number}", sizes[length])
            if style == "chat":
                answer = client.chat(f"{case.text}\n\n{case.question}", ANSWER_TOKENS)
            else:
                answer = client.complete(f"{case.text}\n\n{case.unfinished}", ANSWER_TOKENS, stop=["\n\n"])
            asked = {
                "length": length,
                "score": case.score(answer.text),
                "prompt_tokens": answer.prompt_tokens,
                "complete": answer.complete,
                "tokens": answer.tokens,
                "answer": answer.text[:200],
            }
            return asked | (self.likelihood(case, client, bench) if self.name == "exact_keys" else {})

        asked = bench.map(ask, [(length, number) for length in lengths for number in range(self.cases)])
        return self._outcome(asked, style, lengths, client.facts.room)

    def lines(self, length: int, client: Client, bench: Bench) -> int:
        """Returns the number of lines that fit in a request of ``length`` tokens, minus those reserved.

        Raises:
            KVQuantError: not even one line fits.
        """
        sample = KINDS[self.name](f"{self.seed}/sample", SAMPLE)
        per_line = len(bench.material.encode(sample.text, client)) / SAMPLE
        size = int((length - RESERVED) / per_line)
        if size < 1:
            raise KVQuantError(
                f"--retrieval-lengths {length}: a line of {self.name} takes {per_line:.0f} tokens of this model. "
                f"Give at least {math.ceil(per_line) + RESERVED}."
            )
        return size

    def likelihood(self, case: Haystack, client: Client, bench: Bench) -> dict[str, Any]:
        """Returns ``nats``, the value's negative log-likelihood, and ``likeliest``, the number of its top-1 tokens."""
        prompt = [
            *bench.material.begin_token(client),
            *bench.material.encode(f"{case.text}\n\n{case.unfinished}", client),
        ]
        value = bench.material.encode(case.expected[0], client)
        client.cache(prompt)
        found = client.prompt_logprobs([*prompt, *value], len(prompt), 1)
        own = [pair[0] for pair in found["input_token_logprobs"]]
        top = [pairs[0][1] for pairs in found["input_top_logprobs"]]
        return {
            "nats": -sum(own),
            "likeliest": sum(a == b for a, b in zip(top, value, strict=True)),
            "value_tokens": len(value),
        }

    def _outcome(self, asked: list[dict[str, Any]], style: str, lengths: list[int], room: int) -> Outcome:
        row: dict[str, Any] = {}
        for length in self.lengths:
            of_length = [one for one in asked if one["length"] == length]
            scores = [one["score"] for one in of_length]
            column = f"{self.name}_{short(length)}"
            row[column], row[f"{column}_se"] = mean_and_error(scores) if scores else (None, None)
            row |= answer_lengths(column, of_length) if of_length else {}
            if self.name == "exact_keys" and of_length:
                row[f"{column}_nats"], row[f"{column}_nats_se"] = clustered(
                    [one["nats"] for one in of_length], [one["value_tokens"] for one in of_length]
                )
        value, se = mean_and_error([one["score"] for one in asked])
        row |= {self.name: value, f"{self.name}_se": se, f"{self.name}_n": len(asked)}
        row |= answer_lengths(self.name, asked)
        if self.name == "exact_keys":
            counts = [one["value_tokens"] for one in asked]
            for name in ("nats", "likeliest"):
                row[f"{self.name}_{name}"], row[f"{self.name}_{name}_se"] = clustered(
                    [one[name] for one in asked], counts
                )
        details = {"style": style, "asked": asked, "items": [one["score"] for one in asked]}
        left_out = [length for length in self.lengths if length not in lengths]
        warnings = [
            f"{self.name}: no requests of {length} tokens were measured: the server takes at most {room}"
            for length in left_out
        ]
        return Outcome(value, se, len(asked), row, details, warnings)
