"""Whole BF16 pages to records: clip, scale, round, pack. Bit for bit what formats/page.py gives.

One work item is ``TOKENS`` tokens of a page, one KV head, keys or values; of keys with a scale per channel, all tokens
and a quarter of the channels. Where keys are centred, every item finds the means of all tokens itself. The arithmetic is
in ``rows``.
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.kernels.codes import Record
from sglang_kvq.kernels.common import PAGE, key_row
from sglang_kvq.kernels.rows import FP16_MAX, clip_threshold, integers, powers, row_codes, scale_zero

#: Tokens of a work item: a multiple of 16, of which V's bytes take four from each quarter of the page.
TOKENS = tl.constexpr(16)
#: Work items of a page: its keys, then its values.
PARTS = tl.constexpr(2 * PAGE_SIZE // TOKENS.value)


def quantise_tokens(
    records: torch.Tensor,
    record: Record,
    ranks: torch.Tensor,
    first: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Pages of activations, one layer.

    records: uint8 ``[pages + 1, kv_heads, record.bytes]``; ranks: int32 ``[2]``, the layer's clip ranks of K and V;
    rows ``first[i] .. first[i] + PAGE_SIZE`` of k, v BF16 ``[T, kv_heads, D]`` (last axis contiguous) become page
    ``pages[i]``'s record.
    """
    if first.numel() == 0:
        return
    kv_heads, d = k.shape[1:]
    grid = (first.numel() * kv_heads * PARTS.value,)
    strides = (*k.stride()[:2], *v.stride()[:2])
    _quantise_tokens[grid](records, ranks, first, pages, k, v, *strides, **_constants(record, kv_heads, d))


def quantise_slots(
    records: torch.Tensor,
    record: Record,
    layers: torch.Tensor,
    ranks: torch.Tensor,
    overlays: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    count: torch.Tensor,
    programs: int,
) -> None:
    """Overlays of the layers of one store; ``count`` int64 ``[1]`` is only read on the device.

    records: uint8 ``[n, pages + 1, kv_heads, record.bytes]`` of layers ``layers`` int64 ``[n]``; ranks: int32 ``[all
    layers, 2]``; overlays: BF16 ``[all layers, slots + 1, 2, kv_heads, PAGE_SIZE, D]``. For i < count, overlay
    ``slots[i]`` becomes page ``pages[i]``'s record.
    """
    if slots.numel() == 0:
        return
    n, kv_heads = records.shape[0], records.shape[2]
    grid = (min(programs, slots.numel() * n * kv_heads * PARTS.value),)
    _quantise_slots[grid](
        records, layers, ranks, overlays, slots, pages, count,
        records.stride(0), overlays.stride(0), n,
        **_constants(record, kv_heads, overlays.shape[-1]),
    )  # fmt: skip


def _constants(record: Record, kv_heads: int, d: int) -> dict:
    # Not computed in the kernel: SGLang replaces triton.next_power_of_2 by a function Triton cannot call there.
    return {
        "RECORD": record,
        "KV_HEADS": kv_heads,
        "D": d,
        "JP": triton.next_power_of_2(d // 4),
        "CP": triton.next_power_of_2(d // 4 // (PARTS.value // 2)),
        "enable_fp_fusion": False,  # torch rounds each operation
        "num_warps": max(1, triton.next_power_of_2(d // 4) // 16),
    }


@triton.jit
def _quantise_tokens(
    records, ranks, first, pages, k, v, k_token, k_head, v_token, v_head,
    RECORD: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, JP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Program p does item p: heads fastest, then parts, then pages."""
    head, part, index = _item(tl.program_id(0), KV_HEADS)
    token = tl.load(first + index).to(tl.int64)
    page = tl.load(pages + index).to(tl.int64)
    _quantise_part(
        k + token * k_token + head * k_head, k_token, v + token * v_token + head * v_head, v_token,
        records + (page * KV_HEADS + head) * RECORD.bytes, ranks, part, RECORD, D, JP, CP,
    )  # fmt: skip


@triton.jit
def _quantise_slots(
    records, layer_ids, ranks, overlays, slots, pages, count, record_layer, overlay_layer, layers,
    RECORD: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, JP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """Programs share the items of count * layers pages."""
    items = tl.load(count).to(tl.int32) * layers * (KV_HEADS * PARTS)
    mine = tl.program_id(0)
    for start in range(0, items - mine, tl.num_programs(0)):
        head, part, rest = _item(start + mine, KV_HEADS)
        nth, index = rest % layers, rest // layers
        layer = tl.load(layer_ids + nth)
        slot = tl.load(slots + index).to(tl.int64)
        page = tl.load(pages + index).to(tl.int64)
        k = overlays + layer * overlay_layer + (slot * 2 * KV_HEADS + head) * (PAGE * D)
        record = records + nth.to(tl.int64) * record_layer + (page * KV_HEADS + head) * RECORD.bytes
        _quantise_part(k, D, k + KV_HEADS * PAGE * D, D, record, ranks + 2 * layer, part, RECORD, D, JP, CP)


@triton.jit
def _item(item, KV_HEADS: tl.constexpr):
    """(head, part, page index) of an item."""
    return item % KV_HEADS, item // KV_HEADS % PARTS, item // (KV_HEADS * PARTS)


@triton.jit
def _quantise_part(
    k, k_token, v, v_token, record, ranks, part,
    RECORD: tl.constexpr, D: tl.constexpr, JP: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """One item of a page and head into its record: the first parts are of K, the others of V."""
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    if part < PARTS // 2:
        if KEYS.channel:
            _quantise_channels(k, k_token, record, part, KEYS, D, CP)
        else:
            _quantise_keys(k, k_token, record, ranks, part, KEYS, D, JP)
    else:
        _quantise_values(v, v_token, record, ranks + 1, part - PARTS // 2, VALUES, D, JP)


@triton.jit
def _quantise_keys(k, k_token, record, rank, part, CODES: tl.constexpr, D: tl.constexpr, JP: tl.constexpr):
    """TOKENS tokens: a byte holds the four planes of one column.

    They are consecutive, but with 3 bits half of them are the others' counterparts in the second half of the page.
    """
    HALF: tl.constexpr = TOKENS // 2
    i, plane, j = tl.arange(0, TOKENS), tl.arange(0, 4)[None, :, None], tl.arange(0, JP)
    token = _key_token(i, part, CODES)
    mean = tl.zeros([4, JP], tl.float32)
    if CODES.centred:
        halves = _channel_means(k, k_token, D, JP)
        mean = halves.to(tl.float32)
        if part == 0:
            place = record.to(tl.pointer_type(tl.float16)) + CODES.mean // 2
            place += tl.arange(0, 4)[:, None] * (D // 4) + j[None, :]
            tl.store(place, halves, mask=(j < D // 4)[None, :])
    x = _load_rows(k, k_token, _key_token(tl.arange(0, 4 * TOKENS) % TOKENS, part, CODES), D, JP)
    codes, high = _quantise_rows(x, token, mean, record, rank, CODES, D, JP)
    place = key_row(token)[:, None] * (D // 4) + j[None, :]
    inside = (j < D // 4)[None, :]
    if CODES.bits > 2:
        codes -= 4.0 * high
    packed = tl.sum(codes * _power_of_4(plane), 1)  # [TOKENS, JP]
    tl.store(record + CODES.low + place, _integers(packed).to(tl.uint8), mask=inside)
    if CODES.bits == 4:
        packed = tl.sum(high * _power_of_4(plane), 1)
        tl.store(record + CODES.high + place, _integers(packed).to(tl.uint8), mask=inside)
    elif CODES.bits == 3:
        packed = tl.sum(high * _power_of_2(plane + i[:, None, None] // HALF * 4), 1)
        packed = tl.sum(tl.reshape(packed, [2, HALF, JP]), 0)
        place = key_row(part * HALF + tl.arange(0, HALF))[:, None] * (D // 4) + j[None, :]
        tl.store(record + CODES.high + place, _integers(packed).to(tl.uint8), mask=inside)


@triton.jit
def _key_token(i, part, CODES: tl.constexpr):
    """Token of its page that is the i-th of that part."""
    HALF: tl.constexpr = TOKENS // 2
    if CODES.bits == 3:
        return i // HALF * (PAGE // 2) + part * HALF + i % HALF
    else:
        return part * TOKENS + i


@triton.jit
def _value_token(i, part):
    """Token of its page that is the i-th of that part: plane i % 4 of byte i / 4."""
    return i % 4 * (PAGE // 4) + part * (TOKENS // 4) + i // 4


@triton.jit
def _load_rows(x, x_token, token, D: tl.constexpr, JP: tl.constexpr):
    """float32 [TOKENS, 4, JP], (row, plane, j) is dim plane * D/4 + j; token [4 TOKENS]: the rows' tokens, four times.

    Loaded with all planes' rows side by side, a thread gets all four planes of its rows, whatever the compiler prefers,
    so that reductions cross few lanes.
    """
    D4: tl.constexpr = D // 4
    plane, j = tl.arange(0, 4 * TOKENS) // TOKENS, tl.arange(0, JP)[None, :]
    place = (token * x_token + plane * D4)[:, None] + j
    x = tl.load(x + place, mask=(j < D4) & (plane >= 0)[:, None], other=0.0).to(tl.float32)
    return tl.permute(tl.reshape(x, [4, TOKENS, JP]), (1, 0, 2))


@triton.jit
def _channel_means(k, k_token, D: tl.constexpr, JP: tl.constexpr):
    """The page's mean of every channel, FP16 [4, JP]: (plane, j) is dim plane * D/4 + j.

    Tokens are read twice, a work item's at a time, the second time from a cache.
    """
    i = tl.arange(0, 4 * TOKENS) % TOKENS
    most = tl.zeros([TOKENS, 4, JP], tl.float32)
    for n in tl.static_range(PAGE // TOKENS):
        most = tl.maximum(most, tl.abs(_load_rows(k, k_token, i + n * TOKENS, D, JP)))
    up, down = powers(tl.max(most, 0))
    first = tl.zeros([TOKENS, 4, JP], tl.int32)
    for n in tl.static_range(PAGE // TOKENS):
        first += integers(_load_rows(k, k_token, i + n * TOKENS, D, JP), up[None, :, :])
    mean = tl.sum(first, 0).to(tl.float32) * (1 / PAGE) * down
    return tl.minimum(tl.maximum(mean, -FP16_MAX), FP16_MAX).to(tl.float16)


@triton.jit
def _quantise_channels(k, k_token, record, part, CODES: tl.constexpr, D: tl.constexpr, CP: tl.constexpr):
    """All tokens of columns part * D/16 .. of each plane; row (run, plane, column) is a channel's tokens of one run."""
    RUN: tl.constexpr = CODES.group
    RUNS: tl.constexpr = CODES.runs
    COLUMNS: tl.constexpr = D // 4 // (PARTS // 2)
    row, i = tl.arange(0, RUNS * 4 * CP), tl.arange(0, RUN)
    run, column = row // (4 * CP), row % CP
    live = column < COLUMNS
    dim = row // CP % 4 * (D // 4) + part * COLUMNS + column
    token = run[:, None, None] * RUN + i[None, None, :]
    x = tl.load(k + token * k_token + dim[:, None, None], mask=live[:, None, None], other=0.0)  # [rows, 1, RUN]
    x = x.to(tl.float32)
    scale, zero = scale_zero(x, True, 0.0, CODES, True)
    place = record.to(tl.pointer_type(tl.float16)) + run * D + dim
    tl.store(place + CODES.scale // 2, scale, mask=live)
    tl.store(place + CODES.zero // 2, zero, mask=live)
    codes, high = row_codes(x, scale, zero, 0.0, CODES)
    if CODES.bits > 2:
        codes -= 4.0 * high
    plane, c = tl.arange(0, 4)[None, :, None, None], tl.arange(0, CP)[:, None]
    live = c < COLUMNS
    place = record + part * COLUMNS + c + key_row(tl.arange(0, PAGE))[None, :] * (D // 4)  # [CP, PAGE]
    tl.store(place + CODES.low, _pack_channels(codes, _power_of_4(plane), RUNS, CP, RUN), mask=live)
    if CODES.bits == 4:
        tl.store(place + CODES.high, _pack_channels(high, _power_of_4(plane), RUNS, CP, RUN), mask=live)
    elif CODES.bits == 3:
        packed = tl.reshape(_pack_channels(high, _power_of_2(plane), RUNS, CP, RUN), [CP, 2, PAGE // 2])
        packed = tl.sum(packed.to(tl.int32) << (tl.arange(0, 2) * 4)[None, :, None], 1)
        place = record + part * COLUMNS + c + key_row(tl.arange(0, PAGE // 2))[None, :] * (D // 4)
        tl.store(place + CODES.high, packed.to(tl.uint8), mask=live)


@triton.jit
def _pack_channels(codes, weight, RUNS: tl.constexpr, CP: tl.constexpr, RUN: tl.constexpr):
    """[RUNS * 4 * CP, 1, RUN] to the four planes' bytes, uint8 [CP, PAGE]."""
    packed = tl.sum(tl.reshape(codes, [RUNS, 4, CP, RUN]) * weight, 1)
    return tl.reshape(tl.permute(_integers(packed).to(tl.uint8), (1, 0, 2)), [CP, RUNS * RUN])


@triton.jit
def _quantise_values(v, v_token, record, rank, part, CODES: tl.constexpr, D: tl.constexpr, JP: tl.constexpr):
    """TOKENS / 16 words of each dim, in parts; row (word, i, n) is token n * PAGE/4 + 4 word + i: plane n of byte i."""
    row = tl.arange(0, TOKENS)
    n = row % 4
    x = _load_rows(v, v_token, _value_token(tl.arange(0, 4 * TOKENS) % TOKENS, part), D, JP)
    mean = tl.zeros([4, JP], tl.float32)
    codes, high = _quantise_rows(x, _value_token(row, part), mean, record, rank, CODES, D, JP)
    if CODES.bits > 2:
        codes -= 4.0 * high
    _pack_values(codes, _power_of_4(n), record + CODES.low, part, 4, D, JP)
    if CODES.bits == 4:
        _pack_values(high, _power_of_4(n), record + CODES.high, part, 4, D, JP)
    elif CODES.bits == 3:  # dims of planes 2 and 3 are D/2 behind those of 0 and 1
        high = tl.reshape(high, [TOKENS, 2, 2, JP]) * tl.where(tl.arange(0, 2) == 1, 16.0, 1.0)[None, :, None, None]
        _pack_values(tl.sum(high, 1), _power_of_2(n), record + CODES.high, part, 2, D, JP)


@triton.jit
def _pack_values(codes, weight, out, part, PLANES: tl.constexpr, D: tl.constexpr, JP: tl.constexpr):
    """Store [TOKENS, PLANES, JP]: byte i of dim (plane, j) is the sum over n of codes times weight [TOKENS]."""
    j = tl.arange(0, JP)[None, None, :]
    # Four neighbouring dims to a word, then the four n of each: one token i in each byte of [4 WORDS, PLANES, JP/4].
    codes *= weight[:, None, None] * tl.where(j % 2 == 0, 1.0, 256.0)
    packed = _integers(tl.sum(tl.reshape(codes, [TOKENS, PLANES, JP // 2, 2]), 3)) & 0xFFFF
    packed = packed << (tl.arange(0, JP // 2) % 2 * 16)[None, None, :]
    packed = tl.sum(tl.reshape(packed, [TOKENS, PLANES, JP // 4, 2]), 3)
    packed = tl.sum(tl.reshape(packed, [TOKENS // 4, 4, PLANES, JP // 4]), 1)
    packed = packed[:, :, :, None] >> (tl.arange(0, 4) * 8)[None, None, None, :]
    packed = tl.reshape(packed, [TOKENS // 4, PLANES, JP]).to(tl.uint8)
    dim = tl.arange(0, PLANES)[None, :, None] * (D // 4) + j
    byte = part * (TOKENS // 4) + tl.arange(0, TOKENS // 4)[:, None, None]
    tl.store(out + dim * (PAGE // 4) + byte, packed, mask=j < D // 4)


@triton.jit
def _power_of_4(n):
    """4^n, float32, for n in 0..3."""
    return _power_of_2(n * 2)


@triton.jit
def _power_of_2(n):
    """2^n, float32."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _integers(x):
    """Small whole numbers held in float32 as integers, in the low 16 bits."""
    return (x + 8388608.0).to(tl.int32, bitcast=True)


@triton.jit
def _quantise_rows(x, token, mean, record, rank, CODES: tl.constexpr, D: tl.constexpr, JP: tl.constexpr):
    """Codes [TOKENS, 4, JP] of x, those tokens as ``_load_rows`` gives them, see ``row_codes``.

    mean: float32 [4, JP], taken off first if they are centred. Scales and zeros, [D / group, PAGE], are stored here;
    rank points at the clip rank.
    """
    D4: tl.constexpr = D // 4
    GROUP: tl.constexpr = CODES.group
    ALL: tl.constexpr = GROUP == D and JP == D4
    plane, j = tl.arange(0, 4)[None, :, None], tl.arange(0, JP)[None, None, :]
    if CODES.centred:
        x -= mean[None, :, :]
    limit = tl.full([TOKENS], float("inf"), tl.float32)
    if CODES.clips:
        rank = tl.load(rank)
        if rank > 0:
            limit = clip_threshold(x, rank, D4, JP)
    halves = record.to(tl.pointer_type(tl.float16)) + token
    codes = tl.zeros([TOKENS, 4, JP], tl.float32)
    high = codes
    for g in tl.static_range(D // GROUP):
        inside = (j < D4) & ((plane * D4 + j) // GROUP == g)
        scale, zero = scale_zero(x, inside, limit, CODES, ALL)
        tl.store(halves + CODES.scale // 2 + g * PAGE, scale)
        if CODES.has_zero:
            tl.store(halves + CODES.zero // 2 + g * PAGE, zero)
        these, these_high = row_codes(x, scale, zero, limit, CODES)
        if GROUP == D:
            codes, high = these, these_high
        else:
            codes = tl.where(inside, these, codes)
            high = tl.where(inside, these_high, high)
    return codes, high
