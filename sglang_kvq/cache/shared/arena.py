"""Sizes of one memory that records and BF16 pages share, with a boundary that moves as they need it.

Pages fill the memory from the front and BF16 pages from the back::

    slot 0 | page 0, page 1, ... last page | (less than one BF16 page) | first slot, ... last slot

A page's records of all layers are contiguous, and so is a BF16 page of all layers. One boundary between pages and slots
is therefore enough, even if layers have different widths. Slot s always begins at ``s * slot_bytes``, even while pages
use these bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The page stride is an odd multiple of this. With multiples of larger powers of two, equal parts of consecutive pages
#: would be in few of a GPU's memory channels.
_STEP = 256


def padded(page_bytes: int) -> int:
    """Returns the page stride in bytes for pages whose records have ``page_bytes`` bytes in all layers."""
    steps = -(-page_bytes // _STEP)
    return (steps + 1 - steps % 2) * _STEP


@dataclass(frozen=True)
class Arena:
    """Sizes of the shared memory.

    Attributes:
        page_bytes: page stride in bytes (``padded``).
        slot_bytes: bytes of a BF16 page, all layers.
        slots: number of the last slot, which is also the number of BF16 pages if there are no pages.
        pages: the most pages at a time.
    """

    page_bytes: int
    slot_bytes: int
    slots: int
    pages: int

    @classmethod
    def smallest(cls, page_bytes: int, slot_bytes: int, slots: int, pages: int) -> Arena:
        """Returns the smallest memory that holds ``pages`` pages and, after them, ``slots`` BF16 pages."""
        first_slot = cls(page_bytes, slot_bytes, 0, pages).first_slot(pages)
        return cls(page_bytes, slot_bytes, first_slot - 1 + slots, pages)

    @property
    def total_bytes(self) -> int:
        return (self.slots + 1) * self.slot_bytes

    def last_page(self, first_slot: int) -> int:
        """Returns the last page that fits before ``first_slot``, at most ``pages``; page 0 comes before page 1."""
        return min(self._before(first_slot), self.pages)

    def first_slot(self, pages: int) -> int:
        """Returns the first slot after ``pages`` pages."""
        return -(-(pages + 1) * self.page_bytes // self.slot_bytes) + 1

    def slots_beside(self, pages: int) -> int:
        """Returns how many BF16 pages fit beside ``pages`` pages; negative if the pages alone do not fit."""
        return self.slots + 1 - self.first_slot(pages)

    def pages_beside(self, slots: int) -> int:
        """Returns how many pages fit beside ``slots`` BF16 pages; negative if the BF16 pages alone do not fit.

        The result may exceed the attribute ``pages``.
        """
        return self._before(self.slots + 1 - slots)

    def _before(self, first_slot: int) -> int:
        return (first_slot - 1) * self.slot_bytes // self.page_bytes - 1
