"""Whole BF16 pages to INT2 records: clip, min-max, round, pack. Bit for bit what formats/page.py gives.

One work item is ``TOKENS`` tokens of a page, one KV head, keys or values. Per token and group:

    threshold = rank-th largest |x|
    low, high = clamp(min x, +-threshold), clamp(max x, +-threshold)
    scale     = fp16((high - low) / 3), zero = fp16(low)
    code      = #{n in .5, 1.5, 2.5 : clamp(x, +-threshold) - zero > n scale}

The threshold is found by bisecting BF16 magnitudes, ordered like the integers of their bits, between the row's
largest and the least of its D/4 column maxima, which at least D/4 magnitudes reach: 8 or 9 steps on Gaussian
rows instead of 15. Values are not clamped: ``_bound`` moves what they are compared with instead.
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.quantise import FP16_MAX as _FP16_MAX
from sglang_kvq.formats.quantise import THIRD as _THIRD
from sglang_kvq.kernels.common import PAGE, key_row

FP16_MAX = tl.constexpr(_FP16_MAX)
THIRD = tl.constexpr(_THIRD)
#: Tokens of a work item: a multiple of 16, of which V's bytes take four from each quarter of the page.
TOKENS = tl.constexpr(16)
#: Work items of a page: its keys, then its values.
PARTS = tl.constexpr(2 * PAGE_SIZE // TOKENS.value)


def quantise_tokens(
    records: torch.Tensor,
    format: PageFormat,
    first: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Pages of activations, one layer.

    records: uint8 ``[pages + 1, kv_heads, record_bytes]``; rows ``first[i] .. first[i] + PAGE_SIZE`` of k, v
    BF16 ``[T, kv_heads, D]`` (last axis contiguous) become page ``pages[i]``'s record.
    """
    if first.numel() == 0:
        return
    grid = (first.numel() * k.shape[1] * PARTS.value,)
    strides = (*k.stride()[:2], *v.stride()[:2])
    _quantise_tokens[grid](records, first, pages, k, v, *strides, **_constants(format, k.shape[1]))


def quantise_slots(
    records: torch.Tensor,
    overlays: torch.Tensor,
    format: PageFormat,
    slots: torch.Tensor,
    pages: torch.Tensor,
    count: torch.Tensor,
    programs: int,
) -> None:
    """Overlays, all layers; ``count`` int64 ``[1]`` is only read on the device.

    records: uint8 ``[layers, pages + 1, kv_heads, record_bytes]``; overlays: BF16 ``[layers, slots + 1, 2,
    kv_heads, PAGE_SIZE, D]``. For i < count, overlay ``slots[i]`` becomes page ``pages[i]``'s record.
    """
    if slots.numel() == 0:
        return
    layers, kv_heads = records.shape[0], records.shape[2]
    grid = (min(programs, slots.numel() * layers * kv_heads * PARTS.value),)
    _quantise_slots[grid](
        records, overlays, slots, pages, count,
        records.stride(0), overlays.stride(0), layers,
        **_constants(format, kv_heads),
    )  # fmt: skip


def _constants(format: PageFormat, kv_heads: int) -> dict:
    return {
        "KV_HEADS": kv_heads,
        "D": format.head_dim,
        "GROUP": format.group_size,
        "RANK_K": format.rank_k,
        "RANK_V": format.rank_v,
        # Not computed in the kernel: SGLang replaces triton.next_power_of_2 by a function Triton cannot call there.
        "JP": triton.next_power_of_2(format.head_dim // 4),
        "enable_fp_fusion": False,  # torch rounds each operation
        "num_warps": max(1, triton.next_power_of_2(format.head_dim // 4) // 16),
    }


@triton.jit
def _quantise_tokens(
    records, first, pages, k, v, k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, RANK_K: tl.constexpr, RANK_V: tl.constexpr,
    JP: tl.constexpr,
):  # fmt: skip
    """Program p does item p: heads fastest, then parts, then pages."""
    head, part, index = _item(tl.program_id(0), KV_HEADS)
    token = tl.load(first + index).to(tl.int64)
    page = tl.load(pages + index).to(tl.int64)
    _quantise_part(
        k + token * k_token + head * k_head, k_token, v + token * v_token + head * v_head, v_token,
        records + (page * KV_HEADS + head) * _record_bytes(D, GROUP), part, D, GROUP, RANK_K, RANK_V, JP,
    )  # fmt: skip


@triton.jit
def _quantise_slots(
    records, overlays, slots, pages, count, record_layer, overlay_layer, layers,
    KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, RANK_K: tl.constexpr, RANK_V: tl.constexpr,
    JP: tl.constexpr,
):  # fmt: skip
    """Programs share the items of count * layers pages."""
    items = tl.load(count).to(tl.int32) * layers * (KV_HEADS * PARTS)
    mine = tl.program_id(0)
    for start in range(0, items - mine, tl.num_programs(0)):
        head, part, rest = _item(start + mine, KV_HEADS)
        layer, index = rest % layers, rest // layers
        slot = tl.load(slots + index).to(tl.int64)
        page = tl.load(pages + index).to(tl.int64)
        k = overlays + layer.to(tl.int64) * overlay_layer + (slot * 2 * KV_HEADS + head) * (PAGE * D)
        record = records + layer.to(tl.int64) * record_layer + (page * KV_HEADS + head) * _record_bytes(D, GROUP)
        _quantise_part(k, D, k + KV_HEADS * PAGE * D, D, record, part, D, GROUP, RANK_K, RANK_V, JP)


@triton.jit
def _item(item, KV_HEADS: tl.constexpr):
    """(head, part, page index) of an item."""
    return item % KV_HEADS, item // KV_HEADS % PARTS, item // (KV_HEADS * PARTS)


@triton.constexpr_function
def _record_bytes(d, group):
    return 2 * (PAGE_SIZE * d // 4) + 8 * PAGE_SIZE * (d // group)


@triton.jit
def _quantise_part(
    k, k_token, v, v_token, record, part,
    D: tl.constexpr, GROUP: tl.constexpr, RANK_K: tl.constexpr, RANK_V: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one page and head into its record: the first parts are of K, the others of V."""
    CODES: tl.constexpr = PAGE * D // 4
    SCALES: tl.constexpr = PAGE * (D // GROUP)
    scales = (record + 2 * CODES).to(tl.pointer_type(tl.float16))
    if part < PARTS // 2:
        _quantise_keys(k, k_token, record, scales, scales + SCALES, part, D, GROUP, RANK_K, JP)
    else:
        scales += 2 * SCALES
        _quantise_values(v, v_token, record + CODES, scales, scales + SCALES, part - PARTS // 2, D, GROUP, RANK_V, JP)


@triton.jit
def _quantise_keys(
    k, k_token, out, scale_out, zero_out, part,
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """Tokens part * TOKENS ..: a byte holds the four planes of one column."""
    token, plane, j = part * TOKENS + tl.arange(0, TOKENS), tl.arange(0, 4)[None, :, None], tl.arange(0, JP)
    codes = _quantise_rows(k, k_token, token, scale_out, zero_out, D, GROUP, RANK, JP)
    packed = tl.sum(codes * _power_of_4(plane), 1)  # [TOKENS, JP]
    packed = _integers(packed).to(tl.uint8)
    tl.store(out + key_row(token)[:, None] * (D // 4) + j[None, :], packed, mask=(j < D // 4)[None, :])


@triton.jit
def _quantise_values(
    v, v_token, out, scale_out, zero_out, part,
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """TOKENS / 16 words of each dim, in parts; row (word, i, n) is token n * PAGE/4 + 4 word + i: bits 2 n of byte i."""
    WORDS: tl.constexpr = TOKENS // 16
    row, j = tl.arange(0, TOKENS), tl.arange(0, JP)[None, None, :]
    n = row % 4
    token = n * (PAGE // 4) + part * (4 * WORDS) + row // 4
    codes = _quantise_rows(v, v_token, token, scale_out, zero_out, D, GROUP, RANK, JP)
    # Four neighbouring dims to a word, then the four n of each: one token i in each byte of [4 WORDS, 4, JP/4].
    codes *= _power_of_4(n)[:, None, None] * tl.where(j % 2 == 0, 1.0, 256.0)
    packed = _integers(tl.sum(tl.reshape(codes, [TOKENS, 4, JP // 2, 2]), 3)) & 0xFFFF
    packed = packed << (tl.arange(0, JP // 2) % 2 * 16)[None, None, :]
    packed = tl.sum(tl.reshape(packed, [TOKENS, 4, JP // 4, 2]), 3)
    packed = tl.sum(tl.reshape(packed, [TOKENS // 4, 4, 4, JP // 4]), 1)
    packed = packed[:, :, :, None] >> (tl.arange(0, 4) * 8)[None, None, None, :]
    packed = tl.reshape(packed, [TOKENS // 4, 4, JP]).to(tl.uint8)
    dim = tl.arange(0, 4)[None, :, None] * (D // 4) + j
    byte = part * (4 * WORDS) + tl.arange(0, TOKENS // 4)[:, None, None]
    tl.store(out + dim * (PAGE // 4) + byte, packed, mask=j < D // 4)


@triton.jit
def _power_of_4(n):
    """4^n, float32, for n in 0..3."""
    return ((n * 2 + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _integers(x):
    """Small whole numbers held in float32 as integers, in the low 16 bits."""
    return (x + 8388608.0).to(tl.int32, bitcast=True)


@triton.jit
def _quantise_rows(
    x, x_token, token, scale_out, zero_out,
    D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """Codes [TOKENS, 4, JP] of those tokens, as float32: (row, plane, j) is dim plane * D/4 + j.

    The compiler then spreads a warp over rows and keeps planes in registers: reductions cross few lanes.
    Scales and zeros, [D/GROUP, PAGE], are stored here.
    """
    D4: tl.constexpr = D // 4
    plane, j = tl.arange(0, 4)[None, :, None], tl.arange(0, JP)[None, None, :]
    place = token[:, None, None] * x_token + plane * D4 + j
    x = tl.load(x + place, mask=j < D4, other=0.0).to(tl.float32)
    if RANK > 0:
        limit = _threshold(x, RANK, D4, JP)  # [TOKENS]
    else:
        limit = tl.full([TOKENS], float("inf"), tl.float32)
    codes = tl.zeros([TOKENS, 4, JP], tl.float32)
    for g in tl.static_range(D // GROUP):
        if GROUP == D and JP == D4:
            low, high = tl.min(tl.min(x, 1), 1), tl.max(tl.max(x, 1), 1)  # [TOKENS]
        else:
            inside = (j < D4) & ((plane * D4 + j) // GROUP == g)
            low = tl.min(tl.min(tl.where(inside, x, float("inf")), 1), 1)
            high = tl.max(tl.max(tl.where(inside, x, float("-inf")), 1), 1)
        low = tl.minimum(tl.maximum(low, -limit), limit)
        high = tl.minimum(tl.maximum(high, -limit), limit)
        scale = tl.minimum((high - low) * THIRD, FP16_MAX).to(tl.float16)
        zero = tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX).to(tl.float16)
        tl.store(scale_out + g * PAGE + token, scale)
        tl.store(zero_out + g * PAGE + token, zero)
        zero, step = zero.to(tl.float32), scale.to(tl.float32)
        offset = x - zero[:, None, None]
        above = (offset > _bound(0.5 * step, zero, limit)[:, None, None]).to(tl.float32)
        above += (offset > _bound(1.5 * step, zero, limit)[:, None, None]).to(tl.float32)
        above += (offset > _bound(2.5 * step, zero, limit)[:, None, None]).to(tl.float32)
        if GROUP == D:
            codes = above
        else:
            codes = tl.where(inside, above, codes)
    return codes


@triton.jit
def _bound(bound, zero, limit):
    """What x - zero > it says of x without clamping x to +-limit first."""
    bound = tl.where(limit - zero > bound, bound, float("inf"))
    return tl.where(-limit - zero > bound, float("-inf"), bound)


@triton.jit
def _threshold(x, RANK: tl.constexpr, D4: tl.constexpr, JP: tl.constexpr):
    """Each row's RANK-th largest magnitude, float32 [TOKENS]; x float32 [TOKENS, 4, JP], BF16 values, padding 0."""
    columns = tl.maximum(tl.abs(tl.max(x, 1)), tl.abs(tl.min(x, 1)))  # [TOKENS, JP]
    most = tl.max(columns, 1).to(tl.int32, bitcast=True) >> 16
    if RANK <= D4:
        columns = tl.where((tl.arange(0, JP) < D4)[None, :], columns, float("inf"))
        least = tl.min(columns, 1).to(tl.int32, bitcast=True) >> 16
    else:
        least = tl.zeros_like(most)
    open = tl.max(most - least, 0)
    while open > 0:
        middle = (least + most + 1) >> 1
        bound = (middle << 16).to(tl.float32, bitcast=True)[:, None, None]
        count = tl.sum(tl.sum((tl.abs(x) >= bound).to(tl.float32), 1), 1)
        least = tl.where(count >= RANK, middle, least)
        most = tl.where(count >= RANK, most, tl.maximum(middle - 1, least))
        open = open >> 1
    return (least << 16).to(tl.float32, bitcast=True)
