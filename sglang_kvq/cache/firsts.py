"""First tokens of sequences, kept in BF16 after the overlay of their page was taken: small tables in torch.

A sequence's first token gathers attention that belongs nowhere, and its key and value lie far from all others. What is
calibrated for these codes it badly (``RecordFormat.keeps_first``), and every later token reads it. So one token of a
first page is kept, all layers and KV heads, 1/64 of an overlay, until the page is freed.

Any page may have any entry. One that needs an entry gets a free one, or one whose page has an overlay and does without
until that is taken, or else the one that was kept longest ago. So nothing is lost before more conversations idle than
there are entries; then it is what idled longest, and its record serves.

This is the plain statement; ``kernels.first_entries`` and ``kernels.firsts`` do the same on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvq.cache.least import NEVER, hand_out

#: Pages that pay for an entry: conversations are many pages long.
PAGES_PER_ENTRY = 8
#: Of a small pool there are more, which take one overlay's memory that nobody counts.
LEAST_ENTRIES = 64
#: Keys of entries, in the order in which they are taken: free ones, those of pages with overlays, then by stamp.
FREE, UNUSED = 0, 1


def entry_count(pages: int) -> int:
    """Entries for a pool of that many pages, the reserved one counted."""
    return max(2, min(pages, LEAST_ENTRIES), pages // PAGES_PER_ENTRY)


@dataclass
class FirstTokens:
    """The tables. Entry 0 is reserved, as page 0 is: what is not wanted is written there.

    Attributes:
        tokens: BF16 ``[layers, n + 1, 2, kv_heads, head_dim]``; axis 2 is K, V.
        pages: int32 ``[n + 1]``, the page whose first token an entry has; 0: free.
        entry: int32 ``[pages + 1]``, the entry of a page; 0: none.
        stamp: int64 ``[n + 1]``, the step in which an entry's page last lost its overlay.
    """

    tokens: torch.Tensor
    pages: torch.Tensor
    entry: torch.Tensor
    stamp: torch.Tensor

    @classmethod
    def allocate(cls, layers: int, pages: int, kv_heads: int, head_dim: int, device: torch.device) -> FirstTokens:
        """Free entries for a pool of so many pages."""
        n = entry_count(pages)
        return cls(
            tokens=torch.zeros(layers, n, 2, kv_heads, head_dim, dtype=torch.bfloat16, device=device),
            pages=torch.zeros(n, dtype=torch.int32, device=device),
            entry=torch.zeros(pages + 1, dtype=torch.int32, device=device),
            stamp=torch.zeros(n, dtype=torch.int64, device=device),
        )

    @property
    def count(self) -> int:
        """n: how many entries can be taken."""
        return len(self.pages) - 1

    def entries(self, pages: torch.Tensor) -> torch.Tensor:
        """Entries int64 ``[m]`` of pages int64 ``[m]``, 0 for none."""
        return self.entry[pages].long()

    def kept(self, pages: torch.Tensor) -> torch.Tensor:
        """bool ``[m]``: whose first token is here."""
        return self.entry[pages] > 0

    def first_of_each(self, pages: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Of pages int64 ``[m]`` that are ``wanted``, bool ``[m]``, and have an entry, the first mention of each."""
        order = torch.arange(len(pages), device=pages.device)
        found = torch.full_like(self.stamp, len(pages))
        wanted = wanted & self.kept(pages)
        entries = torch.where(wanted, self.entries(pages), 0)
        found.scatter_reduce_(0, entries, torch.where(wanted, order, len(pages)), "amin")
        return wanted & (found[entries] == order)

    def keep(
        self,
        pages: torch.Tensor,
        wanted: torch.Tensor,
        tokens: torch.Tensor,
        page_slot: torch.Tensor,
        step: int,
        spared: torch.Tensor | None = None,
    ) -> None:
        """Keep first tokens of the pages int64 ``[m]`` that are ``wanted``, each once; the first if not all fit.

        Args:
            tokens: BF16 ``[layers, m, 2, kv_heads, head_dim]``.
            page_slot: int ``[pages + 1]``, above 0 for pages that have an overlay now.
            step: of the plan; entries that were stamped in it are not taken.
            spared: bool ``[n + 1]``, nor are these.
        """
        entries = torch.where(wanted, self.entries(pages), 0)
        # index_fill_: assigning a Python number by index waits for the device.
        self.stamp.index_fill_(0, entries, step)
        key = torch.where(page_slot[self.pages.long()] > 0, UNUSED, UNUSED + 1 + self.stamp)
        key = torch.where(self.pages == 0, FREE, key)
        never = (self.pages > 0) & (self.stamp == step)
        never[0].fill_(True)
        key = torch.where(never if spared is None else never | spared, NEVER, key)

        new, given = hand_out(key, wanted & (entries == 0))
        owners = torch.where(given, pages, 0)
        self.entry.index_fill_(0, self.pages[new].long(), 0)
        self.pages[new] = owners.int()
        self.entry[owners] = new.int()
        self.stamp.index_fill_(0, new, step)
        self.stamp[0].fill_(0)
        self.tokens[:, torch.where(given, new, entries)] = tokens

    def free(self, pages: torch.Tensor) -> None:
        """The entries of these pages int64 ``[m]`` become free."""
        self.pages.index_fill_(0, self.entries(pages), 0)
        self.entry.index_fill_(0, pages, 0)

    def clear(self) -> None:
        for table in (self.pages, self.entry, self.stamp):
            table.zero_()
