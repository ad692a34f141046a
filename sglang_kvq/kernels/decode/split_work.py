"""Division of a decode batch among programs, once per step, from the lengths on the device.

A request of H history pages and O BF16 tiles costs

    work = HISTORY_COST H + bf16_page O                  ``WorkCosts``

and is cut into ceil(work / u) items. u is the least value for which all requests together fit in the given number of
items. A request's items are consecutive. At most one covers the end of its history and its first BF16 pages. So
programs end at about the same time, however much lengths differ.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.arguments import field_count, load_fields, store_fields
from sglang_kvq.kernels.device.common import PAGE
from sglang_kvq.kernels.device.launch import start_kernel

#: Tokens of a BF16 tile, whose shared memory stays below that of a tile of records.
BF16_PAGE_TILE = tl.constexpr(16)
#: Cost of a page of records, in the units of ``WorkCosts.bf16_page``.
HISTORY_COST = tl.constexpr(4)
#: Minimum work of an item: four pages.
LEAST_WORK = tl.constexpr(16)
#: int32 fields reserved for each item; ``Item`` uses the first of them.
FIELDS = tl.constexpr(16)
#: Items that a program writes, and the most pairs of an item and a request that it compares.
_ITEMS, _COMPARED = 32, 32 << 10


class WorkCosts(NamedTuple):
    """Measured costs of a launch's work.

    Attributes:
        bf16_page: cost of a BF16 tile, if a page of records costs ``HISTORY_COST``; bytes alone would give 7.
        turn: pages of records read per iteration; items have whole multiples of it.
    """

    bf16_page: int = 5
    turn: int = 2


class Item(NamedTuple):
    """An item's int32 fields, in this order.

    Attributes:
        request: index in the batch, -1 for an unused item.
        first_page, last_page: history pages of that request, the end exclusive.
        first_tile, last_tile: BF16 tiles, the end exclusive, counted as if the history did not exist.
        history, history_end: begin and end of its history, in pages.
        row, length: the request's row and its number of tokens.
        page_a, page_b: ids of the item's first two history pages, the same twice if it has only one.
    """

    request: int
    first_page: int
    last_page: int
    first_tile: int
    last_tile: int
    history: int
    history_end: int
    row: int
    length: int
    page_a: int
    page_b: int


ITEM_FIELDS = field_count(Item)


def split_work(
    items: torch.Tensor,
    spans: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    row_pages: torch.Tensor,
    row_sink_end: torch.Tensor,
    row_history_end: torch.Tensor,
    costs: WorkCosts,
) -> None:
    """Divides a batch into items: fills ``items`` and ``spans``.

    Args:
        items: int32 ``[n, FIELDS]``, n at least the batch: an ``Item`` each.
        spans: int32 ``[batch, 2]``: each request's first item and number of items.
        rows, seq_lens: int ``[batch]``; the tables are ``PagePool``'s.
        costs: costs of work in the launch that reads the items.
    """
    count, batch = len(items), len(rows)
    most = triton.next_power_of_2(batch)
    each = min(_ITEMS, max(1, _COMPARED // most))
    start_kernel(
        _plan, (triton.cdiv(count, each),), items, spans, rows, seq_lens, row_pages, row_sink_end, row_history_end,
        row_pages.stride(0), count, batch,
        BATCH=most,
        ITEMS=each,
        BF16_PAGE=costs.bf16_page,
        TURN=costs.turn,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "batch"])
def _plan(
    items, spans, rows, seq_lens, row_pages, row_sink_end, row_history_end,
    table_row, count, batch, BATCH: tl.constexpr, ITEMS: tl.constexpr, BF16_PAGE: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Writes the program's items; every program divides the whole batch, which is faster than a separate launch."""
    r = tl.arange(0, BATCH)
    _, _, begin, end, tiles = _segments(r, rows, seq_lens, row_sink_end, row_history_end, batch)
    work = (end - begin) * HISTORY_COST + tiles * BF16_PAGE

    low, high = LEAST_WORK + 0, tl.maximum(tl.max(work), LEAST_WORK)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(work, middle)) <= count
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    parts = tl.cdiv(work, low)
    ends = tl.cumsum(parts)
    if tl.program_id(0) == 0:
        tl.store(spans + 2 * r, ends - parts, mask=r < batch)
        tl.store(spans + 2 * r + 1, parts, mask=r < batch)

    i = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    before = ends[None, :] <= i[:, None]  # [ITEMS, BATCH]: requests whose items all come before
    request = tl.sum(before.to(tl.int32), 1)
    used = (request < batch) & (i < tl.sum(parts))
    part = i - tl.sum(tl.where(before, parts[None, :], 0), 1)
    row, length, begin, end, tiles = _segments(request, rows, seq_lens, row_sink_end, row_history_end, batch)
    first, last = part * low, part * low + low
    first_page, last_page = begin + _pages(first, end - begin, TURN), begin + _pages(last, end - begin, TURN)
    address, inside = items + i * FIELDS, i < count
    table = row_pages + row * table_row
    some = used & (first_page < last_page)
    item = Item(
        request=tl.where(used, request, -1),
        first_page=first_page,
        last_page=last_page,
        first_tile=_tiles(first, end - begin, tiles, BF16_PAGE),
        last_tile=_tiles(last, end - begin, tiles, BF16_PAGE),
        history=begin,
        history_end=end,
        row=row.to(tl.int32),
        length=length,
        page_a=tl.load(table + tl.minimum(first_page, last_page - 1), mask=some, other=0),
        page_b=tl.load(table + tl.minimum(first_page + 1, last_page - 1), mask=some, other=0),
    )
    store_fields(address, item, inside)


@triton.jit
def load_item(items, index):
    """Loads the ``Item`` with an index."""
    return Item(*load_fields(items + index * FIELDS, ITEM_FIELDS))


@triton.jit
def _segments(request, rows, seq_lens, row_sink_end, row_history_end, batch):
    """Returns row, length, history pages begin .. end and the number of other BF16 tiles; 0 beyond the batch."""
    live = request < batch
    row = tl.load(rows + request, mask=live, other=0).to(tl.int64)
    length = tl.load(seq_lens + request, mask=live, other=0).to(tl.int32)
    pages = tl.cdiv(length, PAGE)
    begin = tl.minimum(tl.cdiv(tl.load(row_sink_end + row, mask=live, other=0), PAGE), pages)
    end = tl.cdiv(tl.load(row_history_end + row, mask=live, other=0), PAGE)
    end = tl.minimum(tl.maximum(end, begin), pages)
    tiles = (pages - (end - begin)) * (PAGE // BF16_PAGE_TILE)
    empty = pages * (PAGE // BF16_PAGE_TILE) - tl.cdiv(length, BF16_PAGE_TILE)  # in the page being filled
    return row, length, begin, end, tiles - tl.where((end < pages) | (begin == end), empty, 0)


@triton.jit
def _pages(work, history, TURN: tl.constexpr):
    """Returns how many history pages come before some amount of work: those of whole iterations, or all."""
    return tl.where(work >= history * HISTORY_COST, history, work // (TURN * HISTORY_COST) * TURN)


@triton.jit
def _tiles(work, history, tiles, BF16_PAGE: tl.constexpr):
    """Returns how many BF16 tiles come before some amount of work."""
    return tl.minimum(tl.maximum(work - history * HISTORY_COST, 0) // BF16_PAGE, tiles)
