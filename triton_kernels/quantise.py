"""Whole BF16 pages to INT2 records: clip, min-max, round, pack. Bit for bit what formats/page.py gives.

One work item is a page of one KV head. Per token and tensor:

    threshold = rank-th largest |x|, found by bisecting the 15 bits of a BF16 magnitude
    x         = clamp(x, -threshold, threshold)
    per group: scale = fp16((max - min) / 3), zero = fp16(min), code = #{n in .5, 1.5, 2.5 : x - zero > n scale}
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.quantise import FP16_MAX as _FP16_MAX
from sglang_kvq.formats.quantise import THIRD as _THIRD
from sglang_kvq.kernels.common import PAGE

FP16_MAX = tl.constexpr(_FP16_MAX)
THIRD = tl.constexpr(_THIRD)


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
    grid = (first.numel(), k.shape[1])
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
    grid = (min(programs, slots.numel() * layers * kv_heads),)
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
        "DP": triton.next_power_of_2(format.head_dim),
        "enable_fp_fusion": False,  # torch rounds each operation
        "num_warps": 4 if format.head_dim <= 128 else 8,
    }


@triton.jit
def _quantise_tokens(
    records, first, pages, k, v, k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, RANK_K: tl.constexpr, RANK_V: tl.constexpr,
    JP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (i, h): page pages[i] of KV head h."""
    head = tl.program_id(1)
    token = tl.load(first + tl.program_id(0)).to(tl.int64)
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    RECORD: tl.constexpr = 2 * (PAGE * D // 4) + 8 * PAGE * (D // GROUP)
    _quantise_page(
        k + token * k_token + head * k_head, k_token, v + token * v_token + head * v_head, v_token,
        records + (page * KV_HEADS + head) * RECORD, D, GROUP, RANK_K, RANK_V, JP, DP,
    )  # fmt: skip


@triton.jit
def _quantise_slots(
    records, overlays, slots, pages, count, record_layer, overlay_layer, layers,
    KV_HEADS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, RANK_K: tl.constexpr, RANK_V: tl.constexpr,
    JP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Programs share the count * layers * KV_HEADS items, heads fastest."""
    RECORD: tl.constexpr = 2 * (PAGE * D // 4) + 8 * PAGE * (D // GROUP)
    items = tl.load(count).to(tl.int32) * layers * KV_HEADS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head, rest = item % KV_HEADS, item // KV_HEADS
        layer, index = rest % layers, rest // layers
        slot = tl.load(slots + index).to(tl.int64)
        page = tl.load(pages + index).to(tl.int64)
        k = overlays + layer.to(tl.int64) * overlay_layer + (slot * 2 * KV_HEADS + head) * (PAGE * D)
        record = records + layer.to(tl.int64) * record_layer + (page * KV_HEADS + head) * RECORD
        _quantise_page(k, D, k + KV_HEADS * PAGE * D, D, record, D, GROUP, RANK_K, RANK_V, JP, DP)


@triton.jit
def _quantise_page(
    k, k_token, v, v_token, record,
    D: tl.constexpr, GROUP: tl.constexpr, RANK_K: tl.constexpr, RANK_V: tl.constexpr,
    JP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """One page of one head into its record: K codes, V codes transposed, then scales and zeros."""
    CODES: tl.constexpr = PAGE * D // 4
    SCALES: tl.constexpr = PAGE * (D // GROUP)
    scales = (record + 2 * CODES).to(tl.pointer_type(tl.float16))

    # Keys: column c * JP + j is dim c * D/4 + j, so that a byte's four codes lie JP columns apart.
    column = tl.arange(0, 4 * JP)
    dim = column // JP * (D // 4) + column % JP
    codes = _quantise_rows(k, k_token, dim, column % JP < D // 4, scales, scales + SCALES, D, GROUP, RANK_K)
    codes = codes << column // JP * 2
    packed = tl.sum(tl.reshape(codes, [PAGE, 4, JP]), 1).to(tl.uint8)  # [PAGE, JP]
    token, j = tl.arange(0, PAGE)[:, None], tl.arange(0, JP)[None, :]
    tl.store(record + token * (D // 4) + j, packed, mask=j < D // 4)

    dim = tl.arange(0, DP)
    codes = _quantise_rows(v, v_token, dim, dim < D, scales + 2 * SCALES, scales + 3 * SCALES, D, GROUP, RANK_V)
    codes = codes << (tl.arange(0, PAGE) // (PAGE // 4) * 2)[:, None]
    packed = tl.sum(tl.reshape(codes, [4, PAGE // 4, DP]), 0).to(tl.uint8)  # [PAGE/4, DP]
    i = tl.arange(0, PAGE // 4)[:, None]
    tl.store(record + CODES + dim[None, :] * (PAGE // 4) + i, packed, mask=(dim < D)[None, :])


@triton.jit
def _quantise_rows(
    x, x_token, dim, real, scale_out, zero_out, D: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr
):
    """Codes int32 [PAGE, columns] of a page's rows; column n is dim[n], padding where not real[n].

    Scales and zeros, [D/GROUP, PAGE], are stored here.
    """
    token = tl.arange(0, PAGE)
    raw = tl.load(x + token[:, None] * x_token + dim[None, :], mask=real[None, :], other=0.0)
    x = raw.to(tl.float32)
    if RANK > 0:
        bits = raw.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF  # ordered like |x|
        bits = tl.where(real[None, :], bits, -1)
        found = tl.zeros([PAGE], tl.int32)
        for bit in tl.static_range(14, -1, -1):
            larger = found | (1 << bit)
            count = tl.sum((bits >= larger[:, None]).to(tl.int32), 1)
            found = tl.where(count >= RANK, larger, found)
        threshold = (found << 16).to(tl.float32, bitcast=True)[:, None]
        x = tl.minimum(tl.maximum(x, -threshold), threshold)
    codes = tl.zeros(x.shape, tl.int32)
    for g in tl.static_range(D // GROUP):
        inside = (real & (dim // GROUP == g))[None, :]
        low = tl.min(tl.where(inside, x, float("inf")), 1)
        high = tl.max(tl.where(inside, x, float("-inf")), 1)
        scale = tl.minimum((high - low) * THIRD, FP16_MAX).to(tl.float16)
        zero = tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX).to(tl.float16)
        tl.store(scale_out + g * PAGE + token, scale)
        tl.store(zero_out + g * PAGE + token, zero)
        offset, step = x - zero.to(tl.float32)[:, None], scale.to(tl.float32)[:, None]
        above = (offset > 0.5 * step).to(tl.int32)
        above += (offset > 1.5 * step).to(tl.int32)
        above += (offset > 2.5 * step).to(tl.int32)
        codes = tl.where(inside, above, codes)
    return codes
