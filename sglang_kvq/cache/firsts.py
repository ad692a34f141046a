"""First tokens of sequences, kept in BF16 after the overlay of their page was taken: two small tables in torch.

A sequence's first token gathers attention that belongs nowhere, and its key and value lie far from all others. What is
calibrated for these codes it badly (``RecordFormat.keeps_first``), and every later token reads it. So one token of a
first page is kept, all layers and KV heads, 1/64 of an overlay, until the page is freed.

Page p has one place only, entry 1 + p % n, so that nothing is searched and no table of pages is needed. It takes it
when its overlay is taken, from whichever page has it: one with an overlay does without and comes back when that is
taken, and of conversations that idle, those that ended last are the likeliest to go on. Without an entry the record
serves.

This is the plain statement; ``kernels.firsts`` does the same on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Pages that share an entry: conversations are many pages long, and few of those that idle collide.
PAGES_PER_ENTRY = 8
#: Of a small pool there are more, which take one overlay's memory that nobody counts.
LEAST_ENTRIES = 64


def entry_count(pages: int) -> int:
    """Entries for a pool of that many pages, the reserved one counted."""
    return max(2, min(pages, LEAST_ENTRIES), pages // PAGES_PER_ENTRY)


@dataclass
class FirstTokens:
    """The tables. Entry 0 is reserved, as page 0 is: what is not wanted is written there.

    Attributes:
        tokens: BF16 ``[layers, n + 1, 2, kv_heads, head_dim]``; axis 2 is K, V.
        pages: int32 ``[n + 1]``, the page whose first token an entry has; 0: free.
    """

    tokens: torch.Tensor
    pages: torch.Tensor

    @classmethod
    def allocate(cls, layers: int, pages: int, kv_heads: int, head_dim: int, device: torch.device) -> FirstTokens:
        """Free entries for a pool of so many pages."""
        n = entry_count(pages)
        return cls(
            tokens=torch.zeros(layers, n, 2, kv_heads, head_dim, dtype=torch.bfloat16, device=device),
            pages=torch.zeros(n, dtype=torch.int32, device=device),
        )

    @property
    def count(self) -> int:
        """n: how many entries can be taken."""
        return len(self.pages) - 1

    def entries(self, pages: torch.Tensor) -> torch.Tensor:
        """Entries int64 ``[m]`` of pages int64 ``[m]``; that of page 0 is 0."""
        return torch.where(pages > 0, 1 + pages % self.count, 0)

    def kept(self, pages: torch.Tensor) -> torch.Tensor:
        """bool ``[m]``: whose first token is here."""
        return (pages > 0) & (self.pages[self.entries(pages)] == pages)

    def first_of_each(self, pages: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Of the pages int64 ``[m]`` that are ``wanted``, bool ``[m]``, the first that has each entry."""
        order = torch.arange(len(pages), device=pages.device)
        found = torch.full_like(self.pages, len(pages), dtype=torch.int64)
        entries = torch.where(wanted, self.entries(pages), 0)
        found.scatter_reduce_(0, entries, torch.where(wanted, order, len(pages)), "amin")
        return wanted & (found[entries] == order)

    def keep(
        self, pages: torch.Tensor, wanted: torch.Tensor, tokens: torch.Tensor, spared: torch.Tensor | None = None
    ) -> None:
        """Keep first tokens of the pages int64 ``[m]`` that are ``wanted``; of those with one entry, the first's.

        tokens: BF16 ``[layers, m, 2, kv_heads, head_dim]``; spared: bool ``[n + 1]``, entries that stay as they are.
        """
        entries = self.entries(pages)
        claims = self.first_of_each(pages, wanted)
        if spared is not None:
            claims &= ~spared[entries]
        entries = torch.where(claims, entries, 0)
        self.tokens[:, entries] = tokens
        self.pages[entries] = torch.where(claims, pages, 0).int()

    def free(self, pages: torch.Tensor) -> None:
        """The entries of these pages int64 ``[m]`` become free; another page's stays."""
        # Two pages may have the same entry: what does not match is written to entry 0, which is free already.
        self.pages.index_fill_(0, torch.where(self.kept(pages), self.entries(pages), 0), 0)

    def pass_on(
        self, source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor, slots: torch.Tensor, first: torch.Tensor
    ) -> None:
        """Pages ``target`` int64 ``[m]`` that begin with the same token as ``source`` get it, where it is known.

        slots: int64 ``[m]``, ``source``'s overlays, 0 or less for none; first: BF16 ``[layers, m, 2, kv_heads,
        head_dim]``, the first tokens in these.
        """
        there = slots > 0
        tokens = torch.where(there[:, None, None, None], first, self.tokens[:, self.entries(source)])
        self.keep(target, wanted & (there | self.kept(source)), tokens)

    def clear(self) -> None:
        self.pages.zero_()
