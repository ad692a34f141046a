"""Assigns first-token entries to pages, like ``cache.sink_token_cache.SinkTokenCache``, in the one program that gives
BF16 pages."""

import triton
import triton.language as tl

from sglang_kvq.constants import ENTRY_FREE, ENTRY_UNUSED
from sglang_kvq.kernels.tiers.select_smallest import NEVER, among_least, bisect, count_below

_FREE, _UNUSED = tl.constexpr(ENTRY_FREE), tl.constexpr(ENTRY_UNUSED)


@triton.jit
def claim_of(i, step):
    """Returns the int64 key by which row i claims an entry in a step: smaller for later steps and for earlier rows."""
    return i - (step.to(tl.int64) << 31)


@triton.jit
def entry_of(t, page, wanted):
    """Returns the entries of pages: 0 where a page has none or is not ``wanted``."""
    return tl.load(t.sink_entry + page, mask=wanted, other=0)


@triton.jit
def place_sink_tokens(t, count, step, BLOCK: tl.constexpr):
    """Writes the entries of the first ``count`` of ``lost_pages`` to ``lost_entries``; 0 where none could be taken.

    Pages that have an entry keep it, and no other page takes it in this step.
    """
    needs = tl.zeros([], tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        page = tl.load(t.lost_pages + i, mask=i < count, other=0)
        entry = entry_of(t, page, page > 0)
        tl.store(t.lost_entries + i, entry, mask=i < count)
        tl.store(t.first_stamp + entry, tl.full([BLOCK], 0, tl.int64) + step, mask=entry > 0)
        need = ((page > 0) & (entry == 0)).to(tl.int32)
        tl.store(t.entryless + needs + tl.cumsum(need, 0) - 1, i, mask=need > 0)
        needs += tl.sum(need, 0)
    if needs > 0:
        tl.debug_barrier()
        least, most, available = _key_entries(t, step, BLOCK)
        tl.debug_barrier()
        takes = tl.minimum(needs, available)
        if takes > 0:
            key = bisect(t.first_keys, t.first_count, takes, least, most, BLOCK)
            equals = takes - count_below(t.first_keys, t.first_count, key, BLOCK)
            _exchange(t, key, equals, step, BLOCK)


@triton.jit
def _key_entries(t, step, BLOCK: tl.constexpr):
    """Writes each entry's key; entries are reused in the order of keys.

    Returns:
        the least and the largest key of entries that may be taken; the number of these entries.
    """
    least, most = tl.full([BLOCK], NEVER, tl.int64), tl.full([BLOCK], 0, tl.int64)
    available = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, t.first_count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = (entry > 0) & (entry < t.first_count)
        page = tl.load(t.first_page + entry, mask=inside, other=0)
        stamp = tl.load(t.first_stamp + entry, mask=inside, other=0)
        has_bf16_page = tl.load(t.page_slot + page, mask=page > 0, other=0) > 0
        key = tl.where(page == 0, _FREE, tl.where(has_bf16_page, _UNUSED, _UNUSED + 1 + stamp))
        may = inside & ((page == 0) | (stamp != step))
        may &= tl.load(t.claims + entry, mask=inside, other=0) >= claim_of(1 << 31, step)  # not claimed in this step
        tl.store(t.first_keys + entry, tl.where(may, key, NEVER), mask=entry < t.first_count)
        least = tl.where(may, tl.minimum(least, key), least)
        most = tl.where(may, tl.maximum(most, key), most)
        available += may.to(tl.int32)
    return tl.min(least, 0), tl.max(most, 0), tl.sum(available, 0)


@triton.jit
def _exchange(t, bound, equals, step, BLOCK: tl.constexpr):
    """Gives the entries below the bound, and the first ``equals`` of those at it, to the pages without one."""
    given = tl.zeros([], tl.int32)
    passed = tl.zeros([], tl.int32)
    for start in range(0, t.first_count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        key = tl.load(t.first_keys + entry, mask=entry < t.first_count, other=NEVER)
        chosen, passed = among_least(key, bound, passed, equals)
        take = chosen > 0
        i = tl.load(t.entryless + given + tl.cumsum(chosen, 0) - 1, mask=take, other=0)
        given += tl.sum(chosen, 0)
        page = tl.load(t.lost_pages + i, mask=take, other=0)
        old = tl.load(t.first_page + entry, mask=take, other=0)
        tl.store(t.sink_entry + old, tl.full([BLOCK], 0, tl.int32), mask=old > 0)
        tl.store(t.first_page + entry, page.to(tl.int32), mask=take)
        tl.store(t.sink_entry + page, entry, mask=take)
        tl.store(t.first_stamp + entry, tl.full([BLOCK], 0, tl.int64) + step, mask=take)
        tl.store(t.lost_entries + i, entry, mask=take)
