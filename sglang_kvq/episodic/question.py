"""Where in a prompt the last user message begins, and where its system prompt ends, by the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

#: Last tokens of a prompt that stand for its question when nothing better is known, and at most.
QUESTION_TOKENS = 256
#: Tokens that are compared at once: most conversations that part do so early.
_COMPARED = 1 << 14

_FIRST = [{"role": "user", "content": "What is one?"}, {"role": "assistant", "content": "A number."}]
_LAST = ("Two, please.", "And the fourth one?")


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
    starts = np.flatnonzero(ids[: len(ids) - len(marker) + 1] == marker[0])
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
    n = min(len(a), len(b))
    for start in range(0, n, _COMPARED):
        end = min(start + _COMPARED, n)
        differs = np.asarray(a[start:end]) != np.asarray(b[start:end])
        if differs[first := int(differs.argmax())]:
            return start + first
    return n
