"""Shared parts of the kernels that plan tiers: the tables that they keep, and the window of a request.

The kernels follow the rules of ``cache.tiers.TierManager``, with which tests compare them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.common import PAGE
from sglang_kvq.kernels.device.launch import Fixed


class Tables(NamedTuple):
    """State of the tiers, and scratch memory of the plans, as one argument of the kernels.

    R rows, S BF16 slots with slot 0, N pages with page 0.

    Attributes:
        req_to_token: int32 ``[R, context]``; row_pages: int32 ``[R, pages]``; their last axes contiguous.
        places: int32 ``[N]``, pages of SGLang's ids; page_id: int32 ``[N]``, free_pages: int32 ``[N]`` and free_count:
            int64 ``[1]``, see ``cache.shared.places``, if records and BF16 pages share a memory.
        page_slot: int32 ``[N]``; page_valid: uint8 ``[N]``.
        slot_page, slot_stamp: int64 ``[S]``; row_len: int64 ``[R]``; see ``TierManager``.
        row_sink_end, row_history_end: int32 ``[R]``.
        errors, written: int64, counts of errors and of quantized pages; prefix_read: int64 ``[2]``, tokens that
            prefills read in BF16 and from records.
        held: int64 ``[S]``, the last step that found a slot in a window, combined with how hard it is to take.
        marked: int64 ``[S]``, the last step that found the record of a slot's page missing.
        keys: int64 ``[S]``, keys by which slots are chosen.
        wanted: int64 ``[R * window]``, pages that need a BF16 copy.
        page_first: uint8 ``[N]``, if first tokens are kept: pages that begin a sequence.
        first_page: int32 ``[n + 1]``, sink_entry: int32 ``[N]``, first_stamp: int64 ``[n + 1]``: ``SinkTokenCache``, if
            they are kept.
        first_keys: int64 ``[n + 1]``, keys by which entries are chosen.
        claims: int64 ``[n + 1]``, step and row of the last batch that restored an entry's page.
        lost_slots, lost_pages: int64 ``[S]`` with lost_count int64 ``[1]``: pages that begin a sequence and have just
            lost their BF16 copy, whose values are still there.
        lost_entries: int32 ``[S]``, destinations of their first tokens.
        entryless: int32 ``[S]``, indices of those ``lost_pages`` that had no entry.
        slots, pages: int64 ``[2 S]`` with count int64 ``[1]``: pages to be quantized, and their slots.
        context, pages_row: elements of a row of ``req_to_token``, of ``row_pages``.
        slot_count: S; row_count: R; first_count: n + 1.
    """

    req_to_token: torch.Tensor
    context: int
    row_pages: torch.Tensor
    pages_row: int
    places: torch.Tensor
    page_id: torch.Tensor
    free_pages: torch.Tensor
    free_count: torch.Tensor
    page_slot: torch.Tensor
    page_valid: torch.Tensor
    slot_page: torch.Tensor
    slot_stamp: torch.Tensor
    slot_count: int
    row_len: torch.Tensor
    row_count: int
    row_sink_end: torch.Tensor
    row_history_end: torch.Tensor
    errors: torch.Tensor
    written: torch.Tensor
    prefix_read: torch.Tensor
    held: torch.Tensor
    marked: torch.Tensor
    keys: torch.Tensor
    wanted: torch.Tensor
    page_first: torch.Tensor
    first_page: torch.Tensor
    first_count: int
    sink_entry: torch.Tensor
    first_stamp: torch.Tensor
    first_keys: torch.Tensor
    claims: torch.Tensor
    lost_slots: torch.Tensor
    lost_pages: torch.Tensor
    lost_entries: torch.Tensor
    lost_count: torch.Tensor
    entryless: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True)
class TierTables:
    """The tables, and the window in pages.

    Attributes:
        arguments: argument of the kernels; ``fixed`` for launches.
        sink_pages, recent_pages: the window; prefill_pages: pages before it; soft_pages: recent pages that others may
            take; written_tokens: tokens that a step writes; see ``TierManager``.
        sink_bonus: added to the stamp of a sink's BF16 copy.
        keeps_sink_tokens: True if first tokens are kept.
        shares_memory: True if records and BF16 pages share a memory, so that SGLang's ids are given pages.
    """

    arguments: Tables
    sink_pages: int
    recent_pages: int
    prefill_pages: int
    soft_pages: int
    written_tokens: int
    sink_bonus: int
    keeps_sink_tokens: bool
    shares_memory: bool = False

    @cached_property
    def fixed(self) -> Fixed:
        """``arguments``, whose tensors and numbers are the same in every launch."""
        return Fixed(self.arguments)

    @cached_property
    def window(self) -> "Window":
        """The compile-time window of the kernels."""
        return self._window(0)

    @cached_property
    def prefill_window(self) -> "Window":
        """The window with the pages before it that a prefill reads in BF16."""
        return self._window(self.prefill_pages)

    def _window(self, more: int) -> "Window":
        width = triton.next_power_of_2(self.sink_pages + self.recent_pages + more + 1)
        return Window(
            SINK=self.sink_pages,
            RECENT=self.recent_pages,
            MORE=more,
            WIDTH=width,
            SOFT=self.soft_pages,
            WRITTEN=self.written_tokens,
            BONUS=self.sink_bonus,
            SINK_CACHE=self.keeps_sink_tokens,
        )


@dataclass(frozen=True)
class Window:
    """The window of a request; names in capitals, like constants in kernels.

    Attributes:
        SINK, RECENT: sink and recent pages; MORE: maximum number of further recent pages; WIDTH: the sum of these and
            the page being filled, padded.
        SOFT: recent pages that others may take; WRITTEN: tokens that a step writes.
        BONUS: added to the stamp of a sink's BF16 copy.
        SINK_CACHE: True if first tokens are kept.
    """

    SINK: int
    RECENT: int
    MORE: int
    WIDTH: int
    SOFT: int
    WRITTEN: int
    BONUS: int
    SINK_CACHE: bool


@triton.jit
def history_pages(length, WINDOW: tl.constexpr, more=0):
    """Returns the end of the history in pages for ``length`` tokens, if every BF16 copy exists; more: recent pages."""
    return tl.maximum(length // PAGE - WINDOW.RECENT - more, WINDOW.SINK)


@triton.jit
def window(t, row, length, WINDOW: tl.constexpr, more=0):
    """Returns page indices, whether these exist, and page ids of rows' windows, [n, WIDTH]; row 0 has no pages.

    t: ``Tables``; row, length, more: int32 [n, 1], or scalars for n = 1; more is at most MORE.
    """
    i = tl.arange(0, WINDOW.WIDTH)[None, :]
    index = tl.where(i < WINDOW.SINK, i, history_pages(length, WINDOW, more) + i - WINDOW.SINK)
    exists = (i <= WINDOW.SINK + WINDOW.RECENT + WINDOW.MORE) & (index * PAGE < tl.where(row > 0, length, 0))
    return index, exists, page_at(t, row, index, exists)


@triton.jit
def page_at(t, row, index, exists):
    """Returns the pages at the rows' page indices, 0 where they do not exist."""
    token = tl.load(t.req_to_token + row.to(tl.int64) * t.context + index * PAGE, mask=exists, other=0)
    return tl.load(t.places + token // PAGE, mask=exists, other=0)
