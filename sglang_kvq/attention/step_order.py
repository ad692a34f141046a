"""Which launches of a decode step may start before the one ahead of them on the stream has ended."""

from __future__ import annotations

from enum import Enum, auto

from sglang_kvq.kernels.device.common import NO_OVERLAP, Overlap


class Launch(Enum):
    """Launches of a decode step in their order; all but the first are repeated in each layer."""

    PLAN = auto()
    ROTATE = auto()
    ATTEND = auto()
    MERGE = auto()


class StepOrder:
    """Says how each launch of a step overlaps its neighbours; asked in the order of launches.

    From a step's plan to its last layer nothing writes items or tables, so an early launch may read them; what it waits
    for is what the launch right before it writes. But an early launch lets its follower start, too, so none may be
    early right behind the plan.

    Args:
        possible: whether launches on this device can overlap (``kernels.common.can_overlap``).
    """

    def __init__(self, possible: bool) -> None:
        self.possible = possible
        self._last: Launch | None = None
        self._rotations = 0  # since the plan

    def plan(self) -> None:
        """A step begins; the plan itself waits for whatever is ahead."""
        self._last, self._rotations = Launch.PLAN, 0

    def rotate(self) -> Overlap:
        """Early, unless it is the step's first: that one waits for the plan. Attention may start with it."""
        early = self._rotations > 0
        self._rotations += 1
        return self._launched(Launch.ROTATE, Overlap(early, lets_next=True))

    def attend(self) -> Overlap:
        """Early right behind a rotation. The merge may start when its programs end."""
        return self._launched(Launch.ATTEND, Overlap(early=self._last is Launch.ROTATE, lets_next=True))

    def merge(self) -> Overlap:
        """Early: attention is always the launch before it. It lets none start, as what follows is not ours."""
        return self._launched(Launch.MERGE, Overlap(early=True))

    def _launched(self, launch: Launch, overlap: Overlap) -> Overlap:
        self._last = launch
        return overlap if self.possible else NO_OVERLAP
