"""Quantization of whole BF16 pages to records: clip, scale, round, pack. Codes equal formats/page.py's bit for bit.

A work item is ``TOKENS`` tokens of a page, one KV head, keys or values. For keys with a scale per channel, it is all
tokens and a quarter of the channels. If keys are centred, every item computes the means of all tokens itself.
``device.rows`` has the arithmetic.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.kernels.device.arguments import view
from sglang_kvq.kernels.device.bf16_pairs import high_half, low_half, magnitudes, pair_max
from sglang_kvq.kernels.device.codes import PlaneRecord, Record, page_bytes
from sglang_kvq.kernels.device.common import PAGE, has_pairs, key_row
from sglang_kvq.kernels.device.launch import Constants, start_kernel
from sglang_kvq.kernels.device.plane_codes import is_planes
from sglang_kvq.kernels.device.rows import (
    clip_threshold,
    from_extremes,
    from_sums,
    integers,
    plane_codes,
    powers,
    scale_offset,
    threshold,
    to_half,
)
from sglang_kvq.kernels.device.shape import shape_of
from sglang_kvq.kernels.quantize.quantize_planes import quantize_plane_keys, quantize_plane_values

#: Tokens of a work item: a multiple of 16, because V's bytes take equally many from each quarter of the page.
TOKENS = tl.constexpr(16)
#: Work items of a page: its keys, then its values.
PARTS = tl.constexpr(2 * PAGE_SIZE // TOKENS.value)


def quantize_tokens(
    records: torch.Tensor,
    record: Record | PlaneRecord,
    ranks: torch.Tensor,
    first: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Quantizes pages of activations, one layer.

    records: uint8 ``[pages + 1, kv_heads, record.bytes]``; ranks: int32 ``[2]``, the layer's clip ranks of K and V;
    rows ``first[i] .. first[i] + PAGE_SIZE`` of k, v BF16 ``[T, kv_heads, D]`` (last axis contiguous, the others'
    strides even) become page ``pages[i]``'s record.
    """
    if first.numel() == 0:
        return
    kv_heads, d = k.shape[1:]
    grid = (first.numel() * kv_heads * PARTS.value,)
    constants = _constants(record, kv_heads, d, k.device)
    start_kernel(_quantize_tokens, grid, records, ranks, first, pages, view(k), view(v), constants=constants)


def quantize_slots(
    records: torch.Tensor,
    record: Record | PlaneRecord,
    layers: torch.Tensor,
    ranks: torch.Tensor,
    bf16_pages: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    count: torch.Tensor,
    programs: int,
) -> None:
    """Quantizes BF16 pages of the layers of one store; ``count`` int64 ``[1]`` is only read on the device.

    records: uint8 ``[n, pages + 1, kv_heads, record.bytes]`` of layers ``layers`` int64 ``[n]``; ranks: int32
    ``[all layers, 2]``; bf16_pages: BF16 ``[all layers, slots + 1, 2, kv_heads, PAGE_SIZE, D]``. For i < count, the
    BF16 copy in ``slots[i]`` becomes page ``pages[i]``'s record.
    """
    if slots.numel() == 0:
        return
    n, kv_heads = records.shape[0], records.shape[2]
    grid = (min(programs, slots.numel() * n * kv_heads * PARTS.value),)
    start_kernel(
        _quantize_slots, grid, records, layers, ranks, bf16_pages, slots, pages, count,
        records.stride(0), bf16_pages.stride(0), bf16_pages.stride(1), n,
        constants=_constants(record, kv_heads, bf16_pages.shape[-1], bf16_pages.device),
    )  # fmt: skip


@cache
def _constants(record: Record | PlaneRecord, kv_heads: int, d: int, device: torch.device) -> Constants:
    return Constants(
        RECORD=record,
        SHAPE=shape_of(kv_heads, d),
        # Fusion is off because torch rounds each operation; with planes, no fusible operation rounds.
        enable_fp_fusion=is_planes(record),
        PACKED=has_pairs(device),
        # 64 elements per lane, or 32 if all of them are in float32 at once
        num_warps=max(d // 128, 1 if is_planes(record) else 1 + record.k.centred),
    )


@triton.jit(do_not_specialize_on_alignment=["ranks", "first", "pages"])
def _quantize_tokens(
    records, ranks, first, pages, k, v, RECORD: tl.constexpr, SHAPE: tl.constexpr, PACKED: tl.constexpr
):
    """Program p quantizes item p; heads vary fastest, then parts, then pages."""
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    head, part, index = _item(tl.program_id(0), KV_HEADS)
    token = tl.load(first + index).to(tl.int64)
    page = tl.load(pages + index).to(tl.int64)
    k_rows, v_rows = k.data + token * k.token + head * k.head, v.data + token * v.token + head * v.head
    record = records + page * page_bytes(RECORD, KV_HEADS) + head * RECORD.bytes
    _quantize_part(k_rows, k.token, v_rows, v.token, record, ranks, part, RECORD, SHAPE, PACKED)


@triton.jit(do_not_specialize_on_alignment=["layer_ids", "ranks", "slots", "pages", "count"])
def _quantize_slots(
    records, layer_ids, ranks, bf16_pages, slots, pages, count, record_layer, bf16_page_layer, bf16_page_slot, layers,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Divides the items of count * layers pages among the programs."""
    D: tl.constexpr = SHAPE.D
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    items = tl.load(count).to(tl.int32) * layers * (KV_HEADS * PARTS)
    mine = tl.program_id(0)
    for start in range(0, items - mine, tl.num_programs(0)):
        head, part, rest = _item(start + mine, KV_HEADS)
        nth, index = rest % layers, rest // layers
        layer = tl.load(layer_ids + nth)
        slot = tl.load(slots + index).to(tl.int64)
        page = tl.load(pages + index).to(tl.int64)
        k = bf16_pages + layer * bf16_page_layer + slot * bf16_page_slot + head * (PAGE * D)
        record = records + nth.to(tl.int64) * record_layer + page * page_bytes(RECORD, KV_HEADS) + head * RECORD.bytes
        _quantize_part(k, D, k + KV_HEADS * PAGE * D, D, record, ranks + 2 * layer, part, RECORD, SHAPE, PACKED)


@triton.jit
def _item(item, KV_HEADS: tl.constexpr):
    """Returns (head, part, page index) of an item."""
    return item % KV_HEADS, item // KV_HEADS % PARTS, item // (KV_HEADS * PARTS)


@triton.jit
def _quantize_part(
    k, k_token, v, v_token, record, ranks, part, RECORD: tl.constexpr, SHAPE: tl.constexpr, PACKED: tl.constexpr
):
    """Quantizes one item of a page and head into its record: the first parts are of K, the others of V."""
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    if is_planes(RECORD):
        if part < PARTS // 2:
            quantize_plane_keys(k, k_token, record, part, KEYS, SHAPE, TOKENS, PACKED)
        else:
            quantize_plane_values(v, v_token, record, part - PARTS // 2, VALUES, SHAPE, TOKENS, PACKED)
    elif part < PARTS // 2:
        if KEYS.channel:
            _quantize_channels(k, k_token, record, part, KEYS, SHAPE)
        else:
            _quantize_keys(k, k_token, record, ranks, part, KEYS, SHAPE, PACKED)
    else:
        _quantize_values(v, v_token, record, ranks + 1, part - PARTS // 2, VALUES, SHAPE, PACKED)


@triton.jit
def _quantize_keys(k, k_token, record, rank, part, CODES: tl.constexpr, SHAPE: tl.constexpr, PACKED: tl.constexpr):
    """Quantizes TOKENS tokens of keys: a byte holds the four planes of one column.

    Tokens are consecutive, except that with 3 bits, half of them are the others' counterparts in the second half of the
    page.
    """
    HALF: tl.constexpr = TOKENS // 2
    N: tl.constexpr = SHAPE.WORDS
    i, n = tl.arange(0, TOKENS), tl.arange(0, N)[None, :]
    token = _key_token(i, part, CODES)
    means = None
    if CODES.centred:
        means = _channel_means(k, k_token, record, part, CODES, SHAPE, PACKED)
    x = _load_rows(k, k_token, token, SHAPE)
    p0, p1, p2, p3 = _row_codes(x, means, token, record, rank, CODES, SHAPE, PACKED)
    inside = 2 * n < SHAPE.D4
    low = _low(p0, CODES) + (_low(p1, CODES) << 2) + (_low(p2, CODES) << 4) + (_low(p3, CODES) << 6)
    pairs = record.to(tl.pointer_type(tl.uint16))  # of bytes
    row = key_row(token)[:, None] * (SHAPE.D4 // 2)
    tl.store(pairs + row + n + CODES.low // 2, _two_bytes(low), mask=inside)
    if CODES.bits == 4:
        high = _high(p0) + (_high(p1) << 2) + (_high(p2) << 4) + (_high(p3) << 6)
        tl.store(pairs + row + n + CODES.high // 2, _two_bytes(high), mask=inside)
    elif CODES.bits == 3:
        high = _high(p0) + (_high(p1) << 1) + (_high(p2) << 2) + (_high(p3) << 3)
        high = tl.sum(tl.reshape(high << (i // HALF * 4)[:, None], [2, HALF, N]), 0)
        row = key_row(part * HALF + tl.arange(0, HALF))[:, None] * (SHAPE.D4 // 2)
        tl.store(pairs + row + n + CODES.high // 2, _two_bytes(high), mask=inside)


@triton.jit
def _key_token(i, part, CODES: tl.constexpr):
    """Returns the token of the page that is the i-th of the part."""
    HALF: tl.constexpr = TOKENS // 2
    if CODES.bits == 3:
        return i // HALF * (PAGE // 2) + part * HALF + i % HALF
    else:
        return part * TOKENS + i


@triton.jit
def _load_rows(x, x_token, token, SHAPE: tl.constexpr):
    """Loads the four planes of the tokens' rows, see ``device.rows``; 0 beyond a row's end."""
    p0 = _load_plane(x, x_token, token, 0, SHAPE)
    p1 = _load_plane(x, x_token, token, 1, SHAPE)
    p2 = _load_plane(x, x_token, token, 2, SHAPE)
    p3 = _load_plane(x, x_token, token, 3, SHAPE)
    return p0, p1, p2, p3


@triton.jit
def _load_plane(x, x_token, token, plane: tl.constexpr, SHAPE: tl.constexpr):
    n = tl.arange(0, SHAPE.WORDS)[None, :]
    words = (x + (token * x_token + plane * SHAPE.D4)[:, None]).to(tl.pointer_type(tl.int32)) + n
    if 2 * SHAPE.WORDS == SHAPE.D4:
        return tl.load(words)
    else:
        return tl.load(words, mask=2 * n < SHAPE.D4, other=0)


@triton.jit
def _channel_means(k, k_token, record, part, CODES: tl.constexpr, SHAPE: tl.constexpr, PACKED: tl.constexpr):
    """Returns the page's mean of every channel, in the form of ``rows.halves``; the first part stores them.

    Tokens are read twice, TOKENS at a time; the second time they come from a cache.
    """
    low0, high0 = _plane_means(k, k_token, record, part, 0, CODES, SHAPE, PACKED)
    low1, high1 = _plane_means(k, k_token, record, part, 1, CODES, SHAPE, PACKED)
    low2, high2 = _plane_means(k, k_token, record, part, 2, CODES, SHAPE, PACKED)
    low3, high3 = _plane_means(k, k_token, record, part, 3, CODES, SHAPE, PACKED)
    return low0, high0, low1, high1, low2, high2, low3, high3


@triton.jit
def _plane_means(
    k, k_token, record, part, plane: tl.constexpr, CODES: tl.constexpr, SHAPE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = SHAPE.WORDS
    i, n = tl.arange(0, TOKENS), tl.arange(0, N)
    most = tl.zeros([TOKENS, N], tl.int32)
    for start in tl.static_range(0, PAGE, TOKENS):
        most = pair_max(most, magnitudes(_load_plane(k, k_token, i + start, plane, SHAPE)), PACKED)
    up_low, down_low = powers(tl.max(low_half(most), 0))
    up_high, down_high = powers(tl.max(high_half(most), 0))
    low, high = tl.zeros([TOKENS, N], tl.int32), tl.zeros([TOKENS, N], tl.int32)
    for start in tl.static_range(0, PAGE, TOKENS):
        x = _load_plane(k, k_token, i + start, plane, SHAPE)
        low += integers(low_half(x), up_low[None, :])
        high += integers(high_half(x), up_high[None, :])
    low = to_half(tl.sum(low, 0).to(tl.float32) * (1 / PAGE) * down_low)
    high = to_half(tl.sum(high, 0).to(tl.float32) * (1 / PAGE) * down_high)
    if part == 0:
        means = record.to(tl.pointer_type(tl.float16)) + (CODES.mean // 2 + plane * SHAPE.D4) + 2 * n
        tl.store(means, low, mask=2 * n < SHAPE.D4)
        tl.store(means + 1, high, mask=2 * n < SHAPE.D4)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _quantize_values(v, v_token, record, rank, part, CODES: tl.constexpr, SHAPE: tl.constexpr, PACKED: tl.constexpr):
    """Quantizes TOKENS tokens' values, TOKENS / 4 bytes per dim: row (n, i) is the token in plane n of byte i."""
    BYTES: tl.constexpr = TOKENS // 4
    row = tl.arange(0, TOKENS)
    token = row // BYTES * (PAGE // 4) + part * BYTES + row % BYTES
    x = _load_rows(v, v_token, token, SHAPE)
    p0, p1, p2, p3 = _row_codes(x, None, token, record, rank, CODES, SHAPE, PACKED)
    record += part * BYTES
    _store_values(_low(p0, CODES) + (_low(p1, CODES) << 8), 2, record + CODES.low, 0, SHAPE)
    _store_values(_low(p2, CODES) + (_low(p3, CODES) << 8), 2, record + CODES.low, 2, SHAPE)
    if CODES.bits == 4:
        _store_values(_high(p0) + (_high(p1) << 8), 2, record + CODES.high, 0, SHAPE)
        _store_values(_high(p2) + (_high(p3) << 8), 2, record + CODES.high, 2, SHAPE)
    elif CODES.bits == 3:  # dims of planes 2 and 3 are D/2 behind those of 0 and 1
        high = _high(p0) + (_high(p1) << 8) + (_high(p2) << 4) + (_high(p3) << 12)
        _store_values(high, 1, record + CODES.high, 0, SHAPE)


@triton.jit
def _store_values(codes, WIDTH: tl.constexpr, out, plane: tl.constexpr, SHAPE: tl.constexpr):
    """Joins codes of four tokens, WIDTH bits each, to bytes, and stores the dims of ``plane`` and the next plane.

    codes: [TOKENS, WORDS]. A word has four codes of one token: two dims of the plane in bytes 0 and 2, two of the next
    plane in bytes 1 and 3.
    """
    N: tl.constexpr = SHAPE.WORDS
    n = tl.arange(0, TOKENS) // (TOKENS // 4)
    codes = tl.sum(tl.reshape(codes << (n * WIDTH)[:, None], [4, TOKENS // 4, N]), 0)
    byte = tl.arange(0, 4)[None, None, :]
    codes = (codes[:, :, None] >> (byte * 8)).to(tl.uint8)  # [TOKENS / 4, N, 4]
    j = 2 * tl.arange(0, N)[None, :, None] + byte // 2
    dim = (plane + byte % 2) * SHAPE.D4 + j
    address = out + dim * (PAGE // 4) + tl.arange(0, TOKENS // 4)[:, None, None]
    tl.store(address, codes, mask=j < SHAPE.D4)


@triton.jit
def _low(codes, CODES: tl.constexpr):
    """Returns the two lower bits of the codes in a word's halves."""
    return codes if CODES.bits == 2 else codes & 0x30003


@triton.jit
def _high(codes):
    """Returns the bits above those of ``_low``."""
    return (codes >> 2) & 0x30003


@triton.jit
def _two_bytes(word):
    """Returns the lower bytes of a word's halves, uint16."""
    return (word | (word >> 8)).to(tl.uint16)


@triton.jit
def _row_codes(x, means, token, record, rank, CODES: tl.constexpr, SHAPE: tl.constexpr, PACKED: tl.constexpr):
    """Returns the four planes' codes, see ``rows.plane_codes``; stores scales and offsets, [D / group, PAGE].

    rank points at the clip rank.
    """
    D4: tl.constexpr = SHAPE.D4
    N: tl.constexpr = SHAPE.WORDS
    limit = tl.full([TOKENS], float("inf"), tl.float32)
    if CODES.clips:
        rank = tl.load(rank)
        if rank > 0:
            limit = clip_threshold(x, rank, D4, PACKED)
    halves = record.to(tl.pointer_type(tl.float16)) + token
    p0 = tl.zeros([TOKENS, N], tl.int32)
    p1, p2, p3 = p0, p0, p0
    GROUPS: tl.constexpr = SHAPE.D // CODES.group
    for g in tl.static_range(GROUPS):
        scale, offset = scale_offset(x, means, limit, g, CODES, D4, PACKED)
        tl.store(halves + CODES.scale // 2 + g * PAGE, scale)
        if CODES.has_offset:
            tl.store(halves + CODES.offset // 2 + g * PAGE, offset)
        p0 = plane_codes(p0, x, means, scale, offset, limit, 0, g, CODES, D4, PACKED)
        p1 = plane_codes(p1, x, means, scale, offset, limit, 1, g, CODES, D4, PACKED)
        p2 = plane_codes(p2, x, means, scale, offset, limit, 2, g, CODES, D4, PACKED)
        p3 = plane_codes(p3, x, means, scale, offset, limit, 3, g, CODES, D4, PACKED)
    return p0, p1, p2, p3


@triton.jit
def _quantize_channels(k, k_token, record, part, CODES: tl.constexpr, SHAPE: tl.constexpr):
    """Quantizes all tokens of columns part * D/16 .. of each plane.

    Row (run, plane, column) is a channel's tokens of one run.
    """
    D4: tl.constexpr = SHAPE.D4
    CP: tl.constexpr = SHAPE.CP
    RUN: tl.constexpr = CODES.group
    RUNS: tl.constexpr = CODES.runs
    COLUMNS: tl.constexpr = D4 // (PARTS // 2)
    row, i = tl.arange(0, RUNS * 4 * CP), tl.arange(0, RUN)
    run, column = row // (4 * CP), row % CP
    live = column < COLUMNS
    dim = row // CP % 4 * D4 + part * COLUMNS + column
    token = run[:, None] * RUN + i[None, :]
    x = tl.load(k + token * k_token + dim[:, None], mask=live[:, None], other=0.0).to(tl.float32)  # [rows, RUN]
    if CODES.statistic == "minmax":
        scale, offset = from_extremes(tl.min(x, 1), tl.max(x, 1), 0.0, CODES)
    else:
        up, down = powers(tl.max(tl.abs(x), 1))
        q = integers(x, up[:, None])
        scale, offset = from_sums(tl.sum(q, 1), tl.sum(q * q, 1), down, CODES)
    halves = record.to(tl.pointer_type(tl.float16)) + run * SHAPE.D + dim
    tl.store(halves + CODES.scale // 2, scale, mask=live)
    tl.store(halves + CODES.offset // 2, offset, mask=live)
    codes = tl.zeros(x.shape, tl.int32)
    step, start = scale.to(tl.float32), offset.to(tl.float32)
    THRESHOLDS: tl.constexpr = CODES.thresholds
    for n in tl.static_range(THRESHOLDS):
        codes += (x > threshold(step, start, 0.0, n, CODES)[:, None]).to(tl.int32)
    plane, c = tl.arange(0, 4)[None, :, None, None], tl.arange(0, CP)[:, None]
    live = c < COLUMNS
    address = record + part * COLUMNS + c + key_row(tl.arange(0, PAGE))[None, :] * D4  # [CP, PAGE]
    tl.store(address + CODES.low, _pack_channels(codes & 3, 2 * plane, RUNS, CP, RUN), mask=live)
    if CODES.bits == 4:
        tl.store(address + CODES.high, _pack_channels(codes >> 2, 2 * plane, RUNS, CP, RUN), mask=live)
    elif CODES.bits == 3:
        packed = tl.reshape(_pack_channels(codes >> 2, plane, RUNS, CP, RUN), [CP, 2, PAGE // 2])
        packed = tl.sum(packed.to(tl.int32) << (tl.arange(0, 2) * 4)[None, :, None], 1)
        address = record + part * COLUMNS + c + key_row(tl.arange(0, PAGE // 2))[None, :] * D4
        tl.store(address + CODES.high, packed.to(tl.uint8), mask=live)


@triton.jit
def _pack_channels(codes, shift, RUNS: tl.constexpr, CP: tl.constexpr, RUN: tl.constexpr):
    """Packs [RUNS * 4 * CP, RUN] into the four planes' bytes, uint8 [CP, PAGE]."""
    packed = tl.sum(tl.reshape(codes, [RUNS, 4, CP, RUN]) << shift, 1)
    return tl.reshape(tl.permute(packed.to(tl.uint8), (1, 0, 2)), [CP, RUNS * RUN])
