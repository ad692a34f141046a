"""Attention of a few new tokens over a long stored prefix and over themselves (causally), straight from the pages.

A program takes one KV head of one item (``plan_extend``): a tile of query rows, tokens times the heads that share the KV
head, and a range of its request's units, 64 keys each: first the pages of the prefix, then the new tokens. Pages in
the history are read as records (``extend_history``), others as BF16 overlays; the partial results of a tile's items
are merged by log-sum-exp (``merge``). So one request keeps the GPU busy however few tokens it adds, and nothing of
the prefix is written anywhere.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.kernels.codes import Record
from sglang_kvq.kernels.common import INTERPRETED, PAGE, page_of, to_bf16
from sglang_kvq.kernels.decode import is_two_bit, value_dims
from sglang_kvq.kernels.extend_history import attend, history_any, history_two_bits, settled

LOG2E = 1.4426950408889634
NEVER = tl.constexpr(-1e30)
#: int32 fields of an item, see ``plan_extend``.
FIELDS = tl.constexpr(10)
#: What an item costs besides its units, in units: its queries, its result, the first loads (``extend_costs``: 13 at a time when
#: overlays were read without copies ahead, as a part of it).
ITEM_COST = 7


@dataclass(frozen=True)
class ExtendLaunch:
    """How the kernel is compiled, and how the batch is divided.

    Attributes:
        rows: of a tile: tokens times the query heads of a KV head.
        keys: BF16 keys a turn, at most 64.
        warps: 4 or 8; stages: the compiler's; registers: its limit per thread, None for none.
        programs_per_sm: that an SM holds at once.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None
    programs_per_sm: int


#: ``benchmarks/kernels.py --sweep-extend`` compares ways.
NARROW = ExtendLaunch(rows=64, keys=32, warps=4, stages=3, registers=168, programs_per_sm=3)
#: Heads of 256: a tile of keys takes twice the registers.
WIDE = ExtendLaunch(rows=64, keys=32, warps=8, stages=2, registers=None, programs_per_sm=1)


def extend_launch(head_dim: int) -> ExtendLaunch:
    return WIDE if head_dim > 128 else NARROW


@dataclass(frozen=True)
class ExtendPlan:
    """Items on the host.

    Attributes:
        items: int32 ``[n, FIELDS]``: request; its first token in the batch; its new tokens; the tile's first row;
            units first .. last; the prefix, in tokens; where the request's partial results begin, into how many items
            its tiles are cut, and which of them this one is.
        spans: int32 ``[tokens, 2]``: each token's first partial result and how many it has; one is none.
        partials: in all.
    """

    items: np.ndarray
    spans: np.ndarray
    partials: int


def plan_extend(prefix_lens: list[int], new_lens: list[int], gqa_group: int, rows: int, wave: int) -> ExtendPlan:
    """Divide a batch so that its items end at about the same time.

    Every tile's units are cut into equal parts of at most u, with the u whose whole waves take the least time.

    Args:
        prefix_lens, new_lens: tokens of each request.
        gqa_group: query heads of a KV head.
        rows: of a tile.
        wave: items that run at once.
    """
    new, prefix = np.array(new_lens, np.int64), np.array(prefix_lens, np.int64)
    starts = np.cumsum(new) - new
    tiles = -(-new * gqa_group // rows)  # of each request
    request = np.repeat(np.arange(len(new)), tiles)  # of each tile
    first_row = (np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * rows
    last_token = np.minimum(-(-(first_row + rows) // gqa_group), new[request])
    units = -(-prefix[request] // PAGE_SIZE) + -(-last_token // PAGE_SIZE)
    # All tiles of a request have as many parts as its last, which sees most: a token's heads may lie in two tiles.
    most = -(-prefix // PAGE_SIZE) + -(-new // PAGE_SIZE)
    per_request = -(-most // _schedule(most, tiles, wave)[1]) if len(units) else most
    parts = per_request[request]
    results = np.where(per_request > 1, new * per_request, 0)
    begins = np.cumsum(results) - results
    token_request = np.repeat(np.arange(len(new)), new)
    token = np.arange(len(token_request)) - starts[token_request]
    spans = np.stack([begins[token_request] + token * per_request[token_request], per_request[token_request]], axis=1)

    tile = np.repeat(np.arange(len(request)), parts)  # of each item
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    bounds = (units[tile] * part // parts[tile], units[tile] * (part + 1) // parts[tile])
    owner = request[tile]
    columns = [
        owner,
        starts[owner],
        new[owner],
        first_row[tile],
        *bounds,
        prefix[owner],
        begins[owner],
        parts[tile],
        part,
    ]
    items = np.stack(columns, axis=1)
    items = items[np.argsort(bounds[0] - bounds[1], kind="stable")]
    return ExtendPlan(items.astype(np.int32), spans.astype(np.int32), int(results.sum()))


def schedule(prefix_lens: list[int], new_lens: list[int], gqa_group: int, rows: int, wave: int) -> tuple[int, int]:
    """(waves of items, units of an item at most) that ``plan_extend`` gives a batch; it takes the same arguments."""
    prefix, new = np.array(prefix_lens, np.int64), np.array(new_lens, np.int64)
    tiles = -(-new * gqa_group // rows)
    return _schedule(-(-prefix // PAGE_SIZE) + -(-new // PAGE_SIZE), tiles, wave) if tiles.any() else (0, 0)


def _schedule(units: np.ndarray, tiles: np.ndarray, wave: int) -> tuple[int, int]:
    """Waves that end first, and the units of an item in them. units, tiles: of each request."""
    count, total, most = int(tiles.sum()), int((tiles * units).sum()), int(units.max())
    least = -(-count // wave)
    best = (float("inf"), 0, 0)
    for waves in range(least, least + 4):
        # Between as if parts had no remainders, and as if every tile had one.
        spare = waves * wave - count
        high = most if spare == 0 else min(-(-total // spare), most)
        low = min(-(-total // (waves * wave)), high)
        while low < high:
            middle = (low + high) // 2
            fits = np.sum(tiles * -(-units // middle)) <= waves * wave
            low, high = (low, middle) if fits else (middle + 1, high)
        best = min(best, (waves * (low + ITEM_COST), waves, low))
    return best[1:]


def extend(
    out: torch.Tensor,
    partial: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    items: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    *,
    record: Record,
    records: torch.Tensor,
    overlays: torch.Tensor,
    page_slot: torch.Tensor,
    row_pages: torch.Tensor,
    row_sink_end: torch.Tensor,
    row_history_end: torch.Tensor,
    launch: ExtendLaunch,
    plain: bool = INTERPRETED,
) -> None:
    """The result of every item: of a whole tile where that is one item, else partial.

    Args:
        out: BF16 ``[T, q_heads, D]``, contiguous; rows of requests whose tiles have several items are left to ``merge_splits``.
        partial: float32 ``[partials, q_heads, D]``; lse: float32 ``[partials, q_heads]``, log2 of the softmax's denominator.
        q: BF16 ``[T, q_heads, D]``; new: the new tokens' k and v, BF16 ``[T, kv_heads, D]``; rotated, last axes contiguous.
        items: of ``plan_extend`` with the launch's rows, on the device.
        rows: int ``[batch]``; the tables are ``PagePool``'s.
        record, records, overlays: one layer's.
        launch: from ``extend_launch``.
        plain: unpack codes without inline assembly, as the interpreter must.
    """
    k, v = new
    q_heads, d = q.shape[1:]
    kv_heads, dims = k.shape[1], value_dims(d)
    _extend[(kv_heads * (d // dims), len(items))](
        out, partial, lse, q, k, v, items, rows, scale * LOG2E,
        records, overlays, page_slot, row_pages, row_sink_end, row_history_end,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], row_pages.stride(0),
        RECORD=record,
        FAST=is_two_bit(record, d),
        GQA_GROUP=q_heads // kv_heads,
        KV_HEADS=kv_heads,
        D=d,
        DP=triton.next_power_of_2(d),
        JP=max(16, triton.next_power_of_2(d // 4)),
        DIMS=dims,
        VP=triton.next_power_of_2(dims),
        ROWS=launch.rows,
        KEYS=launch.keys,
        PLAIN=plain,
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
        enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _extend(
    out, partial, lse, q, k, v, items, rows, scale_log2,
    records, overlays, page_slot, row_pages, row_sink_end, row_history_end,
    q_token, q_head, k_token, k_head, v_token, v_head, table_row,
    RECORD: tl.constexpr, FAST: tl.constexpr, GQA_GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, JP: tl.constexpr, DIMS: tl.constexpr, VP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (kv_head * parts of V + part, item)."""
    head = tl.program_id(0) // (D // DIMS)
    v_first = tl.program_id(0) % (D // DIMS) * DIMS
    item = items + tl.program_id(1) * FIELDS
    request, start, new = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    first_row, first, last, prefix = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    begin, parts, part = tl.load(item + 7), tl.load(item + 8), tl.load(item + 9)

    row = tl.load(rows + request).to(tl.int64)
    table = row_pages + row * table_row
    pages = tl.cdiv(prefix, PAGE)
    history = tl.minimum(tl.cdiv(tl.load(row_sink_end + row), PAGE), pages)
    history_end = tl.minimum(tl.cdiv(tl.load(row_history_end + row), PAGE), pages)
    # This item's pages: overlays first .. history, records .. history_end, overlays .. pages_end.
    pages_end = tl.minimum(last, pages)
    history = tl.minimum(tl.maximum(history, first), pages_end)
    history_end = tl.minimum(tl.maximum(history_end, history), pages_end)

    token = (first_row + tl.arange(0, ROWS)) // GQA_GROUP  # of the request
    member = (first_row + tl.arange(0, ROWS)) % GQA_GROUP
    live = token < new
    start = start.to(tl.int64)
    place = (start + token) * q_token + (head * GQA_GROUP + member) * q_head
    acc = tl.zeros([ROWS, VP], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NEVER, tl.float32)
    if history < history_end:
        if FAST:
            acc, total, top = history_two_bits(
                q, place, live, table, history, history_end, prefix, records, head, v_first, scale_log2,
                KV_HEADS, D, JP, DIMS, VP, ROWS, PLAIN,
            )  # fmt: skip
        else:
            acc, total, top = history_any(
                q, place, live, table, history, history_end, prefix, records, head, v_first, scale_log2,
                RECORD, KV_HEADS, D, JP, DIMS, VP, ROWS,
            )  # fmt: skip

    overlays += head * (PAGE * D)
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    acc, total, top = _whole(
        acc, total, top, q, place, live, token, table, tl.minimum(first, pages_end), history, history_end, pages_end,
        prefix, tl.maximum(first - pages, 0), tl.maximum(last - pages, 0), new, overlays, page_slot,
        k, k_token, v, v_token, v_first, scale_log2, KV_HEADS, D, DP, DIMS, VP, KEYS, ROWS,
    )  # fmt: skip

    dim = v_first + tl.arange(0, VP)[None, :]
    wanted = live[:, None] & (dim < v_first + DIMS)
    q_head_index = head * GQA_GROUP + member
    total = tl.maximum(total, 1e-30)
    acc *= (1 / total)[:, None]
    if parts == 1:
        row_out = (start + token) * (KV_HEADS * GQA_GROUP) + q_head_index
        tl.store(out + row_out[:, None] * D + dim, to_bf16(acc), mask=wanted)
    else:  # of a row that saw nothing, the weight is 2^NEVER
        result = (begin + token * parts + part).to(tl.int64) * (KV_HEADS * GQA_GROUP) + q_head_index  # [ROWS]
        tl.store(lse + result, top + tl.log2(total), mask=live)
        tl.store(partial + result[:, None] * D + dim, acc, mask=wanted)


@triton.jit
def _whole(
    acc, total, top, q, place, live, token, table, first, history, history_end, last, prefix,
    first_new, last_new, new, overlays, page_slot, k, k_token, v, v_token, v_first, scale_log2,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DIMS: tl.constexpr, VP: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add what is in BF16: overlays of pages first .. last outside the history, then units first_new .. of new tokens.

    One loop, so that the compiler's copies ahead run on from the ones to the others.
    """
    TILES: tl.constexpr = PAGE // KEYS
    n, dim, dim_v = tl.arange(0, KEYS), tl.arange(0, DP), v_first + tl.arange(0, VP)
    inside = live[:, None] & (dim < D)[None, :]
    queries = tl.load(q + place[:, None] + dim[None, :], mask=inside, other=0.0)  # [ROWS, DP]
    gap = history_end - history
    stored_pages = last - first - gap
    stored = stored_pages * TILES
    # A page's slot is looked up two turns ahead, its id three: the compiler makes loads wait for what they depend on otherwise.
    slot = tl.maximum(tl.load(page_slot + _page(table, first, 0, stored_pages, history, gap)), 0)
    next_slot = tl.load(page_slot + _page(table, first, 1 // TILES, stored_pages, history, gap))
    page = _page(table, first, 2 // TILES, stored_pages, history, gap)
    for step in tl.range(0, stored + (last_new - first_new) * TILES):
        is_stored = step < stored
        index = first + step // TILES
        index += tl.where(index < history, 0, gap)
        in_page = (step - step // TILES * TILES) * KEYS
        overlay = overlays + slot.to(tl.int64) * (2 * KV_HEADS * PAGE * D) + in_page * D
        key = tl.where(is_stored, index, first_new + step // TILES - stored_pages) * PAGE + in_page
        key_new = tl.where(is_stored, 0, key).to(tl.int64)
        k_base = tl.where(is_stored, overlay, k + key_new * k_token)
        v_base = tl.where(is_stored, overlay + KV_HEADS * PAGE * D, v + key_new * v_token)
        k_stride, v_stride = tl.where(is_stored, D, k_token), tl.where(is_stored, D, v_token)
        # Of keys that are not there the last one is read again: nobody sees them, but they must be numbers.
        row = tl.minimum(n, tl.where(is_stored, prefix, new) - key - 1)
        k_place = k_base + row[:, None] * k_stride + dim[None, :]
        v_place = v_base + row[:, None] * v_stride + dim_v[None, :]
        keys = tl.load(k_place) if DP == D else tl.load(k_place, mask=(dim < D)[None, :], other=0.0)
        if VP == DIMS:
            values = tl.load(v_place)
        else:
            values = tl.load(v_place, mask=(dim_v < v_first + DIMS)[None, :], other=0.0)
        seen = n[None, :] < (tl.where(is_stored, prefix, token + 1) - key)[:, None]
        acc, total, top = attend(acc, total, top, queries, keys, values, seen, scale_log2, ROWS, KEYS)
        acc = settled(acc)
        slot = tl.maximum(next_slot, 0)
        next_slot = tl.load(page_slot + page)
        page = _page(table, first, (step + 3) // TILES, stored_pages, history, gap)
    return acc, total, top


@triton.jit
def _page(table, first, count, stored_pages, history, gap):
    """Id of the ``count``-th page from ``first`` on outside the history, or of the last; of any page, if there is none."""
    index = first + tl.minimum(count, stored_pages - 1)
    index += tl.where(index < history, 0, gap)
    return page_of(table, tl.where(stored_pages > 0, index, 0))
