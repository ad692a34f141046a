"""Fills pages by copies, folds and arrivals of requests.

Records are filled immediately, the BF16 copies of copies and folds once the pinned slots are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_kvq.cache.pending import ArrivedRequest, CopiedPages, FoldedPages
from sglang_kvq.cache.pool import PACKED_TAIL
from sglang_kvq.cache.sink_token_cache import SinkTokenCache
from sglang_kvq.cache.tiers.state import SINK_BONUS, TierState
from sglang_kvq.constants import PAGE_SIZE as P


@dataclass
class _CopiedBF16Pages:
    """BF16 content for the copied pages ``pages`` int64 ``[n]``.

    wanted: bool ``[n]``; False if the source had no BF16 copy, or if the page has been filled again since.
    bf16_pages: ``[layers, n, 2, kv_heads, PAGE_SIZE, D]``. bonus: int64 ``[n]``, added to the stamps of the BF16
    copies.
    """

    pages: torch.Tensor
    wanted: torch.Tensor
    bf16_pages: torch.Tensor
    bonus: torch.Tensor


@dataclass
class _CopiedSinkToken:
    """A first token ``[layers, 1, 2, kv_heads, D]`` for the page ``pages`` int64 ``[1]``, in case it gets no BF16 copy.

    wanted: bool ``[1]``; False if the source's first token is unknown, or if the page has been filled again since.
    """

    pages: torch.Tensor
    wanted: torch.Tensor
    token: torch.Tensor


class Fills:
    """Fills pages of one pool, and keeps the BF16 content of copies until all pending events have been applied.

    Args:
        tiers: the tables of the pool.
        move_tokens: ``cache.fold.fold_pages``, without its first argument.
    """

    def __init__(
        self, tiers: TierState, move_tokens: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    ) -> None:
        self.tiers, self._move_tokens = tiers, move_tokens
        self._copies: list[_CopiedBF16Pages] = []
        self._sink_tokens: list[_CopiedSinkToken] = []

    def copy(self, event: CopiedPages) -> None:
        """Copies records immediately, so that the source may be freed; keeps BF16 content for ``place``."""
        tiers = self.tiers
        source, target = tiers.pages_of(event.source), tiers.pages_of(event.target)
        windows = event.windows
        slots = tiers.ensure_records(source)
        for records in tiers.pool.records:
            records[target] = records[source]
        self._filled(source, target, windows, slots, torch.ones_like(source[:1], dtype=torch.bool))

    def fold(self, event: FoldedPages) -> None:
        """Moves the chosen tokens of records; keeps the BF16 content of pages that are copied whole for ``place``."""
        tiers = self.tiers
        source, target = tiers.pages_of(event.source), tiers.pages_of(event.target)
        tokens, sinks = event.tokens, event.sinks
        slots = tiers.ensure_records(source)
        inside = (tokens >= 0) & (tokens < len(source) * P)
        whole = torch.arange(P, device=tokens.device) + sinks[:, None] * P
        tiers.errors += (~inside).sum() + (tokens.unflatten(-1, (-1, P))[:, :, sinks] != whole).sum()
        self._move_tokens(source, target, torch.where(inside, tokens, 0))
        self._filled(source, target, sinks, slots, (sinks == 0).any().view(1))  # the first page, if copied whole

    def arrive(self, event: ArrivedRequest) -> None:
        """Registers an arrived request and gives its window BF16 pages immediately.

        The page that is still being filled exists only in BF16. There is room, because the row is in use from here on,
        and admission counts the windows of rows in use.
        """
        tiers = self.tiers
        tiers.row_len[event.rows] = event.lens
        tiers.page_valid.index_fill_(0, event.pages, True)
        if tiers.sink_cache is not None:
            tiers.page_first.index_fill_(0, torch.where(event.places == 0, event.window, 0), True)
        packed = event.source[:, event.at]
        filling = (event.places + 1) * P > event.lens
        need = ((packed[0, :, -PACKED_TAIL] > 0) | filling) & (tiers.pool.page_slot[event.window] < 0)
        need &= ~tiers.gives_way(event.window)  # the row's window is that of the tree's pages, which are held below
        unmet = tiers.assign(event.window, need, tiers.held()[0])
        tiers.errors += unmet.sum()
        slots = torch.where(need & ~unmet, tiers.pool.page_slot[event.window].clamp(min=0).long(), 0)
        tiers.pool.write_bf16(slots, packed)
        tiers.slot_stamp[slots] = tiers.steps + torch.where(event.places < tiers.sink_pages, SINK_BONUS, 0)
        event.done()

    def place(self) -> None:
        """Gives BF16 pages to copies, without pinning them; runs after all events, when the pinned slots are known."""
        tiers = self.tiers
        copies, self._copies = self._copies, []
        for copy in copies:
            tiers.assign(copy.pages, copy.wanted & tiers.page_valid[copy.pages], tiers.held()[0])
            slots = torch.where(copy.wanted, tiers.pool.page_slot[copy.pages].clamp(min=0).long(), 0)
            tiers.pool.bf16_pages[:, slots] = copy.bf16_pages
            tiers.slot_stamp[slots] = tiers.steps + copy.bonus
        if tiers.sink_cache is not None:
            self._keep_copied(tiers.sink_cache)

    def _filled(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        windows: torch.Tensor,
        slots: torch.Tensor,
        first: torch.Tensor,
    ) -> None:
        """Keeps the BF16 content that pages ``target``, which now have records, may receive.

        slots: BF16 slots of the pages ``source``, -1 for none. windows: indices of targets that are whole copies of
        their sources. first: bool ``[1]``, True if the first target is a whole copy too.
        """
        tiers = self.tiers
        tiers.page_valid.index_fill_(0, target, True)
        copies: list[_CopiedBF16Pages | _CopiedSinkToken] = [*self._copies, *self._sink_tokens]
        for copy in copies:  # a page may have been freed since, and be filled again now
            copy.wanted &= ~torch.isin(copy.pages, target)
        if tiers.sink_cache is not None:
            self._copy_first(tiers.sink_cache, source[:1], target[:1], slots[:1], first)
        slots = slots[windows].clamp(min=0)
        bonus = torch.where(windows < tiers.sink_pages, SINK_BONUS, 0)
        self._copies.append(_CopiedBF16Pages(target[windows], slots > 0, tiers.pool.bf16_pages[:, slots], bonus))

    def _copy_first(
        self,
        sink_cache: SinkTokenCache,
        source: torch.Tensor,
        target: torch.Tensor,
        slot: torch.Tensor,
        wanted: torch.Tensor,
    ) -> None:
        """Keeps the first token of page ``source`` for page ``target``.

        The token comes from the source's BF16 copy in ``slot``, from its entry, or from a first token that is itself
        still waiting for ``place``. source, target, slot: int64 ``[1]``; wanted: bool ``[1]``.
        """
        tiers = self.tiers
        there = slot > 0
        bf16_page = tiers.pool.bf16_pages[:, slot.clamp(min=0), :, :, 0]
        token = torch.where(there, bf16_page, sink_cache.tokens[:, sink_cache.entries(source)])
        known = there | sink_cache.kept(source)
        for copy in self._sink_tokens:
            mine = copy.wanted & (copy.pages == source)
            token, known = torch.where(mine, copy.token, token), known | mine
        self._sink_tokens.append(_CopiedSinkToken(target, wanted & known, token))
        tiers.page_first.index_fill_(0, torch.where(wanted, target, 0), True)

    def _keep_copied(self, sink_cache: SinkTokenCache) -> None:
        """Gives entries to the first tokens of copied pages that got no BF16 page.

        A page with a BF16 copy does not need one, so it takes no entry from another page.
        """
        tiers = self.tiers
        copies, self._sink_tokens = self._sink_tokens, []
        for copy in copies:
            needed = copy.wanted & tiers.page_valid[copy.pages] & (tiers.pool.page_slot[copy.pages] < 0)
            sink_cache.keep(copy.pages, needed, copy.token, tiers.pool.page_slot, tiers.steps)
