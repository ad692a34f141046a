"""Division of one memory between records and BF16 pages: decided on the host, from what the scheduler counts.

The scheduler knows how many pages are in use and how many requests run. So it can always say how many BF16 pages the
windows of these requests want and need, and how many fit beside the pages. The tiers move what lies where the boundary
moves (``TierManager``), on the device and later. Nothing waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.cache.shared.arena import Arena

#: Share of the memory that BF16 pages keep from cached prefixes: windows of requests that ended, which come back.
FLOOR = 0.1
#: The boundary moves by a part of the memory, so that it need not move again soon; by a quarter of it where windows
#: shrink.
_STEP = 64


@dataclass(frozen=True)
class WindowSlots:
    """BF16 pages that running requests want and need.

    Attributes:
        whole: of one request's whole window.
        least: those of one request that are never taken.
        spare: for the pages that one prefill batch writes besides, and for a page that it resumes.
    """

    whole: int
    least: int
    spare: int

    def wanted(self, rows: int) -> int:
        """Returns the BF16 pages of the whole windows of ``rows`` requests."""
        return self.whole * rows + self.spare

    def needed(self, rows: int) -> int:
        """Returns the BF16 pages without which ``rows`` requests cannot run."""
        return self.least * rows + self.spare


class Split:
    """The boundary in one arena.

    Attributes:
        first_slot: where it lies.
    """

    def __init__(self, arena: Arena, windows: WindowSlots) -> None:
        self.arena, self.windows = arena, windows
        self.first_slot = arena.first_slot(arena.pages)
        self._floor = int(FLOOR * arena.slots)

    @property
    def slots(self) -> int:
        """BF16 pages now."""
        return self.arena.slots + 1 - self.first_slot

    @property
    def pages(self) -> int:
        """Pages now, used or not."""
        return self.arena.last_page(self.first_slot)

    def room(self, rows: int) -> int:
        """Returns how many pages fit beside ``rows`` running requests, whose windows may have shrunk."""
        return self.arena.pages_beside(self.windows.needed(rows))

    def excess(self, pages: int, rows: int) -> int:
        """Returns how many of ``pages`` pages should go, if cached ones can, so that windows stay whole."""
        return max(pages - self.arena.pages_beside(max(self.windows.wanted(rows), self._floor)), 0)

    def fit(self, pages: int, rows: int) -> bool:
        """Moves the boundary as ``pages`` pages and ``rows`` requests need it; False if not both fit.

        Pages come first. Windows have what is left, and shrink to what they need.
        """
        most = self.arena.slots_beside(pages)
        needed = self.windows.needed(rows)
        if most < needed:
            return False
        wanted = max(self.windows.wanted(rows), self._floor)
        step, slots = self.arena.slots // _STEP, self.slots
        if slots > most:
            slots = max(most - step, wanted) if most > wanted else max(most - step // 4, needed)
        elif slots < needed or min(wanted, most) - slots > step // 4:
            slots = min(wanted + step, most)
        self.first_slot = self.arena.slots + 1 - slots
        return True
