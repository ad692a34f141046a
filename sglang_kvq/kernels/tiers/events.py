"""Applies the scheduler's events on pages and rows since the last plan, in order, by one program."""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_kvq.constants import EVENT_ALLOCATE, EVENT_FREE, EVENT_MOVE
from sglang_kvq.kernels.device.arguments import field_count, load_fields
from sglang_kvq.kernels.device.launch import Constants, start_kernel
from sglang_kvq.kernels.tiers.sink_entries import entry_of
from sglang_kvq.kernels.tiers.tables import TierTables

#: Pages or rows processed at a time.
_BLOCK = 1024


class Span(NamedTuple):
    """An event's int64 fields, in the order of ``PendingOps.pack``: its kind, and the range of its ids or rows."""

    kind: int
    first: int
    count: int


FIELDS = field_count(Span)


def apply_events(tables: TierTables, spans: torch.Tensor, ids: torch.Tensor, events: int) -> None:
    """Applies events like ``TierManager``'s ``_apply_free`` and ``_apply_move``, and like ``Places``.

    spans, ids: from ``PendingOps.pack``; events: number of spans.
    """
    constants = _constants(tables.keeps_sink_tokens, tables.shares_memory, _BLOCK)
    start_kernel(_apply, (1,), spans, ids, events, tables.fixed, constants=constants)


@cache
def _constants(sink_cache: bool, shared: bool, block: int) -> Constants:
    return Constants(
        FREE=EVENT_FREE,
        MOVE=EVENT_MOVE,
        ALLOCATE=EVENT_ALLOCATE,
        SINK_CACHE=sink_cache,
        SHARED=shared,
        BLOCK=block,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["spans", "ids", "events"], do_not_specialize_on_alignment=["spans", "ids"])
def _apply(
    spans, ids, events, t, FREE: tl.constexpr, MOVE: tl.constexpr, ALLOCATE: tl.constexpr, SINK_CACHE: tl.constexpr,
    SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Applies all events, in one program; t: ``Tables``.

    A page may occur twice in an event: some lanes then repeat finished work. With SHARED no id occurs twice.
    """
    free_count = tl.zeros([], tl.int64)
    missing = tl.zeros([], tl.int64)
    if SHARED:
        free_count = tl.load(t.free_count)
    for event in range(events):
        span = Span(*load_fields(spans + event * FIELDS, FIELDS))
        count = span.count.to(tl.int32)
        for first in range(0, count, BLOCK):
            i = first + tl.arange(0, BLOCK)
            inside = i < count
            if span.kind == FREE:
                id = tl.load(ids + span.first + i, mask=inside, other=0)
                page = tl.load(t.places + id, mask=id > 0, other=0)
                _free(t, page, SINK_CACHE, BLOCK)
                if SHARED:
                    free_count += _give_back(t, id, page, free_count, BLOCK)
            elif span.kind == MOVE:
                page = tl.load(ids + span.first + i, mask=inside, other=0)
                kept = tl.load(ids + span.first + count + i, mask=inside, other=0)
                page = tl.load(t.places + page, mask=page > 0, other=0)
                kept = tl.load(t.places + kept, mask=kept > 0, other=0)
                _move(t, page, kept, BLOCK)
            elif span.kind == ALLOCATE:
                if SHARED:
                    id = tl.load(ids + span.first + i, mask=inside, other=0)
                    given = _give_page(t, id, inside, free_count, BLOCK)
                    missing += tl.sum(inside.to(tl.int64), 0) - given
                    free_count -= given
                    tl.debug_barrier()
            else:
                row = tl.load(spans + span.first + i, mask=inside, other=0)
                tl.store(t.row_len + row, tl.full([BLOCK], 0, tl.int64), mask=inside)
        tl.debug_barrier()
    if SHARED:
        tl.store(t.free_count, free_count)
        tl.store(t.errors, tl.load(t.errors) + missing)


@triton.jit
def _give_page(t, id, inside, free_count, BLOCK: tl.constexpr):
    """Gives ids the pages on top of the stack of free pages; returns how many ids got one."""
    at = free_count - 1 - tl.arange(0, BLOCK)
    page = tl.load(t.free_pages + at, mask=inside & (at >= 0), other=0)
    tl.store(t.places + id, page, mask=inside)
    tl.store(t.page_id + page, id.to(tl.int32), mask=page > 0)
    return tl.sum((page > 0).to(tl.int64), 0)


@triton.jit
def _give_back(t, id, page, free_count, BLOCK: tl.constexpr):
    """Puts the pages of ids, 0 for none, back on the stack of free pages; returns how many."""
    had = (page > 0).to(tl.int64)
    tl.store(t.free_pages + free_count + tl.cumsum(had, 0) - 1, page, mask=page > 0)
    tl.store(t.page_id + page, tl.full([BLOCK], 0, tl.int32), mask=page > 0)
    tl.store(t.places + id, tl.full([BLOCK], 0, tl.int32), mask=page > 0)
    return tl.sum(had, 0)


@triton.jit
def _free(t, page, SINK_CACHE: tl.constexpr, BLOCK: tl.constexpr):
    """Frees the BF16 pages, records and first-token entries of pages, 0 for none."""
    slot = tl.load(t.page_slot + page, mask=page > 0, other=0)
    tl.store(t.slot_page + slot, tl.full([BLOCK], 0, tl.int64), mask=slot > 0)
    tl.store(t.page_slot + page, tl.full([BLOCK], -1, tl.int32), mask=page > 0)
    tl.store(t.page_valid + page, tl.full([BLOCK], 0, tl.uint8), mask=page > 0)
    if SINK_CACHE:
        entry = entry_of(t, page, page > 0)
        tl.store(t.first_page + entry, tl.full([BLOCK], 0, tl.int32), mask=entry > 0)
        tl.store(t.sink_entry + page, tl.full([BLOCK], 0, tl.int32), mask=page > 0)
        tl.store(t.page_first + page, tl.full([BLOCK], 0, tl.uint8), mask=page > 0)


@triton.jit
def _move(t, page, kept, BLOCK: tl.constexpr):
    """Moves pages' BF16 copies to the pages that are kept instead, if those have none."""
    slot = tl.load(t.page_slot + page, mask=(page != kept) & (kept > 0), other=0)
    moves = slot > 0
    moves &= tl.load(t.page_slot + kept, mask=moves, other=0) < 0
    tl.store(t.slot_page + slot, kept, mask=moves)
    tl.store(t.page_slot + page, tl.full([BLOCK], -1, tl.int32), mask=moves)
    tl.store(t.page_slot + kept, slot, mask=moves)
