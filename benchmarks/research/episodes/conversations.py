"""Conversations with questions, and their conversion to tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.research.episodes.segments import Turn
from sglang_kvq.errors import KVQuantError

SYSTEM = "You answer questions about a long conversation. Answer in a few words, with what was said."
OPENING = "The conversation so far:\n"
#: Placeholders for history and question while a chat template is applied; no text contains them.
_HISTORY, _QUESTION = "\x02HISTORY\x02", "\x02QUESTION\x02"


@dataclass(frozen=True)
class Question:
    """A question; ``evidence`` lists the turns that contain the answer, and is not empty."""

    text: str
    answer: str
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    name: str
    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]

    def first_turns(self, count: int) -> Conversation:
        """Returns the first turns, with the questions whose evidence lies in them."""
        kept = tuple(q for q in self.questions if max(q.evidence) < count)
        return replace(self, turns=self.turns[:count], questions=kept)


def header(turn: Turn) -> str:
    """Returns the line above the first turn of a session."""
    return f"\n[Session {turn.session}{f', {turn.when}' if turn.when else ''}]\n"


@dataclass(frozen=True)
class Ask:
    """A question in tokens: ``ids`` are read, and the last ``answer`` of them are predicted."""

    ids: list[int]
    answer: int


class Writer:
    """Turns conversations into tokens in the form of the model's chat template.

    A turn's tokens do not depend on its neighbors, so a history of some turns is a concatenation.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{_HISTORY}{_QUESTION}"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, found, rest = text.partition(_HISTORY)
        between, found_too, self._after = rest.partition(_QUESTION)
        if not found or not found_too or between:
            raise KVQuantError("the chat template changes the user's text. Use a model with a plain template.")
        self.prefix = self.tokens(before + OPENING)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def text(self, ids: list[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def question(self, text: str) -> list[int]:
        """Returns the tokens from the end of the history to the start of the answer."""
        return self.tokens(f"\n\nQuestion: {text}{self._after}")

    def ask(self, question: Question) -> Ask:
        answer = self.tokens(question.answer)
        return Ask(self.question(question.text) + answer, len(answer))

    def history(self, turns: Sequence[Turn]) -> History:
        return History(
            self.prefix, [self.tokens(header(t)) for t in turns], [self.tokens(t.line()) for t in turns], turns
        )


class History:
    """A conversation's tokens: the prefix (system prompt and opening), then turn after turn.

    Attributes:
        ids: all tokens.
        spans: ``(start, end)`` of each turn in ``ids``; a session's header belongs to its first turn.
    """

    def __init__(
        self, prefix: list[int], headers: list[list[int]], lines: list[list[int]], turns: Sequence[Turn]
    ) -> None:
        self.prefix, self._headers, self._lines, self._turns = prefix, headers, lines, turns
        self.ids, self.spans = self._join(range(len(turns)))

    def __len__(self) -> int:
        return len(self.ids)

    def _join(self, turns: Iterable[int]) -> tuple[list[int], list[tuple[int, int]]]:
        ids, spans, session = list(self.prefix), [], None
        for turn in turns:
            start = len(ids)
            if self._turns[turn].session != session:
                session = self._turns[turn].session
                ids += self._headers[turn]
            ids += self._lines[turn]
            spans.append((start, len(ids)))
        return ids, spans

    def of_turns(self, turns: Iterable[int]) -> list[int]:
        """Returns tokens of some turns, in order of the conversation, each session under its header."""
        return self._join(sorted(turns))[0]

    def size(self, turns: Iterable[int], *, header: bool) -> int:
        """Counts tokens of some turns of one session, with its header or without."""
        turns = list(turns)
        return sum(len(self._lines[turn]) for turn in turns) + (len(self._headers[turns[0]]) if header else 0)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Returns ``(start, end)`` of turns ``first`` to ``last``, both included."""
        return self.spans[first][0], self.spans[last][1]


def fit(conversation: Conversation, writer: Writer, tokens: int, *, whole_sessions: bool) -> Conversation:
    """Cuts a conversation to as many first turns, or sessions, as ``tokens`` hold, prefix included.

    Raises:
        KVQuantError: not even the first fits, or no question is left.
    """
    history = writer.history(conversation.turns)
    count = sum(end <= tokens for _, end in history.spans)
    if whole_sessions and count < len(conversation.turns):
        last = conversation.turns[count].session
        count = sum(turn.session < last for turn in conversation.turns[:count])
    fitting = conversation.first_turns(count)
    if not fitting.questions:
        raise KVQuantError(f"{conversation.name}: no question about what fits {tokens} tokens; raise --history-tokens.")
    return fitting
