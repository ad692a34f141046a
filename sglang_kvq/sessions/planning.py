"""Plan of a prompt: where its question begins, what of its history has to be computed, and how much of it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sglang_kvq.constants import PAGE_SIZE

#: Last tokens of a prompt that stand for its question when nothing better is known, and at most.
QUESTION_TOKENS = 256
#: Tokens that are compared first, then twice as many: most conversations that part do so early.
_COMPARED = 1 << 12
#: Tokens that are compared at once, at most. Results of this size fit into memory in use; new memory takes longer than
#: comparing.
_AT_ONCE = 1 << 16
_FIRST = [{"role": "user", "content": "What is one?"}, {"role": "assistant", "content": "A number."}]
_LAST = ("Two, please.", "And the fourth one?")


@dataclass(frozen=True)
class Plan:
    """Plan for one prompt.

    Attributes:
        tokens: of the prompt.
        history: its first tokens, whole pages, of which some are chosen; 0 serves the prompt as it is.
        compute: whether the history has to be computed (or found in the cache) before.
        pages: of the history that may be chosen: fewer than it has, and 0 without a history.
    """

    tokens: int
    history: int = 0
    compute: bool = False
    pages: int = 0

    @property
    def tail(self) -> int:
        """Tokens behind the history, at least one: computed with the chosen pages alone."""
        return self.tokens - self.history

    @property
    def hot(self) -> int:
        """Tokens that are read when the answer begins."""
        return self.pages * PAGE_SIZE + self.tail if self.history else self.tokens


def plan(tokens: int, exact: int, question: int, *, budget: int, block: int) -> Plan:
    """The plan of a prompt.

    A tail of up to ``block`` tokens is left as it is. A longer one is computed with the whole history, so that it
    becomes history itself, up to where the question begins; a question longer than the block up to its last block.

    Args:
        tokens: of the prompt, at least 1.
        exact: how many of its first tokens are known to be computed, each with all before it.
        question: where the question begins.
        budget, block: of ``EpisodicConfig``, which has checked that they fit.
    """
    if tokens <= budget:
        return Plan(tokens)
    history = whole(min(exact, tokens - 1))
    compute = tokens - history > block
    if compute:
        least = -(-(tokens - block) // PAGE_SIZE) * PAGE_SIZE
        history = min(whole(tokens - 1), max(whole(min(question, tokens - 1)), least))
    return Plan(tokens, history, compute, (budget - (tokens - history)) // PAGE_SIZE)


class Template(Protocol):
    """The part of a transformers tokenizer that is used."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


def user_turn(tokenizer: Template) -> np.ndarray:
    """The tokens that the chat template puts before a later user message: int64 ``[n]``, empty if that cannot be told.

    Two conversations are rendered that differ in their last user message, and one without it: the marker is what the
    first two have in common and the third has not.
    """
    try:
        short = _render(tokenizer, _FIRST)
        longer = [_render(tokenizer, [*_FIRST, {"role": "user", "content": text}]) for text in _LAST]
    except Exception:  # no template, or one that refuses such a conversation: both happen, and neither is an error
        return np.empty(0, np.int64)
    shared = common_length(*longer)
    start = common_length(short, longer[0])
    marker = longer[0][start:shared]
    # Markers of one token may be a line break; the others occur in what users say only if they mean to.
    return marker if len(marker) > 1 else np.empty(0, np.int64)


def _render(tokenizer: Template, conversation: list[dict[str, str]]) -> np.ndarray:
    ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
    return np.asarray(ids, np.int64)


def occurrences(ids: np.ndarray, marker: np.ndarray) -> np.ndarray:
    """Where ``marker`` begins in ``ids``, ascending: int64 ``[n]``."""
    if not len(marker) or len(marker) > len(ids):
        return np.empty(0, np.int64)
    last = len(ids) - len(marker) + 1
    parts = ((at, ids[at : min(at + _AT_ONCE, last)]) for at in range(0, last, _AT_ONCE))
    starts = np.concatenate([at + np.flatnonzero(part == marker[0]) for at, part in parts])
    for at in range(1, len(marker)):
        starts = starts[ids[starts + at] == marker[at]]
    return starts


def question_start(ids: np.ndarray, known: int, turns: np.ndarray) -> int:
    """Where the question of a prompt begins.

    It is the last user message if that is new; otherwise what is new; at most the last ``QUESTION_TOKENS``.

    Args:
        ids: the prompt, ``[T]``.
        known: tokens that it has in common with what the session said before.
        turns: where user messages begin, ascending.
    """
    least = max(0, len(ids) - QUESTION_TOKENS)
    last = int(turns[-1]) if len(turns) else -1
    if last >= known or known >= len(ids):  # the same prompt once more asks what it asked
        return max(least, last)
    return max(least, known)


def common_length(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Tokens that two sequences have in common at their beginning."""
    n, start, length = min(len(a), len(b)), 0, _COMPARED
    while start < n:
        end = min(start + length, n)
        differs = np.asarray(a[start:end]) != np.asarray(b[start:end])
        if differs[first := int(differs.argmax())]:
            return start + first
        start, length = end, min(2 * length, _AT_ONCE)
    return n


def whole(tokens: int) -> int:
    """Rounds a number of tokens down to whole pages."""
    return tokens // PAGE_SIZE * PAGE_SIZE
