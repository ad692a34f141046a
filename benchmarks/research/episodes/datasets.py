"""Data sets by name: where conversations come from, and how long a history may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.research.episodes import locomo, longchat, needles
from benchmarks.research.episodes.conversations import Conversation, Writer, fit


@dataclass(frozen=True)
class Dataset:
    """A data set.

    Attributes:
        tokens: most tokens of a history; None for as many as the model's context holds.
        whole_sessions: whether a history ends where a session ends.
    """

    load: Callable[[Path], list[Conversation]]
    tokens: int | None
    whole_sessions: bool = True


DATASETS = {
    "locomo": Dataset(locomo.load, None),
    #: Short enough that a compression of 4 keeps about 1,500 of 6,000 tokens.
    "locomo_6k": Dataset(locomo.load, 6144, whole_sessions=False),
    "longchat": Dataset(longchat.load, 6144),
    "needles": Dataset(needles.load, 6144),
}


def conversations(
    name: str, data: Path, writer: Writer, *, most_tokens: int, limit: int, questions: int
) -> list[Conversation]:
    """Returns at most ``limit`` conversations of a data set, cut to fit, with at most ``questions`` questions each."""
    dataset = DATASETS[name]
    tokens = min(dataset.tokens or most_tokens, most_tokens)
    some = dataset.load(data)[:limit]
    return [thin(fit(one, writer, tokens, whole_sessions=dataset.whole_sessions), questions) for one in some]


def thin(conversation: Conversation, questions: int) -> Conversation:
    """Keeps at most ``questions`` questions of a conversation, evenly spread."""
    count = len(conversation.questions)
    kept = np.linspace(0, count - 1, min(questions, count)).round().astype(int)
    return replace(conversation, questions=tuple(conversation.questions[n] for n in kept))
