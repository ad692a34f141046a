"""Copies chosen tokens from some pages to others in stored form; each layer and KV head has its own choice.

    target[l, h, j] = source[l, h, tokens[l, h, j]]        codes, scales and offsets, or gains; nothing is quantized
    again

A token's row of K consists of whole bytes, or of halves or quarters of bytes. A byte of V may hold bits of two or four
tokens, too. Such bytes are reassembled in registers. Loads of V are single bytes, as far apart as the tokens. With
ascending choices, most of these loads hit the L1 cache.
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.device.codes import PlaneRecord, Record, page_bytes
from sglang_kvq.kernels.device.common import PAGE, key_row
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.plane_codes import bits_of, cell_count, is_planes, shares_of, start_of
from sglang_kvq.kernels.device.shape import shape_of


def fold_pages(
    records: torch.Tensor,
    record: Record | PlaneRecord,
    layer_ids: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    tokens: torch.Tensor,
    head_dim: int,
) -> None:
    """Fills ``target_pages`` int64 ``[m]`` of one store with tokens of other pages, ``source_pages`` int64 ``[n]``.

    records: uint8 ``[layers of the store, pages + 1, kv_heads, record.bytes]``; layer_ids: int64, these layers'
    indices in tokens; tokens: int64 ``[layers, kv_heads, m * PAGE]``, contiguous, all from 0 to ``n * PAGE - 1``.
    """
    layers, _, kv_heads, _ = records.shape
    start_kernel(
        _fold, (len(target_pages), kv_heads, layers),
        records, layer_ids, source_pages, target_pages, tokens, records.stride(0),
        RECORD=record,
        SHAPE=shape_of(kv_heads, head_dim),
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["layer_ids", "source_pages", "target_pages", "tokens"])
def _fold(
    records, layer_ids, source_pages, target_pages, tokens, record_layer, RECORD: tl.constexpr, SHAPE: tl.constexpr
):
    """Program (n, h, l): target page n of KV head h of the store's layer l. record_layer: bytes from layer to layer."""
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    n, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    records += layer * record_layer + head * RECORD.bytes
    step = tl.full([], page_bytes(RECORD, SHAPE.KV_HEADS), tl.int64)  # from page to page
    chosen = tokens + ((tl.load(layer_ids + layer) * heads + head) * tl.num_programs(0) + n) * PAGE
    out = records + tl.load(target_pages + n) * step
    if is_planes(RECORD):
        _key_cells(out, records, step, source_pages, chosen, KEYS, SHAPE)
        _value_cells(out, records, step, source_pages, chosen, VALUES, SHAPE)
        _gains(out, records, step, source_pages, chosen, KEYS.gains)
        _gains(out, records, step, source_pages, chosen, VALUES.gains)
    else:
        _keys(out, records, step, source_pages, chosen, KEYS, SHAPE)
        _values(out, records, step, source_pages, chosen, VALUES, SHAPE)
        # K's scales and offsets, then V's, fill the rest of the record.
        _scales(out, records, step, source_pages, chosen, KEYS.scale, (RECORD.bytes - KEYS.scale) // (2 * PAGE))


@triton.jit
def _keys(out, records, step, source_pages, chosen, CODES: tl.constexpr, SHAPE: tl.constexpr):
    _key_bytes(out, records, step, source_pages, chosen, CODES.low, SHAPE)
    if CODES.bits == 4:
        _key_bytes(out, records, step, source_pages, chosen, CODES.high, SHAPE)
    elif CODES.bits == 3:
        _shared_key_bytes(out, records, step, source_pages, chosen, CODES.high, 4, SHAPE)


@triton.jit
def _key_cells(out, records, step, source_pages, chosen, CODES: tl.constexpr, SHAPE: tl.constexpr):
    for c in tl.static_range(cell_count(CODES)):
        if shares_of(CODES, c) == 1:
            _key_bytes(out, records, step, source_pages, chosen, start_of(CODES, c), SHAPE)
        else:
            _shared_key_bytes(out, records, step, source_pages, chosen, start_of(CODES, c), bits_of(CODES, c), SHAPE)


@triton.jit
def _values(out, records, step, source_pages, chosen, CODES: tl.constexpr, SHAPE: tl.constexpr):
    _value_pairs(out, records, step, source_pages, chosen, CODES.low, SHAPE)
    if CODES.bits == 4:
        _value_pairs(out, records, step, source_pages, chosen, CODES.high, SHAPE)
    elif CODES.bits == 3:
        _value_bits(out, records, step, source_pages, chosen, CODES.high, SHAPE)


@triton.jit
def _value_cells(out, records, step, source_pages, chosen, CODES: tl.constexpr, SHAPE: tl.constexpr):
    for c in tl.static_range(cell_count(CODES)):
        _value_cell(out, records, step, source_pages, chosen, start_of(CODES, c), bits_of(CODES, c), SHAPE)


@triton.jit
def _source(source_pages, chosen, token):
    """Returns the source page, int64, and position in it, int32, of the target's ``token``."""
    index = tl.load(chosen + token)
    return tl.load(source_pages + index // PAGE), (index % PAGE).to(tl.int32)


@triton.jit
def _key_bytes(out, records, step, source_pages, chosen, START: tl.constexpr, SHAPE: tl.constexpr):
    """Moves rows of D / 4 bytes at START, [PAGE, D / 4], as words."""
    WORDS: tl.constexpr = SHAPE.D4 // 4
    token, word = tl.arange(0, PAGE)[:, None], tl.arange(0, SHAPE.DP // 16)[None, :]
    page, place = _source(source_pages, chosen, token)
    inside = word < WORDS
    row = (records + page * step + START).to(tl.pointer_type(tl.int32)) + key_row(place) * WORDS
    x = tl.load(row + word, mask=inside)
    tl.store((out + START).to(tl.pointer_type(tl.int32)) + key_row(token) * WORDS + word, x, mask=inside)


@triton.jit
def _shared_key_bytes(
    out, records, step, source_pages, chosen, START: tl.constexpr, BITS: tl.constexpr, SHAPE: tl.constexpr
):
    """Moves rows, BITS per column, at START, [ROWS, D / 4]: byte row r has rows r, r + ROWS, ..., lowest bits first."""
    WORDS: tl.constexpr = SHAPE.D4 // 4
    ROWS: tl.constexpr = PAGE * BITS // 8
    WIDTH: tl.constexpr = SHAPE.DP // 16
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x01010101
    row, word = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = word < WORDS
    token = row // 16 * 16 + row % 8 * 2 + row % 16 // 8  # key_row(token) == row
    x = tl.zeros([ROWS, WIDTH], tl.int32)
    for share in tl.static_range(8 // BITS):
        page, place = _source(source_pages, chosen, token + share * ROWS)
        old = key_row(place)
        words = (records + page * step + START).to(tl.pointer_type(tl.int32)) + old % ROWS * WORDS
        bits = (tl.load(words + word, mask=inside, other=0) >> (old // ROWS * BITS)) & MASK
        x |= bits << (share * BITS)
    tl.store((out + START).to(tl.pointer_type(tl.int32)) + row * WORDS + word, x, mask=inside)


@triton.jit
def _value_pairs(out, records, step, source_pages, chosen, START: tl.constexpr, SHAPE: tl.constexpr):
    """Moves two bits of each element at START, [D, PAGE / 4]: a byte has tokens i, i + 16, i + 32, i + 48 of a dim."""
    DIMS: tl.constexpr = SHAPE.DP
    dim, i = tl.arange(0, DIMS)[:, None], tl.arange(0, PAGE // 4)[None, :]
    inside = dim < SHAPE.D
    x = tl.zeros([DIMS, PAGE // 4], tl.int32)
    for plane in tl.static_range(4):
        byte, old = _value_byte(records, step, source_pages, chosen, plane * (PAGE // 4) + i, dim, inside, START)
        x |= ((byte >> (2 * old)) & 3) << (2 * plane)
    tl.store(out + START + dim * (PAGE // 4) + i, x.to(tl.uint8), mask=inside)


@triton.jit
def _value_bits(out, records, step, source_pages, chosen, START: tl.constexpr, SHAPE: tl.constexpr):
    """Moves one bit of each element at START, [D / 2, PAGE / 4]; a byte's upper four bits are of dims D / 2 on."""
    DIMS: tl.constexpr = SHAPE.DP // 2
    dim, i = tl.arange(0, DIMS)[:, None], tl.arange(0, PAGE // 4)[None, :]
    inside = dim < SHAPE.D // 2
    x = tl.zeros([DIMS, PAGE // 4], tl.int32)
    for plane in tl.static_range(4):
        byte, old = _value_byte(records, step, source_pages, chosen, plane * (PAGE // 4) + i, dim, inside, START)
        x |= ((byte >> old) & 0x11) << plane
    tl.store(out + START + dim * (PAGE // 4) + i, x.to(tl.uint8), mask=inside)


@triton.jit
def _value_byte(records, step, source_pages, chosen, token, dim, inside, START: tl.constexpr):
    """Loads the byte of a token's dim in rows of PAGE / 4 at START, int32; also returns its index among four tokens."""
    page, place = _source(source_pages, chosen, token)
    address = records + page * step + START + dim * (PAGE // 4) + place % (PAGE // 4)
    return tl.load(address, mask=inside, other=0).to(tl.int32), place // (PAGE // 4)


@triton.jit
def _value_cell(out, records, step, source_pages, chosen, START: tl.constexpr, BITS: tl.constexpr, SHAPE: tl.constexpr):
    """Moves a cell of BITS, at most 8, per column and token at START, [QUARTERS, D / 4, PAGE / 4]."""
    D4: tl.constexpr = SHAPE.D4
    COLUMNS: tl.constexpr = SHAPE.JP
    QUARTER: tl.constexpr = PAGE // 4
    QUARTERS: tl.constexpr = BITS // 2
    column, i = tl.arange(0, COLUMNS)[:, None], tl.arange(0, QUARTER)[None, :]
    inside = column < D4
    for t in tl.static_range(QUARTERS):
        x = tl.zeros([COLUMNS, QUARTER], tl.int32)
        for share in tl.static_range(8 // BITS):
            page, place = _source(source_pages, chosen, (t + QUARTERS * share) * QUARTER + i)
            old = (place // QUARTER % QUARTERS * D4 + column) * QUARTER + place % QUARTER
            byte = tl.load(records + page * step + START + old, mask=inside, other=0).to(tl.int32)
            x |= ((byte >> (place // (QUARTER * QUARTERS) * BITS)) & ((1 << BITS) - 1)) << (share * BITS)
        tl.store(out + START + (t * D4 + column) * QUARTER + i, x.to(tl.uint8), mask=inside)


@triton.jit
def _scales(out, records, step, source_pages, chosen, START: tl.constexpr, ROWS: tl.constexpr):
    """Moves rows of PAGE FP16 numbers at START."""
    token = tl.arange(0, PAGE)
    page, place = _source(source_pages, chosen, token)
    old = (records + page * step + START).to(tl.pointer_type(tl.int16)) + place
    new = (out + START).to(tl.pointer_type(tl.int16)) + token
    for row in range(ROWS):
        tl.store(new + row * PAGE, tl.load(old + row * PAGE))


@triton.jit
def _gains(out, records, step, source_pages, chosen, START: tl.constexpr):
    """Moves a byte for each token at START."""
    token = tl.arange(0, PAGE)
    page, place = _source(source_pages, chosen, token)
    tl.store(out + START + token, tl.load(records + page * step + START + place))
