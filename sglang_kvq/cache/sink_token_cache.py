"""First tokens of sequences, kept in BF16 after their page lost its BF16 copy: small tables in torch.

The first token is an attention sink: its key and value are outliers. Formats calibrated for the other tokens quantize
it badly (``RecordFormat.keeps_first``), and every later token reads it. So the cache keeps the first token of each
first page until the page is freed, for all layers and KV heads. This takes 1/64 of a BF16 page.

Any page may have any entry. A page that needs an entry gets a free one. If none is free, it gets the entry of a page
with a BF16 copy, because that page needs an entry only after losing the copy. Otherwise it gets the oldest entry. So no
first token is lost until there are more idle conversations than entries. Then the conversation that has been idle
longest loses its first token, and requests read that token from its record.

This is the reference implementation. In ``kernels``, ``tiers.sink_entries`` and ``quantize.keep_sink_tokens`` do the
same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvq.cache.select_smallest import hand_out
from sglang_kvq.constants import ENTRY_FREE, ENTRY_UNUSED, NEVER

#: Pages per entry. One entry per conversation is enough, and conversations have many pages.
PAGES_PER_ENTRY = 8
#: Minimum number of entries. In a small pool these are more than one for each ``PAGES_PER_ENTRY`` pages; the memory of
#: the excess, at most one BF16 page, is not counted.
LEAST_ENTRIES = 64


def entry_count(pages: int) -> int:
    """Returns the number of entries, the reserved one included, for a pool of ``pages`` pages."""
    return max(2, min(pages, LEAST_ENTRIES), pages // PAGES_PER_ENTRY)


@dataclass
class SinkTokenCache:
    """Tables of kept first tokens. Entry 0 is reserved, like page 0, and receives values that are not wanted.

    Attributes:
        tokens: BF16 ``[layers, n + 1, 2, kv_heads, head_dim]``; axis 2 is K, V.
        pages: int32 ``[n + 1]``, the page whose first token an entry holds, or 0 if the entry is free.
        entry: int32 ``[pages + 1]``, the entry of a page, or 0 if it has none.
        stamp: int64 ``[n + 1]``, the plan step in which an entry's page last lost its BF16 copy.
    """

    tokens: torch.Tensor
    pages: torch.Tensor
    entry: torch.Tensor
    stamp: torch.Tensor

    @classmethod
    def allocate(cls, layers: int, pages: int, kv_heads: int, head_dim: int, device: torch.device) -> SinkTokenCache:
        """Allocates free entries for a pool of ``pages`` pages."""
        n = entry_count(pages)
        return cls(
            tokens=torch.zeros(layers, n, 2, kv_heads, head_dim, dtype=torch.bfloat16, device=device),
            pages=torch.zeros(n, dtype=torch.int32, device=device),
            entry=torch.zeros(pages + 1, dtype=torch.int32, device=device),
            stamp=torch.zeros(n, dtype=torch.int64, device=device),
        )

    @property
    def count(self) -> int:
        """Number n of usable entries."""
        return len(self.pages) - 1

    def entries(self, pages: torch.Tensor) -> torch.Tensor:
        """Returns the entries int64 ``[m]`` of pages int64 ``[m]``, 0 for none."""
        return self.entry[pages].long()

    def kept(self, pages: torch.Tensor) -> torch.Tensor:
        """Returns bool ``[m]``: True where the page's first token is kept here."""
        return self.entry[pages] > 0

    def first_of_each(self, pages: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Returns bool ``[m]``: True at the first occurrence of each page that is ``wanted`` and has an entry.

        pages: int64 ``[m]``, may repeat pages; wanted: bool ``[m]``.
        """
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
        """Keeps the first tokens of those ``pages`` that are ``wanted``; of the earlier ones if not all fit.

        Args:
            pages: int64 ``[m]``, all different where wanted; wanted: bool ``[m]``.
            tokens: BF16 ``[layers, m, 2, kv_heads, head_dim]``.
            page_slot: int ``[pages + 1]``, above 0 for pages that have a BF16 copy now.
            step: the plan's step; entries stamped in this step are not taken from their pages.
            spared: bool ``[n + 1]``, other entries that are not taken from their pages.
        """
        entries = torch.where(wanted, self.entries(pages), 0)
        # index_fill_: assigning a Python number by index waits for the device.
        self.stamp.index_fill_(0, entries, step)
        key = torch.where(page_slot[self.pages.long()] > 0, ENTRY_UNUSED, ENTRY_UNUSED + 1 + self.stamp)
        key = torch.where(self.pages == 0, ENTRY_FREE, key)
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
        """Frees the entries of pages int64 ``[m]``."""
        self.pages.index_fill_(0, self.entries(pages), 0)
        self.entry.index_fill_(0, pages, 0)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Gives the entries of pages ``source`` int64 ``[m]`` to pages ``target``, which have none; 0 is skipped."""
        entries = self.entries(source)
        self.entry[target] = entries.int()
        self.pages[entries] = target.int()
        self.entry.index_fill_(0, source, 0)
        self.pages[0].fill_(0)

    def clear(self) -> None:
        for table in (self.pages, self.entry, self.stamp):
            table.zero_()
