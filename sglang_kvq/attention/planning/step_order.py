"""Overlap of a decode step's launches: decides which may start before the previous one on the stream has ended."""

from __future__ import annotations

from enum import Enum, auto

from sglang_kvq.kernels.device.common import NO_OVERLAP, Overlap


class Launch(Enum):
    """Launches of a decode step in order; all but the first repeat in each layer."""

    PLAN = auto()
    ROTATE = auto()
    ATTEND = auto()
    MERGE = auto()


class StepOrder:
    """Decides how each launch of a step overlaps the launches before and after it; called in the order of launches.

    Between a step's plan and its last layer nothing writes items or tables, so an early launch may read them. An early
    launch waits only for data that the launch right before it writes. It also lets the next launch start. Therefore no
    launch right after the plan may be early.

    Args:
        possible: True if launches on this device can overlap (``kernels.common.can_overlap``).
    """

    def __init__(self, possible: bool) -> None:
        self.possible = possible
        self._last: Launch | None = None
        self._rotations = 0  # since the plan

    def plan(self) -> None:
        """Begins a step; the plan itself waits for all earlier launches."""
        self._last, self._rotations = Launch.PLAN, 0

    def rotate(self) -> Overlap:
        """Returns the overlap of a rotation: early, except for the step's first one, which waits for the plan.

        Attention may start before the rotation ends.
        """
        early = self._rotations > 0
        self._rotations += 1
        return self._launched(Launch.ROTATE, Overlap(early, lets_next=True))

    def attend(self) -> Overlap:
        """Returns the overlap of attention: early if it is right after a rotation.

        The merge may start as the programs of attention end.
        """
        return self._launched(Launch.ATTEND, Overlap(early=self._last is Launch.ROTATE, lets_next=True))

    def merge(self) -> Overlap:
        """Returns the overlap of a merge: early, because attention always precedes it.

        The next launch may not start early, because it is not one of our kernels.
        """
        return self._launched(Launch.MERGE, Overlap(early=True))

    def _launched(self, launch: Launch, overlap: Overlap) -> Overlap:
        self._last = launch
        return overlap if self.possible else NO_OVERLAP
