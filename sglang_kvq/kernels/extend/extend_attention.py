"""Attention of a few new tokens over a long stored prefix and causally over themselves, directly from the pages.

A program takes one KV head of one item (``plan_extend``). An item is a tile of query rows and a range of its request's
units, 64 keys each: first the pages of the prefix, then the new tokens. The rows are tokens times the heads that share
the KV head. Pages in the history are read as records (``extend.history``), others as BF16 pages. ``merge`` combines
the partial results of a tile's items by log-sum-exp. So one request keeps the GPU busy however few tokens it adds, and
no part of the prefix is written anywhere.
"""

from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.decode.decode_attention import is_two_bit
from sglang_kvq.kernels.device.arguments import Stored, View, field_count, load_fields, view
from sglang_kvq.kernels.device.codes import PlaneRecord, Record
from sglang_kvq.kernels.device.common import INTERPRETED, PAGE, page_of, to_bf16
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.plane_codes import is_planes, row_dims
from sglang_kvq.kernels.device.shape import shape_of
from sglang_kvq.kernels.device.softmax import LOG2E, attend, load_sink, no_keys, with_sink
from sglang_kvq.kernels.extend.history import Tile, history_any, history_two_bits, settled
from sglang_kvq.kernels.extend.history_planes import history_planes

#: Fixed cost of an item, in units: loading its queries, storing its result, the first loads. It was 13, by
#: ``extend_costs``, when BF16 pages were read without copies ahead, which was part of it.
ITEM_COST = 7
#: The most waves of items, in addition to those that whole tiles need.
MORE_WAVES = 3


@dataclass(frozen=True)
class ExtendLaunch:
    """Compile options of the kernel, and the division of the batch.

    Attributes:
        rows: rows of a tile, which are tokens times the query heads of a KV head.
        keys: BF16 keys per iteration, at most 64.
        warps: 4 or 8; stages: a compiler option; registers: the compiler's limit per thread, None for none.
        programs_per_sm: programs that an SM holds at once.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None
    programs_per_sm: int


#: Heads up to 128; ``benchmarks/kernels.py --sweep-extend`` compares launches.
NARROW = ExtendLaunch(rows=64, keys=32, warps=4, stages=3, registers=168, programs_per_sm=3)
#: Heads of 256: a tile of keys takes twice the registers.
WIDE = ExtendLaunch(rows=64, keys=32, warps=8, stages=2, registers=None, programs_per_sm=1)


def is_cheap(record: Record | PlaneRecord, head_dim: int) -> bool:
    """Tells if codes become operands in few instructions, as in ``history_two_bits`` and ``history_planes``.

    ``history_any`` takes many more.
    """
    return isinstance(record, PlaneRecord) or is_two_bit(record, head_dim)


def extend_launch(head_dim: int) -> ExtendLaunch:
    return WIDE if head_dim > 128 else NARROW


class Item(NamedTuple):
    """An item's int32 fields, in this order.

    Attributes:
        request: index in the batch; start: its first token in the batch; new: number of its new tokens.
        first_row: first row of the tile, counted from the request's first.
        first, last: units, the end exclusive.
        prefix: the request's stored tokens.
        begin: index of the request's first partial result; parts: number of items per tile; part: index of this one.
    """

    request: int
    start: int
    new: int
    first_row: int
    first: int
    last: int
    prefix: int
    begin: int
    parts: int
    part: int


FIELDS = field_count(Item)


@dataclass(frozen=True)
class ExtendPlan:
    """The items of a batch, on the host.

    Attributes:
        items: int32 ``[n, FIELDS]``, an ``Item`` each.
        spans: int32 ``[tokens, 2]``: index of each token's first partial result and their number; a number of 1 means
            that there are none, because the result is final.
        partials: total number of partial results.
    """

    items: np.ndarray
    spans: np.ndarray
    partials: int


def plan_extend(prefix_lens: list[int], new_lens: list[int], gqa_group: int, rows: int, wave: int) -> ExtendPlan:
    """Divides a batch so that its items end at about the same time.

    Every tile's units are cut into equal parts of at most u units, with the u for which all waves take the least time.

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
    # A token's heads may be in two tiles, so all tiles of a request have as many parts as the last, which sees most.
    most = -(-prefix // PAGE_SIZE) + -(-new // PAGE_SIZE)
    per_request = -(-most // _schedule(*_counts(most, tiles), wave)[1]) if len(units) else most
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
    fields = Item(
        request=owner,
        start=starts[owner],
        new=new[owner],
        first_row=first_row[tile],
        first=bounds[0],
        last=bounds[1],
        prefix=prefix[owner],
        begin=begins[owner],
        parts=parts[tile],
        part=part,
    )
    items = np.stack(fields, axis=1)
    items = items[np.argsort(bounds[0] - bounds[1], kind="stable")]
    return ExtendPlan(items.astype(np.int32), spans.astype(np.int32), int(results.sum()))


def schedule(prefix_lens: list[int], new_lens: list[int], gqa_group: int, rows: int, wave: int) -> tuple[int, int]:
    """Returns ``plan_extend``'s number of waves and maximum units per item, for the same arguments."""
    prefix, new = np.array(prefix_lens, np.int64), np.array(new_lens, np.int64)
    tiles = -(-new * gqa_group // rows)
    units = -(-prefix // PAGE_SIZE) + -(-new // PAGE_SIZE)
    return _schedule(*_counts(units, tiles), wave) if tiles.any() else (0, 0)


def _counts(units: np.ndarray, tiles: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the units and tiles of the requests that have any, as ``_schedule`` takes them."""
    return tuple(units[tiles > 0].tolist()), tuple(tiles[tiles > 0].tolist())


def most_items(tokens: int, requests: int, gqa_group: int, rows: int, wave: int) -> int:
    """Returns the most items that ``plan_extend`` makes of so many new tokens in at most so many requests."""
    tiles = tokens * gqa_group // rows + min(requests, tokens)  # each request may have one that is not full
    return (-(-tiles // wave) + MORE_WAVES) * wave


@lru_cache(maxsize=4)  # the choice of a way and the plan ask for the same batch
def _schedule(units: tuple[int, ...], tiles: tuple[int, ...], wave: int) -> tuple[int, int]:
    """Returns the number of waves that takes the least time, and its maximum units per item.

    units, tiles: of each request.
    """
    count, total, most = sum(tiles), sum(map(mul, tiles, units)), max(units)
    least = -(-count // wave)
    best = (float("inf"), 0, 0)
    for waves in range(least, least + MORE_WAVES + 1):
        # The result lies between that for parts without remainders and that for a remainder in every tile.
        spare = waves * wave - count
        high = most if spare == 0 else min(-(-total // spare), most)
        low = min(-(-total // (waves * wave)), high)
        while low < high:
            middle = (low + high) // 2
            fits = sum([t * -(-u // middle) for t, u in zip(tiles, units)]) <= waves * wave
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
    record: Record | PlaneRecord,
    stored: Stored,
    *,
    launch: ExtendLaunch,
    sinks: torch.Tensor | None = None,
    plain: bool = INTERPRETED,
) -> None:
    """Computes the result of every item: final if the item is a whole tile, else partial.

    Args:
        out: BF16 ``[T, q_heads, D]``, contiguous; ``merge_splits`` writes rows of requests whose tiles have several
            items.
        partial: float32 ``[partials, q_heads, D]``.
        lse: float32 ``[partials, q_heads]``, log2 of the softmax's denominator.
        q: BF16 ``[T, q_heads, D]``; new: the new tokens' k and v, BF16 ``[T, kv_heads, D]``; rotated, last axes
            contiguous.
        items: from ``plan_extend`` with the launch's rows, on the device.
        rows: int ``[batch]``.
        record, stored: of one layer.
        launch: from ``extend_launch``.
        sinks: float ``[q_heads]`` or None, applied to rows of whole tiles; ``merge_splits`` applies them to the others.
        plain: unpacks codes without inline assembly, as the interpreter requires.
    """
    k, v = new
    q_heads, d = q.shape[1:]
    shape = shape_of(k.shape[1], d, q_heads)
    start_kernel(
        _extend, (shape.KV_HEADS * (d // shape.DIMS), len(items)),
        out, partial, lse, view(q), view(k), view(v), items, rows, scale * LOG2E, stored,
        lse if sinks is None else sinks,
        RECORD=record,
        SHAPE=shape,
        FAST=is_two_bit(record, d),
        ROWS=launch.rows,
        KEYS=launch.keys,
        SINKS=sinks is not None,
        PLAIN=plain,
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
        enable_fp_fusion=True,
    )  # fmt: skip


class Pages(NamedTuple):
    """The pages of an item: its records, and the BF16 pages before and after them.

    Attributes:
        table: the request's row of ``row_pages``.
        first, end: the item's pages in the prefix; history, history_end: the records among them.
        tokens: number of tokens of the whole prefix.
    """

    table: tl.tensor
    first: tl.tensor
    history: tl.tensor
    history_end: tl.tensor
    end: tl.tensor
    tokens: tl.tensor


class NewTokens(NamedTuple):
    """The new tokens of an item's request.

    Attributes:
        k, v: ``View``s that begin at the request's first token and this KV head.
        first, last: the item's units of new tokens; count: number of all new tokens.
    """

    k: View
    v: View
    first: tl.tensor
    last: tl.tensor
    count: tl.tensor


@triton.jit
def _extend(
    out, partial, lse, q, k, v, items, rows, scale_log2, stored, sinks,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SINKS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Program (kv_head * parts of V + part, item): divides the item's pages, attends to its records, then to its BF16
    keys, and stores the result.
    """
    PARTS: tl.constexpr = SHAPE.D // SHAPE.DIMS
    head = tl.program_id(0) // PARTS
    v_first = tl.program_id(0) % PARTS * SHAPE.DIMS
    item = Item(*load_fields(items + tl.program_id(1) * FIELDS, FIELDS))
    pages = _pages_of(item, rows, stored)
    prefix_units = tl.cdiv(item.prefix, PAGE)

    token = (item.first_row + tl.arange(0, ROWS)) // SHAPE.GQA_GROUP  # of the request
    q_head = head * SHAPE.GQA_GROUP + (item.first_row + tl.arange(0, ROWS)) % SHAPE.GQA_GROUP
    start = item.start.to(tl.int64)
    tile = Tile(q.data, (start + token) * q.token + q_head * q.head, token < item.new)
    state = no_keys(ROWS, SHAPE.VP)
    if pages.history < pages.history_end:
        records = stored.records + head * RECORD.bytes
        if is_planes(RECORD):
            state = history_planes(tile, pages, records, v_first, scale_log2, RECORD, SHAPE, ROWS, PLAIN)
        elif FAST:
            state = history_two_bits(tile, pages, records, v_first, scale_log2, RECORD, SHAPE, ROWS, PLAIN)
        else:
            state = history_any(tile, pages, records, v_first, scale_log2, RECORD, SHAPE, ROWS)

    new = NewTokens(
        View(k.data + start * k.token + head * k.head, k.token, k.head),
        View(v.data + start * v.token + head * v.head, v.token, v.head),
        tl.maximum(item.first - prefix_units, 0),
        tl.maximum(item.last - prefix_units, 0),
        item.new,
    )
    bf16_pages = stored.bf16_pages + head * (PAGE * SHAPE.D)
    dims = row_dims(v_first, RECORD, SHAPE)
    state = _whole_keys(
        state, tile, token, pages, new, bf16_pages, stored.slot, stored.page_slot, dims, scale_log2, SHAPE, KEYS, ROWS
    )
    if SINKS:  # once per row: for a row in parts, the merge adds it
        state = with_sink(state, tl.where(item.parts == 1, load_sink(sinks, q_head), float("-inf")))
    _store_result(out, partial, lse, state, item, token, q_head, dims, SHAPE)


@triton.jit
def _pages_of(item, rows, stored):
    """Returns the item's pages: BF16 pages first .. history, records .. history_end, BF16 pages .. end."""
    row = tl.load(rows + item.request).to(tl.int64)
    pages = tl.cdiv(item.prefix, PAGE)
    history = tl.minimum(tl.cdiv(tl.load(stored.row_sink_end + row), PAGE), pages)
    history_end = tl.minimum(tl.cdiv(tl.load(stored.row_history_end + row), PAGE), pages)
    end = tl.minimum(item.last, pages)
    history = tl.minimum(tl.maximum(history, item.first), end)
    history_end = tl.minimum(tl.maximum(history_end, history), end)
    table = stored.row_pages + row * stored.pages_row
    return Pages(table, tl.minimum(item.first, end), history, history_end, end, item.prefix)


@triton.jit
def _store_result(out, partial, lse, state, item, token, q_head, dims, SHAPE: tl.constexpr):
    """Writes rows of ``out`` if the tile is one item, else partial results."""
    Q_HEADS: tl.constexpr = SHAPE.Q_HEADS
    live = token < item.new
    dim = dims[0][None, :]
    wanted = live[:, None] & dims[1][None, :]
    total = tl.maximum(state.total, 1e-30)
    acc = state.acc * (1 / total)[:, None]
    if item.parts == 1:
        row = (item.start.to(tl.int64) + token) * Q_HEADS + q_head
        tl.store(out + row[:, None] * SHAPE.D + dim, to_bf16(acc), mask=wanted)
    else:  # the weight is 2^NEVER if a row saw nothing
        result = (item.begin + token * item.parts + item.part).to(tl.int64) * Q_HEADS + q_head  # [ROWS]
        tl.store(lse + result, state.top + tl.log2(total), mask=live)
        tl.store(partial + result[:, None] * SHAPE.D + dim, acc, mask=wanted)


@triton.jit
def _whole_keys(
    state, tile, token, pages, new, bf16_pages, bf16_page_slot, page_slot, dims, scale_log2,
    SHAPE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds BF16 keys and values: those of pages outside the history, then those of new tokens.

    One loop covers both, so that the compiler's copies ahead continue across the boundary. Each iteration loads KEYS
    keys and values, attends to them, and looks up a slot and a page for later iterations.
    """
    TILES: tl.constexpr = PAGE // KEYS
    dim = tl.arange(0, SHAPE.DP)
    inside = tile.live[:, None] & (dim < SHAPE.D)[None, :]
    queries = tl.load(tile.q + tile.row[:, None] + dim[None, :], mask=inside, other=0.0)  # [ROWS, DP]
    stored_pages = pages.end - pages.first - (pages.history_end - pages.history)
    stored = stored_pages * TILES
    # A page's slot is looked up two iterations ahead, its id three. Otherwise the compiler makes loads wait for their
    # dependencies.
    slot = tl.maximum(tl.load(page_slot + _page_id(pages, 0, stored_pages)), 0).to(tl.int64)
    next_slot = tl.load(page_slot + _page_id(pages, 1 // TILES, stored_pages))
    page = _page_id(pages, 2 // TILES, stored_pages)
    for step in tl.range(0, stored + (new.last - new.first) * TILES):
        keys, values, seen = _load_keys(
            step, stored_pages, slot * bf16_page_slot, token, pages, new, bf16_pages, dims, SHAPE, KEYS
        )
        state = attend(state, queries, keys, values, seen, scale_log2, ROWS, KEYS)
        state = settled(state)
        slot = tl.maximum(next_slot, 0).to(tl.int64)
        next_slot = tl.load(page_slot + page)
        page = _page_id(pages, (step + 3) // TILES, stored_pages)
    return state


@triton.jit
def _load_keys(
    step, stored_pages, bf16_page, token, pages, new, bf16_pages, dims, SHAPE: tl.constexpr, KEYS: tl.constexpr
):
    """Loads an iteration's keys [KEYS, DP] and values [KEYS, VP]; also returns which rows see them, [ROWS, KEYS].

    bf16_page: int64, start of the iteration's BF16 page in ``bf16_pages``.
    """
    TILES: tl.constexpr = PAGE // KEYS
    D: tl.constexpr = SHAPE.D
    HEADS_BYTES: tl.constexpr = SHAPE.KV_HEADS * PAGE * D
    n, dim = tl.arange(0, KEYS), tl.arange(0, SHAPE.DP)
    is_stored = step < stored_pages * TILES
    index = pages.first + step // TILES
    index += tl.where(index < pages.history, 0, pages.history_end - pages.history)
    in_page = (step - step // TILES * TILES) * KEYS
    bf16_page = bf16_pages + bf16_page + in_page * D
    key = tl.where(is_stored, index, new.first + step // TILES - stored_pages) * PAGE + in_page
    key_new = tl.where(is_stored, 0, key).to(tl.int64)
    k_base = tl.where(is_stored, bf16_page, new.k.data + key_new * new.k.token)
    v_base = tl.where(is_stored, bf16_page + HEADS_BYTES, new.v.data + key_new * new.v.token)
    k_stride, v_stride = tl.where(is_stored, D, new.k.token), tl.where(is_stored, D, new.v.token)
    # Rows beyond the last key load that key again: no query sees them, but they must be numbers.
    row = tl.minimum(n, tl.where(is_stored, pages.tokens, new.count) - key - 1)
    k_address = k_base + row[:, None] * k_stride + dim[None, :]
    v_address = v_base + row[:, None] * v_stride + dims[0][None, :]
    keys = tl.load(k_address) if SHAPE.DP == D else tl.load(k_address, mask=(dim < D)[None, :], other=0.0)
    if SHAPE.VP == SHAPE.DIMS:
        values = tl.load(v_address)
    else:
        values = tl.load(v_address, mask=dims[1][None, :], other=0.0)
    seen = n[None, :] < (tl.where(is_stored, pages.tokens, token + 1) - key)[:, None]
    return keys, values, seen


@triton.jit
def _page_id(pages, count, stored_pages):
    """Returns the id of the ``count``-th page outside the history, or of the last; any page's id, if there is none."""
    index = pages.first + tl.minimum(count, stored_pages - 1)
    index += tl.where(index < pages.history, 0, pages.history_end - pages.history)
    return page_of(pages.table, tl.where(stored_pages > 0, index, 0))
