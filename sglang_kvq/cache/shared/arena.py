"""One memory that records and BF16 pages share as they are needed.

Pages fill it from the front and BF16 pages from the back::

    slot 0 | page 0, page 1, ... last page | (less than one BF16 page) | first slot, ... last slot

A page's records of all layers lie together, and so does a BF16 page of all layers. Then one boundary between pages and
slots serves layers of different widths. Slot s begins at ``s * slot_bytes``, whoever owns these bytes now.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A page's bytes are an odd multiple of this. With multiples of larger powers of two, equal parts of consecutive pages
#: lie in few of a GPU's memory channels.
_STEP = 256


def padded(page_bytes: int) -> int:
    """Returns the bytes from page to page for a page whose records have ``page_bytes`` bytes in all layers."""
    steps = -(-page_bytes // _STEP)
    return (steps + 1 - steps % 2) * _STEP


@dataclass(frozen=True)
class Arena:
    """Sizes of the shared memory.

    Attributes:
        page_bytes: bytes from page to page (``padded``).
        slot_bytes: bytes of a BF16 page, all layers.
        slots: the last slot, and so the number of BF16 pages in a memory without pages.
        pages: the most pages at a time.
    """

    page_bytes: int
    slot_bytes: int
    slots: int
    pages: int

    @classmethod
    def smallest(cls, page_bytes: int, slot_bytes: int, slots: int, pages: int) -> Arena:
        """Returns the smallest memory for so many pages beside so many BF16 pages, which are its last slots."""
        first_slot = cls(page_bytes, slot_bytes, 0, pages).first_slot(pages)
        return cls(page_bytes, slot_bytes, first_slot - 1 + slots, pages)

    @property
    def total_bytes(self) -> int:
        return (self.slots + 1) * self.slot_bytes

    def last_page(self, first_slot: int) -> int:
        """Returns the last page that lies before a slot: as many fit, without page 0; at most ``pages``."""
        return min(self._before(first_slot), self.pages)

    def first_slot(self, pages: int) -> int:
        """Returns the first slot behind so many pages."""
        return -(-(pages + 1) * self.page_bytes // self.slot_bytes) + 1

    def slots_beside(self, pages: int) -> int:
        """Returns how many BF16 pages there may be beside so many pages; below 0 if these are too many."""
        return self.slots + 1 - self.first_slot(pages)

    def pages_beside(self, slots: int) -> int:
        """Returns how many pages fit beside so many BF16 pages, ``pages`` or more; below 0 if these are too many."""
        return self._before(self.slots + 1 - slots)

    def _before(self, first_slot: int) -> int:
        return (first_slot - 1) * self.slot_bytes // self.page_bytes - 1
