"""Divides a conversation into segments: a few consecutive turns of one session, the unit of embedding and retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_kvq.errors import KVQuantError

#: Turns of a segment (EpiCache, arXiv 2509.17396).
SEGMENT_TURNS = 4


@dataclass(frozen=True)
class Turn:
    """One party's turn.

    Attributes:
        session: number of its session, which never decreases from turn to turn.
        when: date of the session, as text; "" if unknown.
    """

    speaker: str
    text: str
    session: int = 0
    when: str = ""

    def line(self) -> str:
        """Returns ``Speaker: text`` and a line end."""
        return f"{self.speaker}: {self.text}\n"


@dataclass(frozen=True)
class Segment:
    """Turns ``first`` to ``last``, both included; ``text`` is embedded."""

    first: int
    last: int
    text: str

    @property
    def turns(self) -> range:
        return range(self.first, self.last + 1)


def segment(turns: Sequence[Turn], size: int = SEGMENT_TURNS) -> list[Segment]:
    """Returns consecutive segments of at most ``size`` turns, none of which crosses sessions.

    Appending turns changes at most the last segment, so a growing conversation embeds each segment once.

    Raises:
        KVQuantError: a size below 1, or sessions out of order.
    """
    if size < 1:
        raise KVQuantError(f"segments of {size} turns: give 1 or more.")
    segments: list[Segment] = []
    first = 0
    for at, turn in enumerate(turns):
        if at and turn.session < turns[at - 1].session:
            raise KVQuantError(
                f"turn {at} is of session {turn.session}, the one before it of session {turns[at - 1].session}: "
                "give turns in order of their sessions."
            )
        ends = at + 1 == len(turns) or turns[at + 1].session != turn.session
        if ends or at + 1 - first == size:
            segments.append(Segment(first, at, "".join(t.line() for t in turns[first : at + 1])))
            first = at + 1
    return segments
