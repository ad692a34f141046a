"""Gives BF16 pages to the pages that a batch will write, in one program, because each choice depends on earlier ones.

Each phase is a function, and barriers separate them: the batch's rows, the pinned windows, a key for every slot, the
k-th smallest key by bisection, the exchange of pages, and entries for lost first tokens. If no page needs a BF16 copy,
only the first phase runs.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.common import PAGE
from sglang_kvq.kernels.device.launch import Constants, start_kernel
from sglang_kvq.kernels.tiers.select_smallest import NEVER, among_least, bisect, count_below
from sglang_kvq.kernels.tiers.sink_entries import claim_of, entry_of, place_sink_tokens
from sglang_kvq.kernels.tiers.tables import TierTables, Window, page_at, window

#: Elements of windows or slots processed at a time; then entries of first tokens.
_ELEMENTS = 4096
_ENTRIES = 1024


def give_bf16_pages(
    tables: TierTables,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    seq_lens: torch.Tensor,
    direct_pages: torch.Tensor | None,
    step: int,
    first_slot: int = 1,
    new_tokens: int = 1,
    restored: torch.Tensor | None = None,
) -> None:
    """Plans a batch like ``TierManager._plan`` up to its ranges; starts the list of pages to be quantized.

    rows, prefix_lens, seq_lens: int ``[batch]``; prefix_lens is None for decoding: all but the last ``new_tokens``.
    direct_pages: int64 ``[n]``, pages that the batch quantizes from its activations, or None. step: number of the plan,
    from 1. first_slot: the first slot that pages may have. restored: int32 ``[batch]``, filled in a prefill if first
    tokens are kept: each row's first page if it gets its BF16 copy back, else 0.
    """
    direct = rows[:0] if direct_pages is None else direct_pages
    start_kernel(
        _give, (1,), rows, seq_lens if prefix_lens is None else prefix_lens, seq_lens, rows.shape[0],
        direct, direct.shape[0], step, first_slot, new_tokens,
        tables.arguments.first_page if restored is None else restored, tables.fixed,
        constants=_constants(tables.window, prefix_lens is None, _ELEMENTS, _ENTRIES),
    )  # fmt: skip


@cache
def _constants(window: Window, decoding: bool, elements: int, entries: int) -> Constants:
    return Constants(
        WINDOW=window,
        DECODING=decoding,
        ROWS=max(1, elements // window.WIDTH),
        SLOTS=elements,
        ENTRIES=entries,
        num_warps=16,
    )


# Nothing that varies is specialized: plans run outside CUDA graphs, so a request would wait for the compiler.
@triton.jit(
    do_not_specialize=[
        "rows", "prefix_lens", "seq_lens", "batch", "direct", "directs", "step", "first_slot", "new_tokens", "restored",
    ],
    do_not_specialize_on_alignment=["rows", "prefix_lens", "seq_lens", "direct", "restored"],
)  # fmt: skip
def _give(
    rows, prefix_lens, seq_lens, batch, direct, directs, step, first_slot, new_tokens, restored, t,
    WINDOW: tl.constexpr, DECODING: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Runs the phases in one program: rows, direct pages; the others only if pages need BF16 copies. t: ``Tables``."""
    step = step.to(tl.int64)
    needs, failed = _begin_rows(
        rows, prefix_lens, seq_lens, batch, step, new_tokens, restored, t, WINDOW, DECODING, ROWS
    )
    quantized = tl.zeros([], tl.int64)
    lost = tl.zeros([], tl.int64)
    given_directly = _mark_direct(direct, directs, t, SLOTS)
    if needs > 0:
        tl.debug_barrier()
        _hold_windows(step, t, WINDOW, ROWS)
        tl.debug_barrier()
        least, most, available = _key_slots(step, first_slot, t, WINDOW, SLOTS)
        tl.debug_barrier()
        takes = tl.minimum(needs, available)
        failed += needs - takes
        if takes > 0:
            keys, slots = t.keys + first_slot, t.slot_count - first_slot
            key = bisect(keys, slots, takes, least, most, SLOTS)
            equals = takes - count_below(keys, slots, key, SLOTS)  # so many slots with this key are taken
            quantized, lost = _exchange(t, key, equals, step, first_slot, WINDOW, SLOTS)
            if WINDOW.SINK_CACHE:
                tl.debug_barrier()
                place_sink_tokens(t, lost.to(tl.int32), step, ENTRIES)
    tl.store(t.count, quantized)
    if WINDOW.SINK_CACHE:
        tl.store(t.lost_count, lost)
    tl.store(t.written, tl.load(t.written) + quantized + given_directly)
    tl.store(t.errors, tl.load(t.errors) + failed)


@triton.jit
def _begin_rows(
    rows, prefix_lens, seq_lens, batch, step, new_tokens, restored, t,
    WINDOW: tl.constexpr, DECODING: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes lengths and stamps of the batch's rows; lists their window pages without a BF16 copy in ``wanted``.

    Returns:
        the number of wanted pages; the number of resumed pages that have lost their BF16 copy, which is an error.
    """
    SIZE: tl.constexpr = ROWS * WINDOW.WIDTH
    failed = tl.zeros([], tl.int64)
    needs = tl.zeros([], tl.int32)
    for start in range(0, batch, ROWS):
        i = start + tl.arange(0, ROWS)[:, None]
        row = tl.load(rows + i, mask=i < batch, other=0).to(tl.int32)
        length = tl.load(seq_lens + i, mask=i < batch, other=0).to(tl.int32)
        prefix = length - new_tokens
        if not DECODING:
            prefix = tl.load(prefix_lens + i, mask=i < batch, other=0).to(tl.int32)
            # Stamp the pages that the batch reads too, so that its old window gives way last.
            index, exists, page = window(t, row, prefix, WINDOW)
            _touch(t, index, _slot_of(t, page, exists), step, WINDOW)
        tl.store(t.row_len + row, length.to(tl.int64), mask=row > 0)
        index, exists, page = window(t, row, length, WINDOW)
        slot = _slot_of(t, page, exists)
        _touch(t, index, slot, step, WINDOW)

        need = exists & (index >= prefix // PAGE) & (slot < 0)
        if WINDOW.SINK_CACHE:
            first = page_at(t, row, row * 0, (row > 0) & (length > 0))
            tl.store(t.page_first + first, tl.full([ROWS, 1], 1, tl.uint8), mask=first > 0)
            if not DECODING:
                back = _claim(t, first, i, prefix >= PAGE, step)
                tl.store(restored + i, tl.where(back, first, 0), mask=i < batch)
                need |= back & (index == 0)
        need = tl.reshape(need.to(tl.int32), [SIZE])
        entry = tl.reshape(page.to(tl.int64) * 2 + (index < WINDOW.SINK).to(tl.int64), [SIZE])
        tl.store(t.wanted + needs + tl.cumsum(need, 0) - 1, entry, mask=need > 0)
        needs += tl.sum(need, 0)

        # A page that this batch resumes in the middle, and that leaves the window, is written in BF16 once more. It
        # keeps its BF16 copy until the next plan quantizes it.
        resumed = (row > 0) & (prefix % PAGE > 0)
        slot = _slot_of(t, page_at(t, row, prefix // PAGE, resumed), resumed)
        failed += tl.sum(tl.sum((slot < 0).to(tl.int64), 1), 0)
        tl.atomic_max(t.held + slot, _hold(step, WINDOW.SOFT, WINDOW) + row * 0, mask=slot > 0)
    return needs, failed


@triton.jit
def _claim(t, first, i, stored, step):
    """Tells if rows i [ROWS, 1] restore BF16 copies of pages ``first``; of rows that share a page, the first does."""
    lost = stored & (first > 0) & (_slot_of(t, first, first > 0) < 0)
    entry = entry_of(t, first, lost)
    lost &= entry > 0
    key = claim_of(i.to(tl.int64), step)
    tl.atomic_min(t.claims + entry, key, mask=lost)
    tl.debug_barrier()
    return lost & (tl.load(t.claims + entry, mask=lost, other=0) == key)


@triton.jit
def _mark_direct(direct, directs, t, SLOTS: tl.constexpr):
    """Marks pages that the batch quantizes from its activations as having records; returns their number."""
    given = tl.zeros([], tl.int64)
    for start in range(0, directs, SLOTS):
        i = start + tl.arange(0, SLOTS)
        page = tl.load(direct + i, mask=i < directs, other=0)  # 0 is padding
        tl.store(t.page_valid + page, tl.full([SLOTS], 1, tl.uint8), mask=page > 0)
        given += tl.sum((page > 0).to(tl.int64), 0)
    return given


@triton.jit
def _hold_windows(step, t, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """Writes to ``held`` how hard the windows' slots of all rows in use are to take, like ``TierState.held``."""
    for start in range(0, t.row_count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        length = tl.load(t.row_len + row, mask=row < t.row_count, other=0).to(tl.int32)
        index, exists, page = window(t, row, length, WINDOW)
        slot = _slot_of(t, page, exists)
        kept = tl.maximum(length - WINDOW.WRITTEN, 0) // PAGE - (WINDOW.RECENT - WINDOW.SOFT)
        pinned = (index < WINDOW.SINK) | (index >= kept)
        level = tl.where(pinned, WINDOW.SOFT, index - length // PAGE + WINDOW.RECENT)
        tl.atomic_max(t.held + slot, _hold(step, level, WINDOW), mask=slot > 0)


@triton.jit
def _hold(step, level, WINDOW: tl.constexpr):
    """Encodes a level for ``Tables.held``; pinned slots have level SOFT. Values of later steps are larger."""
    return step * (WINDOW.SOFT + 1) + level


@triton.jit
def _key_slots(step, first_slot, t, WINDOW: tl.constexpr, SLOTS: tl.constexpr):
    """Writes each slot's key; slots are reused in the order of keys.

    Free slots come first, then others by their stamps, sinks, and windows of rows in use by their levels.

    Returns:
        the least and the largest key of slots that may be taken; the number of these slots.
    """
    least, most = tl.full([SLOTS], NEVER, tl.int64), tl.full([SLOTS], 0, tl.int64)
    available = tl.full([SLOTS], 0, tl.int32)
    for start in range(first_slot, t.slot_count, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        inside = slot < t.slot_count
        stamp = tl.load(t.slot_stamp + slot, mask=inside, other=0) + 1
        stamp = tl.where(stamp > WINDOW.BONUS, stamp - WINDOW.BONUS + step + 1, stamp)
        key = tl.where(tl.load(t.slot_page + slot, mask=inside, other=0) > 0, stamp, 0)
        level = tl.load(t.held + slot, mask=inside, other=0) - _hold(step, 0, WINDOW)  # below 0: in no window
        key += tl.where(level >= 0, (level + 2) * (step + 2), 0)
        free = inside & (level < WINDOW.SOFT)
        tl.store(t.keys + slot, tl.where(free, key, NEVER), mask=inside)
        least = tl.where(free, tl.minimum(least, key), least)
        most = tl.where(free, tl.maximum(most, key), most)
        available += free.to(tl.int32)
    return tl.min(least, 0), tl.max(most, 0), tl.sum(available, 0)


@triton.jit
def _exchange(t, bound, equals, step, first_slot, WINDOW: tl.constexpr, SLOTS: tl.constexpr):
    """Gives the slots below the bound, and the first ``equals`` of those at it, to the wanted pages.

    Among pages that lose their slot, lists those without a record, which must be quantized, and those that begin a
    sequence.

    Returns:
        the lengths of the two lists.
    """
    quantized = tl.zeros([], tl.int64)
    begun = tl.zeros([], tl.int64)
    given = tl.zeros([], tl.int32)
    passed = tl.zeros([], tl.int32)
    for start in range(first_slot, t.slot_count, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        key = tl.load(t.keys + slot, mask=slot < t.slot_count, other=NEVER)
        chosen, passed = among_least(key, bound, passed, equals)
        take = chosen > 0
        entry = tl.load(t.wanted + given + tl.cumsum(chosen, 0) - 1, mask=take, other=0)
        given += tl.sum(chosen, 0)

        old = tl.load(t.slot_page + slot, mask=take, other=0)
        valid = tl.load(t.page_valid + old, mask=old > 0, other=1)
        lost = (valid == 0).to(tl.int32)
        listed = quantized + tl.cumsum(lost, 0) - 1
        tl.store(t.slots + listed, slot.to(tl.int64), mask=lost > 0)
        tl.store(t.pages + listed, old, mask=lost > 0)
        quantized += tl.sum(lost, 0)
        if WINDOW.SINK_CACHE:
            first = (tl.load(t.page_first + old, mask=old > 0, other=0) > 0).to(tl.int32)
            listed = begun + tl.cumsum(first, 0) - 1
            tl.store(t.lost_slots + listed, slot.to(tl.int64), mask=first > 0)
            tl.store(t.lost_pages + listed, old, mask=first > 0)
            begun += tl.sum(first, 0)
        tl.store(t.page_valid + old, tl.full([SLOTS], 1, tl.uint8), mask=old > 0)
        tl.store(t.page_slot + old, tl.full([SLOTS], -1, tl.int32), mask=old > 0)

        page = entry // 2
        tl.store(t.page_slot + page, slot, mask=take)
        tl.store(t.slot_page + slot, page, mask=take)
        tl.store(t.slot_stamp + slot, step + entry % 2 * WINDOW.BONUS, mask=take)
    return quantized, begun


@triton.jit
def _slot_of(t, page, exists):
    """Returns slots of pages: -1 for none, 0 where the page does not exist."""
    return tl.load(t.page_slot + page, mask=exists, other=0)


@triton.jit
def _touch(t, index, slot, step, WINDOW: tl.constexpr):
    """Stamps the slots that exist."""
    tl.store(t.slot_stamp + slot, step + (index < WINDOW.SINK).to(tl.int64) * WINDOW.BONUS, mask=slot > 0)
