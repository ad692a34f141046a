"""Prompts in which keys must be copied, judged without generating: a JSON object of random keys, then questions.

The text is that of ``exact_keys`` (``sglang_kvq.evaluation.tasks.haystacks``). ``QUESTIONS`` questions follow it, each
with its right answer. A value is copied if each of its tokens is the likeliest one after the right tokens before it, as
greedy decoding would write it. One pass over a prompt judges all of its questions.

The pairs that are asked for lie after the largest sink and before the largest window of the sweep, so that every case
reads them from records. A window therefore never helps by holding the answer itself.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.evaluation.tasks.haystacks import exact_keys

QUESTIONS = 4
#: Number of lines from which the tokens per line are estimated.
SAMPLE = 20
BEGINNING = "JSON data:\n"
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        ids: int64 ``[T]``.
        values: first and last position, exclusive, of each answer.
    """

    ids: torch.Tensor
    values: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        """Position of the token before the first answer."""
        return self.values[0][0] - 1


def draw(encode: Encode, begin: Sequence[int], number: int, *, length: int, sink: int, recent: int) -> Prompt:
    """Generates a prompt of at most ``length`` tokens, at most about one pair shorter.

    Args:
        encode: tokenizes without special tokens.
        begin: tokens that begin every prompt of this model.
        number: seed.
        sink, recent: the largest of the sweep.

    Raises:
        KVQuantError: too few pairs lie between sink and window.
    """
    seed, sample = f"windows/{number}", exact_keys("windows/sample", SAMPLE)
    asked = len(encode(sample.unfinished + sample.expected[0]))
    size = int((length - QUESTIONS * asked) * SAMPLE / len(encode(sample.text)))
    while size > 0:
        prompt = _of_size(encode, begin, seed, size, sink, recent)
        if len(prompt.ids) <= length:
            return prompt
        size -= 1
    raise KVQuantError(f"--length {length}: not even one pair of keys fits; give longer prompts.")


def _of_size(encode: Encode, begin: Sequence[int], seed: str, size: int, sink: int, recent: int) -> Prompt:
    text = exact_keys(seed, size).text
    pairs = list(json.loads(text.removeprefix(BEGINNING)).items())
    ids = [*begin, *encode(text)]

    def end(number: int) -> int:
        """Returns the position after a pair; for -1, the position where the first pair begins."""
        shown = text[: text.index(pairs[number][1]) + len(pairs[number][1])] if number >= 0 else ""
        return len(begin) + len(encode(shown))

    everyone = range(len(pairs))
    first = bisect_left(everyone, sink, key=lambda number: end(number - 1))
    stop = bisect_right(everyone, len(ids) - PAGE_SIZE - recent, key=end)
    stored = pairs[first:stop]
    if len(stored) < QUESTIONS:
        raise KVQuantError(
            f"--length {len(ids)}: {len(stored)} keys lie between {sink} sink and {recent} recent tokens, fewer than "
            f"{QUESTIONS}; give longer prompts or smaller windows."
        )
    values = []
    for key, value in random.Random(seed).sample(stored, QUESTIONS):
        ids += encode(f'\n\nThe value of the key "{key}" is "')
        answer = encode(value)
        values.append((len(ids), len(ids) + len(answer)))
        ids += [*answer, *encode('".')]
    return Prompt(torch.tensor(ids[: values[-1][1]]), tuple(values))


def judge(prompt: Prompt, logp: torch.Tensor) -> list[float]:
    """Returns the counts of copied values and of values, then nats and tokens of all values.

    Args:
        logp: ``[T - prompt.first, vocab]``, log-probabilities after each token from ``prompt.first`` on.
    """
    copied, nats, tokens = 0, 0.0, 0
    for start, end in prompt.values:
        answer = prompt.ids[start:end].to(logp.device)
        rows = logp[start - 1 - prompt.first : end - 1 - prompt.first]
        copied += bool((rows.argmax(-1) == answer).all())
        nats -= float(rows.gather(1, answer[:, None]).sum(dtype=torch.float64))
        tokens += end - start
    return [copied, len(prompt.values), round(nats, 4), tokens]
