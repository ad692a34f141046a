"""Division of one memory between records and BF16 pages, decided on the host from the scheduler's counts.

The scheduler knows how many pages are in use and how many requests run. So the host can always compute how many BF16
pages the windows of these requests want and need, and how many fit beside the pages. Later, the ``TierManager`` moves
the pages in the way of the boundary, on the device. The host does not wait for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kvq.cache.shared.arena import Arena

#: Share of the memory that is for BF16 pages even if cached prefixes could use it. It holds windows of requests that
#: have ended, because their conversations may continue.
FLOOR = 0.1
#: The boundary moves further than necessary, by 1 / ``_STEP`` of the memory, so that it need not move again soon. If
#: windows shrink, it moves further by only a quarter of that.
_STEP = 64


@dataclass(frozen=True)
class WindowSlots:
    """BF16 pages that running requests want and need.

    Attributes:
        whole: BF16 pages of one request's whole window.
        least: BF16 pages that one request never loses.
        spare: BF16 pages for the other pages that a prefill batch writes, and for a page that it resumes.
    """

    whole: int
    least: int
    spare: int

    def wanted(self, rows: int) -> int:
        """Returns how many BF16 pages the whole windows of ``rows`` requests take."""
        return self.whole * rows + self.spare

    def needed(self, rows: int) -> int:
        """Returns how many BF16 pages ``rows`` requests need to run."""
        return self.least * rows + self.spare


class Split:
    """The boundary in one arena.

    Attributes:
        first_slot: the first slot after the boundary.
    """

    def __init__(self, arena: Arena, windows: WindowSlots) -> None:
        self.arena, self.windows = arena, windows
        self.first_slot = arena.first_slot(arena.pages)
        self._floor, self._step = int(FLOOR * arena.slots), arena.slots // _STEP

    @property
    def slots(self) -> int:
        """Current number of BF16 pages."""
        return self.arena.slots + 1 - self.first_slot

    @property
    def pages(self) -> int:
        """Current number of pages, used or not."""
        return self.arena.last_page(self.first_slot)

    def room(self, rows: int) -> int:
        """Returns how many pages fit beside ``rows`` running requests if their windows shrink."""
        return self.arena.pages_beside(self.windows.needed(rows))

    def excess(self, pages: int, rows: int) -> int:
        """Returns how many of ``pages`` pages should be evicted, if only cached, so that windows stay whole.

        If some must go, a step's worth more goes with them. Otherwise the boundary of a full memory would move a little
        with almost every request.
        """
        wanted = self._wanted(rows)
        if pages <= self.arena.pages_beside(wanted):
            return 0
        return pages - max(self.arena.pages_beside(wanted + self._step), 0)

    def _wanted(self, rows: int) -> int:
        """Returns how many BF16 pages ``rows`` requests and those that have ended should have."""
        return max(self.windows.wanted(rows), self._floor)

    def fit(self, pages: int, rows: int) -> bool:
        """Moves the boundary so that ``pages`` pages and ``rows`` requests fit; returns False if they cannot both fit.

        Pages take precedence. Windows get the memory that is left, and shrink to their needs.
        """
        most = self.arena.slots_beside(pages)
        needed = self.windows.needed(rows)
        if most < needed:
            return False
        wanted, step, slots = self._wanted(rows), self._step, self.slots
        if slots > most:
            slots = max(most - step, wanted) if most > wanted else max(most - step // 4, needed)
        elif slots < needed or min(wanted, most) - slots > step // 4:
            slots = min(wanted + step, most)
        self.first_slot = self.arena.slots + 1 - slots
        return True
