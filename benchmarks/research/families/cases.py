"""Builds contexts and questions: running text with a needle, a JSON object of random keys, running text again.

A context is read and compressed once. It is then continued separately with the text's next tokens (divergence), with a
question for a key's value, and with a question for the needle. The order of the three parts ensures that everything
asked for is history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.research.families.base import RECENT, SINK
from sglang_kvq.evaluation.tasks.haystacks import exact_keys
from sglang_kvq.evaluation.tasks.needle import Needle

#: Tokens of the text that contains the needle, and tokens reserved between the parts.
BEGINNING, BETWEEN = 240, 24
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Question:
    """Token ids int64 of a question and of its right answer."""

    ids: torch.Tensor
    answer: torch.Tensor


@dataclass(frozen=True)
class Case:
    """One context.

    Attributes:
        name: unique for a model and a length.
        ids: int64 ``[T]``, the tokens that are read.
        following: int64 ``[n]``, the text's next tokens.
        questions: by task.
    """

    name: str
    ids: torch.Tensor
    following: torch.Tensor
    questions: dict[str, Question]


def draw(
    encode: Encode, decode: Decode, texts: Sequence[torch.Tensor], count: int, length: int, following: int
) -> Iterator[Case]:
    """Generates cases, alternating between texts, ids int64 ``[n]``, each cut at even distances."""
    per_line = len(encode(exact_keys("families/sample", 20).text)) / 20
    pairs = int((length - RECENT - BEGINNING - BETWEEN) / per_line)
    if pairs < 2:
        raise ValueError(f"{length} tokens: too few for two keys of {per_line:.0f} tokens")
    for number in range(count):
        of, turn = texts[number % len(texts)], number // len(texts)
        turns = -(-count // len(texts))
        start = int((len(of) - 2 * length) * (turn + 0.5) / turns)
        needle, keys = Needle.draw(f"families/{number}"), exact_keys(f"families/{number}", pairs)
        text = decode(of[start : start + BEGINNING].tolist())
        least = SINK / BEGINNING + 0.1
        at = text.find(" ", int(len(text) * (least + (0.9 - least) * number / count)))
        head = encode(f"{text[:at]} {needle.sentence}{text[at:]}\n\n{keys.text}\n\n")
        rest = of[start + BEGINNING : start + BEGINNING + length + following - len(head)]
        ids = torch.cat([torch.tensor(head), rest])
        questions = {
            "exact_keys": Question(_ids(encode, f"\n\n{keys.unfinished}"), _ids(encode, keys.expected[0])),
            "needle": Question(_ids(encode, f"\n\n{needle.unfinished}"), _ids(encode, f" {needle.number}")),
        }
        yield Case(f"{length}/{number}", ids[:length], ids[length:], questions)


def _ids(encode: Encode, text: str) -> torch.Tensor:
    return torch.tensor(encode(text))
