"""Items that grow at their end, in blocks that never change: copies share them, so a branch costs what is new in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

#: Items of a block; all blocks but the last are full.
SIZE = 64


class Block(Protocol):
    """Consecutive items in arrays."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Sliceable(Block, Protocol):
    """A block that makes others: a copy of items ``first`` to ``last``, and itself followed by ``other``."""

    def part(self: T, first: int, last: int) -> T: ...

    def joined(self: T, other: T) -> T: ...


T = TypeVar("T", bound=Sliceable)


class Blocks(Generic[T]):
    """Appending copies one block at most, so that growth takes linear time; a copy takes no item's memory."""

    def __init__(self, blocks: Iterable[T] = ()) -> None:
        self.blocks = list(blocks)

    def __len__(self) -> int:
        return (len(self.blocks) - 1) * SIZE + len(self.blocks[-1]) if self.blocks else 0

    def add(self, items: T) -> None:
        """Append items."""
        if not len(items):
            return
        if len(self) % SIZE:
            items = self.blocks.pop().joined(items)
        self.blocks += [items.part(at, min(at + SIZE, len(items))) for at in range(0, len(items), SIZE)]

    def first(self, count: int) -> Blocks[T]:
        """The first ``count`` items, which share all blocks but one that is cut."""
        if count >= len(self):
            return Blocks(self.blocks)
        whole, rest = divmod(count, SIZE)
        return Blocks(self.blocks[:whole] + ([self.blocks[whole].part(0, rest)] if rest else []))
