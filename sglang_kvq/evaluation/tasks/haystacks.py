"""Texts in which something must be found and copied exactly, generated from a seed alone.

Each kind is a function ``(seed, size) -> Haystack``, with the same text for the same arguments on every machine. The
answer lies in the first two thirds, outside the cache's window of recent tokens.

``multi_key``, ``multi_value`` and ``tracking`` follow tasks of RULER (Hsieh et al., arXiv 2404.06654). ``exact_keys``
is the retrieval from JSON of Liu et al., arXiv 2307.03172. ``tool_call`` is ours.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

#: First and last names for ``tool_call``.
FIRST = (
    *("Ada", "Boris", "Chidi", "Dana", "Emeka", "Farah", "Goran"),
    *("Hana", "Ivo", "Jude", "Kira", "Lena", "Milo", "Noor"),
)
LAST = ("Abara", "Brandt", "Costa", "Dimas", "Eriksen", "Fofana", "Garner", "Haddad", "Ibsen", "Jovic", "Kowal", "Lund")
#: Syllables of the words that ``multi_key`` and ``multi_value`` use as keys.
SYLLABLES = (
    *("ba", "cor", "del", "fin", "gor", "hul", "jan", "kem"),
    *("lor", "mir", "nes", "pol", "rud", "sav", "tir", "vex"),
)
#: Number of values of one key in ``multi_value``, and of variables of one chain in ``tracking``.
VALUES, CHAIN = 4, 5


@dataclass(frozen=True)
class Haystack:
    """One text with its question and answer.

    Attributes:
        text: the text to read.
        question: the question to a chat model after the text.
        unfinished: the text that a base model continues; ends within a quotation if the answer is quoted.
        expected: strings that the answer must contain, each one exactly.
        pattern: regular expression that finds whole strings in an answer, so a copy with an extra character is wrong.
    """

    text: str
    question: str
    unfinished: str
    expected: tuple[str, ...]
    pattern: str

    def score(self, answer: str) -> float:
        """Returns the share of ``expected`` that the answer contains, 0 to 1."""
        found = set(re.findall(self.pattern, answer))
        return sum(value in found for value in self.expected) / len(self.expected)


def exact_keys(seed: str, size: int) -> Haystack:
    """Generates a JSON object with ``size`` random UUIDs as keys and as values; asks for the value of one key."""
    source = random.Random(f"exact_keys/{seed}")
    pairs = [(_uuid(source), _uuid(source)) for _ in range(size)]
    key, value = pairs[_early(source, size)]
    text = "JSON data:\n{" + ",\n ".join(f'"{a}": "{b}"' for a, b in pairs) + "}"
    question = f'What is the value of the key "{key}"? Answer with the value only.'
    return Haystack(text, question, f'The value of the key "{key}" is "', (value,), r"[0-9a-f-]{30,}")


def multi_key(seed: str, size: int) -> Haystack:
    """Generates ``size`` sentences, each with a word and its number; asks for the number of one word."""
    source = random.Random(f"multi_key/{seed}")
    words = _words(source, size)
    numbers = [_number(source) for _ in words]
    at = _early(source, size)
    text = "\n".join(_sentence(word, number) for word, number in zip(words, numbers, strict=True))
    question = f"What is the special magic number for {words[at]} in the text above? Answer with the number only."
    unfinished = f"The special magic number for {words[at]} mentioned in the text above is"
    return Haystack(text, question, unfinished, (numbers[at],), r"\d+")


def multi_value(seed: str, size: int) -> Haystack:
    """Like ``multi_key``, but one word has ``VALUES`` numbers, far from each other; asks for all of them."""
    source = random.Random(f"multi_value/{seed}")
    word, *words = _words(source, max(size - VALUES, 1) + 1)
    lines = [_sentence(other, _number(source)) for other in words]
    numbers = tuple(_number(source) for _ in range(VALUES))
    end = max(len(lines) * 2 // 3, 1)
    parts = [end * n // VALUES for n in range(VALUES + 1)]
    places = [source.randrange(low, max(high, low + 1)) for low, high in itertools.pairwise(parts)]
    for place, number in reversed([*zip(places, numbers, strict=True)]):
        lines.insert(place, _sentence(word, number))
    question = (
        f"What are all the {VALUES} special magic numbers for {word} in the text above? Answer with the numbers only."
    )
    unfinished = f"The {VALUES} special magic numbers for {word} mentioned in the text above are"
    return Haystack("\n".join(lines), question, unfinished, numbers, r"\d+")


def tracking(seed: str, size: int) -> Haystack:
    """Generates ``size`` assignments; asks for the ``CHAIN`` variables through which one number is passed on."""
    source = random.Random(f"tracking/{seed}")
    names = _names(source, max(size, 2 * CHAIN))
    chain, others = names[:CHAIN], names[CHAIN:]
    value, lines = _number(source), []
    for n, name in enumerate(others):  # other chains of the same length
        first = n % CHAIN == 0
        lines.append(f"VAR {name} = {_number(source)}" if first else f"VAR {name} = VAR {others[n - 1]}")
    end = max(len(lines) * 2 // 3, CHAIN)
    places = sorted(source.randrange(end) for _ in chain)
    for n, place in reversed([*enumerate(places)]):
        lines.insert(place, f"VAR {chain[n]} = {value}" if n == 0 else f"VAR {chain[n]} = VAR {chain[n - 1]}")
    question = (
        f"Which {CHAIN} variables have the value {value}, directly or through another variable? "
        "Answer with their names only."
    )
    unfinished = f"The {CHAIN} variables that have the value {value}, directly or through another variable, are:"
    return Haystack("\n".join(lines), question, unfinished, tuple(chain), r"\b[A-Z]{5}\b")


def tool_call(seed: str, size: int) -> Haystack:
    """Generates a transcript of ``size`` tool calls; asks to repeat one call's arguments, given its order number."""
    source = random.Random(f"tool_call/{seed}")
    calls = [_order(source) for _ in range(size)]
    wanted = calls[_early(source, size)]
    lines = []
    for call in calls:
        lines.append(json.dumps({"role": "assistant", "tool": "create_shipment", "arguments": call}))
        lines.append(json.dumps({"role": "tool", "content": {"status": "ok", "label": _number(source)}}))
    question = (
        f"The shipment of order {wanted['order']} got lost. Call resend_shipment with the very arguments of its "
        "create_shipment call. Answer with the JSON of the arguments only."
    )
    begun = json.dumps({"role": "assistant", "tool": "resend_shipment", "arguments": {"order": wanted["order"]}})
    unfinished = f"The call of resend_shipment for the lost order:\n{begun.removesuffix('}}')},"
    expected = tuple(wanted[name] for name in ("tracking", "email", "address"))
    return Haystack("\n".join(lines), question, unfinished, expected, r'"([^"]*)"')


#: Kinds by name, in the order of docs/evaluation-reference.md.
KINDS: dict[str, Callable[[str, int], Haystack]] = {
    kind.__name__: kind for kind in (exact_keys, multi_key, multi_value, tracking, tool_call)
}


def _early(source: random.Random, size: int) -> int:
    """Returns a random index in the first two thirds."""
    return source.randrange(max(size * 2 // 3, 1))


def _uuid(source: random.Random) -> str:
    return str(uuid.UUID(int=source.getrandbits(128), version=4))


def _number(source: random.Random) -> str:
    return str(source.randrange(1_000_000, 10_000_000))


def _sentence(word: str, number: str) -> str:
    return f"One of the special magic numbers for {word} is: {number}."


def _words(source: random.Random, count: int) -> list[str]:
    """Returns different words of three or four syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(source.choices(SYLLABLES, k=source.randint(3, 4)))] = None
    return list(found)


def _names(source: random.Random, count: int) -> list[str]:
    """Returns different names of five capital letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(source.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))] = None
    return list(found)


def _order(source: random.Random) -> dict[str, str]:
    first, last = source.choice(FIRST), source.choice(LAST)
    code = "".join(source.choices("ABCDEFGHJKLMNPQRSTUVWXYZ23456789", k=10))
    return {
        "order": f"{source.randrange(100_000, 1_000_000)}-{source.randrange(10, 100)}",
        "customer": f"{first} {last}",
        "tracking": f"{code[:4]}-{code[4:]}",
        "email": f"{first}.{last}{source.randrange(10, 1000)}@example.org".lower(),
        "address": f"{source.randrange(1, 400)} {source.choice(LAST)} Street, {source.randrange(10_000, 100_000)}",
    }
