"""One memory is divided: which numbers of pages and BF16 pages fit together, and where the boundary goes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.arena import Arena, padded
from sglang_kvq.cache.shared.split import Split, WindowSlots
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat

ARENAS = st.builds(
    lambda page, ratio, slots: Arena(padded(page), padded(page) * ratio // 8 // 16 * 16 + 16, slots, 10**9),
    st.integers(1, 20_000),
    st.integers(8, 100),
    st.integers(2, 3000),
)
WINDOWS = st.builds(
    lambda least, soft, spare: WindowSlots(least + soft, least, spare),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(1, 9),
)


@given(st.integers(1, 10**8))
def test_pages_begin_at_odd_multiples(size):
    """Padded sizes are multiples of 256 that no larger power of two divides."""
    assert padded(size) >= size and padded(size) % 512 == 256 and padded(size) - size < 512


@given(ARENAS, st.data())
def test_pages_and_slots_do_not_overlap(arena, data):
    slots = data.draw(st.integers(0, arena.slots))
    pages = arena.pages_beside(slots)
    first = arena.slots + 1 - slots
    end = arena.slot_bytes + (pages + 1) * arena.page_bytes  # slot 0 comes first, then page 0
    assert end <= first * arena.slot_bytes < end + arena.page_bytes, "one page more would not fit"
    if pages >= 0:
        assert arena.slots_beside(pages) >= slots and arena.pages_beside(arena.slots_beside(pages)) >= pages
        assert arena.first_slot(pages) == arena.slots + 1 - arena.slots_beside(pages)


@given(ARENAS, WINDOWS, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)), min_size=1, max_size=20))
def test_what_is_in_use_fits_and_windows_are_whole_where_they_can_be(arena, windows, steps):
    arena = replace(arena, pages=arena.pages_beside(windows.needed(1)))
    if arena.pages < 1:
        return
    split = Split(arena, windows)
    for pages, rows in steps:
        pages = min(pages, arena.pages)
        room, before = split.room(rows), (split.first_slot, split.slots, split.pages)
        if not split.fit(pages, rows):
            assert pages > room and before == (split.first_slot, split.slots, split.pages), "nothing moved"
            continue
        assert pages <= split.pages and split.slots >= windows.needed(rows)
        spared = arena.slots // 64 // 4  # room so that the next page need not move the boundary
        assert split.slots >= min(windows.wanted(rows), arena.slots_beside(pages)) - spared
        if before[1] >= windows.wanted(rows) and before[2] >= pages:
            assert split.slots >= before[1], "the boundary stays where all fits"
        assert split.excess(pages, rows) == 0 or arena.slots_beside(pages) < max(
            windows.wanted(rows), arena.slots // 10
        )


def test_a_memory_full_of_cached_pages_seldom_moves_its_boundary():
    """Prompts come one after the other and evict older ones, while more or fewer requests run."""
    windows = WindowSlots(whole=6, least=2, spare=130)
    arena = Arena(padded(1000), 7 * padded(1000), 3000, 10**9)
    arena = replace(arena, pages=arena.pages_beside(windows.needed(1)))
    split, used, places, rng = Split(arena, windows), arena.pages // 2, [], random.Random(0)
    for _ in range(1000):
        rows = 60 + rng.randint(0, 7)
        used += 30 - split.excess(used + 30, rows)
        assert split.fit(used, rows) and used <= arena.pages
        places.append(split.first_slot)
    moves = sum(a != b for a, b in pairwise(places))
    assert 10 < moves < 1000 / 4, moves


@pytest.mark.parametrize("slots", [1, 7])
@pytest.mark.parametrize("pages", [1, 6, 7, 500])
def test_the_smallest_memory_has_no_slot_to_spare(pages, slots):
    arena = Arena.smallest(256, 1700, slots, pages)
    assert arena.slots_beside(pages) == slots and arena.last_page(arena.first_slot(pages)) == pages
    assert replace(arena, slots=arena.slots - 1).slots_beside(pages) == slots - 1


def test_the_boundary_moves_by_steps():
    """Adding one more page rarely moves the boundary again."""
    windows = WindowSlots(6, 2, 10)
    arena = Arena(100, 700, 1000, 10**9)
    split = Split(replace(arena, pages=arena.pages_beside(windows.needed(1))), windows)
    moves = 0
    for pages in range(1, split.arena.pages):
        before = split.first_slot
        assert split.fit(pages, 1)
        moves += split.first_slot != before
    assert 5 < moves < 40
    for rows in range(2, 100):
        before = split.first_slot
        assert split.fit(100, rows)
        moves += split.first_slot != before
    assert moves < 80


def test_cached_pages_give_way_to_windows_but_those_in_use_do_not():
    windows = WindowSlots(6, 2, 4)
    arena = Arena(100, 700, 100, 10**9)
    split = Split(arena, windows)
    assert split.excess(500, 5) == 500 - arena.pages_beside(34 + 100 // 64) > 0
    assert split.fit(500, 5) and windows.needed(5) <= split.slots < windows.wanted(5)
    assert not split.fit(arena.pages_beside(windows.needed(5)) + 1, 5) and split.fit(
        arena.pages_beside(windows.needed(5)), 5
    )


def test_records_and_bf16_pages_share_their_bytes():
    """Pages and slots of all layers lie where the arena says, even if layers have two formats."""
    formats = [PageFormat(64, 64, 0.96, 0.92), PageFormat(64, 32, 0.96, 0.92), PageFormat(64, 64, 0.96, 0.92)]
    heads, layers = 2, len(formats)
    page = padded(heads * sum(f.record_bytes for f in formats))
    arena = Arena(page, layers * heads * 2 * P * 64 * 2, 20, 40)
    table = torch.zeros(2, 2 * P, dtype=torch.int32)
    pool = PagePool.allocate(formats, kv_heads=heads, pages=40, slots=20, req_to_token=table, arena=arena)
    memory = pool.bf16_pages.untyped_storage()
    begin = pool.bf16_pages.data_ptr()
    assert len(pool.stores) == 2 and memory.nbytes() == arena.total_bytes
    spans = []
    for layer, records in enumerate(pool.records):
        at = records[7].data_ptr() - begin
        assert arena.slot_bytes + 7 * page <= at and at + records[7].numel() <= arena.slot_bytes + 8 * page
        assert records[7].is_contiguous()
        spans.append((at, at + records[7].numel()))
        there = pool.bf16_pages[layer, 9]
        assert there.is_contiguous() and 0 <= there.data_ptr() - begin - 9 * arena.slot_bytes < arena.slot_bytes
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "layers overlap"
    pool.records[1][0].fill_(1)
    assert int((pool.bf16_pages[:, 1] != 0).sum()) == pool.records[1][0].numel() // 2, "page 0 lies behind slot 0"


@pytest.mark.parametrize("pages", [0, -3])
def test_a_memory_without_a_page_is_no_layout(pages):
    from sglang_kvq.cache.layout import KVGeometry, share
    from sglang_kvq.errors import KVQuantError

    geometry = KVGeometry(2, (PageFormat(64, 64, 0.96, 0.92),))
    with pytest.raises(KVQuantError, match="one request and its prompt need 9 .* Raise --mem-fraction-static"):
        share(geometry, WindowSlots(6, 2, 5), pages=pages, budget_bytes=1 << 18)
