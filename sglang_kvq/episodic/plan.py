"""Plan for a session's prompt: serve it as it is, or compute its history first and read chosen pages."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.constants import PAGE_SIZE


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
    history = _whole(min(exact, tokens - 1))
    compute = tokens - history > block
    if compute:
        least = -(-(tokens - block) // PAGE_SIZE) * PAGE_SIZE
        history = min(_whole(tokens - 1), max(_whole(min(question, tokens - 1)), least))
    return Plan(tokens, history, compute, (budget - (tokens - history)) // PAGE_SIZE)


def _whole(tokens: int) -> int:
    return tokens // PAGE_SIZE * PAGE_SIZE
