"""Plans a prompt: finds its question, and decides how much history must be computed and how many pages are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sglang_kvq.constants import PAGE_SIZE

#: Most tokens of a question, counted from the prompt's end.
QUESTION_TOKENS = 256
#: Number of tokens in the first comparison; each further one compares twice as many, because most conversations that
#: differ do so early.
_COMPARED = 1 << 12
#: Most tokens that are compared at once. Results of this size fit into memory that the process already has; allocating
#: more would take longer than comparing.
_AT_ONCE = 1 << 16
_FIRST = [{"role": "user", "content": "What is one?"}, {"role": "assistant", "content": "A number."}]
_LAST = ("Two, please.", "And the fourth one?")


@dataclass(frozen=True)
class Plan:
    """Plan for one prompt.

    Attributes:
        tokens: number of tokens of the prompt.
        history: number of first tokens, whole pages, from which pages are chosen; 0 serves the whole prompt.
        compute: whether the history must first be computed (or found in the cache).
        pages: number of pages to choose from the history, fewer than it has; 0 without a history.
    """

    tokens: int
    history: int = 0
    compute: bool = False
    pages: int = 0

    @property
    def tail(self) -> int:
        """Number of tokens after the history, at least one; they are computed with the chosen pages only."""
        return self.tokens - self.history

    @property
    def hot(self) -> int:
        """Number of tokens that are read when the answer begins."""
        return self.pages * PAGE_SIZE + self.tail


def plan(tokens: int, exact: int, question: int, *, budget: int, block: int) -> Plan:
    """Returns the plan of a prompt.

    Tokens after the computed ones are the tail, if they are at most ``block``. Otherwise the tokens up to the question
    are first computed with the whole history and become history themselves. If the question is longer than ``block``,
    all but its last block is computed too.

    Args:
        tokens: number of tokens of the prompt, at least 1.
        exact: number of its first tokens that are known to be computed, each with all tokens before it.
        question: index of the question's first token.
        budget, block: see ``EpisodicConfig``, which has checked that they fit.
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
    """Returns the tokens that the chat template puts before a later user message, int64 ``[n]``; empty if unknown.

    To find them, two conversations with different last user messages are rendered, and one without that message. The
    marker is the part that the first two share and the third does not have.
    """
    try:
        short = _render(tokenizer, _FIRST)
        longer = [_render(tokenizer, [*_FIRST, {"role": "user", "content": text}]) for text in _LAST]
    except Exception:  # no template, or one that refuses such a conversation: both happen, and neither is an error
        return np.empty(0, np.int64)
    shared = common_length(*longer)
    start = common_length(short, longer[0])
    marker = longer[0][start:shared]
    # A marker of one token may be a line break. A longer one is in a user's text only if the user puts it there.
    return marker if len(marker) > 1 else np.empty(0, np.int64)


def _render(tokenizer: Template, conversation: list[dict[str, str]]) -> np.ndarray:
    ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
    return np.asarray(ids, np.int64)


def occurrences(ids: np.ndarray, marker: np.ndarray) -> np.ndarray:
    """Returns the indices at which ``marker`` begins in ``ids``, ascending: int64 ``[n]``."""
    if not len(marker) or len(marker) > len(ids):
        return np.empty(0, np.int64)
    last = len(ids) - len(marker) + 1
    parts = ((at, ids[at : min(at + _AT_ONCE, last)]) for at in range(0, last, _AT_ONCE))
    starts = np.concatenate([at + np.flatnonzero(part == marker[0]) for at, part in parts])
    for at in range(1, len(marker)):
        starts = starts[ids[starts + at] == marker[at]]
    return starts


def question_start(ids: np.ndarray, known: int, turns: np.ndarray) -> int:
    """Returns the index at which the question of a prompt begins.

    The question is the last user message if that message is new, otherwise all new tokens. It has at most the last
    ``QUESTION_TOKENS`` tokens.

    Args:
        ids: the prompt, ``[T]``.
        known: number of first tokens that the prompt shares with the session's earlier conversation.
        turns: indices at which user messages begin, ascending.
    """
    least = max(0, len(ids) - QUESTION_TOKENS)
    last = int(turns[-1]) if len(turns) else -1
    if last >= known or known >= len(ids):  # a repeated prompt has the same question
        return max(least, last)
    return max(least, known)


def common_length(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Returns the length of the common beginning of two sequences."""
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
