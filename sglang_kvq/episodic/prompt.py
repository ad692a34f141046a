"""The patched prompt of an episode: its queries say which of a history's keys the episode needs."""

from __future__ import annotations

from collections.abc import Sequence

INSTRUCTION = "\n\nWhat matters in the parts of this conversation that follow? Recall every fact in them.\n\n"


def patched_prompt(segments: Sequence[str]) -> str:
    """An instruction followed by the segments that stand for the episode (its medoids), in order."""
    return INSTRUCTION + "\n".join(segments)
