"""Needle in a haystack: filler text hides a random number and ends with a question for it, by length and depth."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.client import Client
from sglang_kvq.evaluation.tasks.base import Bench, Outcome, fitting, listed, settings_of, short, text_tokens
from sglang_kvq.evaluation.tasks.problems import answer_lengths
from sglang_kvq.evaluation.tasks.statistics import mean_and_error

CITIES = ("Lisbon", "Nairobi", "Oslo", "Lima", "Kyoto", "Dublin", "Havana", "Riga", "Hanoi", "Quito")
#: Tokens reserved for answer, question, needle and chat template.
RESERVED = 160
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class NeedleTask:
    """Settings of the needle task.

    Attributes:
        text: file with the filler; any text without seven-digit numbers.
        skip: share of the text to leave out at its beginning.
        lengths: tokens of a whole request; lengths that the server cannot take are left out.
        depths: percent of the filler before the needle.
        trials: needles per cell, each with its own number and filler.
        style: ``chat``, ``completion``, or ``auto``: chat if the model has a template.
        seed: determines the numbers, the cities, and where in the text the filler begins.
    """

    text: Path
    skip: float = 0.0
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    depths: tuple[float, ...] = (0, 25, 50, 75, 100)
    trials: int = 5
    style: str = "auto"
    seed: int = 0
    name: str = "needle"

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 2 * RESERVED:
            raise KVQuantError(f"--needle-lengths {listed(self.lengths)}: each must be at least {2 * RESERVED} tokens.")
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise KVQuantError(f"--needle-depths {listed(self.depths)}: each must be a percentage from 0 to 100.")
        if self.trials < 1:
            raise KVQuantError(f"--needle-trials {self.trials}: must be at least 1.")

    def identity(self) -> dict[str, Any]:
        return settings_of(self)

    def run(self, client: Client, bench: Bench) -> Outcome:
        style = client.style(self.style)
        lengths = fitting("--needle-lengths", self.lengths, client)
        ids = text_tokens(self.text, self.skip, client, bench)
        if len(ids) < max(lengths):
            raise KVQuantError(
                f"{self.text.name}: {len(ids)} tokens after --text-skip {self.skip}, but a haystack of {max(lengths)} "
                "needs as many. Give a longer text or shorter --needle-lengths."
            )
        cells = [(n, depth, trial) for n in lengths for depth in self.depths for trial in range(self.trials)]

        def ask(cell: tuple[int, float, int]) -> dict[str, Any]:
            length, depth, trial = cell
            needle = Needle.draw(f"{self.seed}/{length}/{depth}/{trial}")
            start = needle.random.randrange(len(ids) - length + 1)
            haystack = self._haystack(bench, client, ids[start : start + length - RESERVED], depth, needle)
            if style == "chat":
                answer = client.chat(f"{haystack}\n\n{needle.question}", ANSWER_TOKENS)
            else:
                answer = client.complete(f"{haystack}\n\n{needle.unfinished}", ANSWER_TOKENS, stop=["\n"])
            return {
                "length": length,
                "depth": depth,
                "passed": needle.found_in(answer.text),
                "prompt_tokens": answer.prompt_tokens,
                "complete": answer.complete,
                "tokens": answer.tokens,
                "answer": answer.text[:80],
            }

        return self._outcome(bench.map(ask, cells), style, lengths)

    def _haystack(self, bench: Bench, client: Client, ids: np.ndarray, depth: float, needle: Needle) -> str:
        text = bench.material.text(ids, client)
        at = int(len(text) * depth / 100)
        # The needle goes between words: at the next space, if there is one.
        at = text.find(" ", at) if " " in text[at:] else len(text)
        return f"{text[:at]} {needle.sentence}{text[at:]}"

    def _outcome(self, asked: list[dict[str, Any]], style: str, lengths: list[int]) -> Outcome:
        row: dict[str, Any] = {}
        for length in self.lengths:
            of_length = [one for one in asked if one["length"] == length]
            column = f"needle_{short(length)}"
            passed = [float(one["passed"]) for one in of_length]
            row[column], row[f"{column}_se"] = mean_and_error(passed) if passed else (None, None)
            row |= answer_lengths(column, of_length) if of_length else {}

        def cell(length: int, depth: float) -> tuple[float, float | None]:
            found = (one for one in asked if (one["length"], one["depth"]) == (length, depth))
            return mean_and_error([float(one["passed"]) for one in found])

        grid = [[cell(length, depth) for length in lengths] for depth in self.depths]
        value, se = mean_and_error([float(one["passed"]) for one in asked])
        row |= {"needle": value, "needle_se": se, "needle_n": len(asked), **answer_lengths("needle", asked)}
        row["needle_grid"] = {
            "lengths": lengths,
            "depths": list(self.depths),
            "passed": [[passed for passed, _ in line] for line in grid],
            "se": [[error for _, error in line] for line in grid],
        }
        details = {"style": style, "asked": asked, "items": [int(one["passed"]) for one in asked]}
        left_out = [length for length in self.lengths if length not in lengths]
        warnings = [f"no haystack of {length} tokens: longer than the server takes" for length in left_out]
        return Outcome(value, se, len(asked), row, details, warnings)


class Needle:
    """A seven-digit number that belongs to a city."""

    def __init__(self, city: str, number: int, source: random.Random) -> None:
        self.city, self.number, self.random = city, number, source

    @classmethod
    def draw(cls, seed: str) -> Needle:
        source = random.Random(seed)
        return cls(source.choice(CITIES), source.randrange(1_000_000, 10_000_000), source)

    @property
    def sentence(self) -> str:
        return f"The magic number of {self.city} is {self.number}."

    @property
    def question(self) -> str:
        return f"What is the magic number of {self.city} that the text above mentions? Answer with the number only."

    @property
    def unfinished(self) -> str:
        return f"As the text above says, the magic number of {self.city} is"

    def found_in(self, answer: str) -> bool:
        """Returns whether the answer's first number is the needle's; thousands separators do not matter."""
        found = re.search(r"\d[\d,]*", answer)
        return found is not None and found.group().replace(",", "") == str(self.number)
