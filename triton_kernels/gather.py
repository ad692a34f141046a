"""Stored pages back to contiguous BF16 keys and values, for prefill over a stored prefix.

k[place + t, h] = level * scale + offset (+ mean)   (a page of the history)   or its overlay's row t
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.codes import Record, level_of
from sglang_kvq.kernels.common import PAGE, key_row, page_of, to_bf16
from sglang_kvq.kernels.decode import is_two_bit
from sglang_kvq.kernels.gather_two_bits import from_two_bits, warps_for


def gather_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    plan: torch.Tensor,
    *,
    record: Record,
    records: torch.Tensor,
    overlays: torch.Tensor,
    page_slot: torch.Tensor,
    row_pages: torch.Tensor,
    row_sink_end: torch.Tensor,
    row_history_end: torch.Tensor,
) -> None:
    """Fill k, v BF16 ``[tokens, kv_heads, D]`` (contiguous) with pages of a batch.

    plan: int32 ``[n, 4]``, for each page the index into ``rows`` int64 ``[batch]``, the page's index in that
    request, the row of k and v that its first token goes to, and how many of its tokens are wanted; records
    (as ``record`` says) and overlays are one layer's, the tables ``PagePool``'s. A page without an overlay outside the
    history reads slot 0.
    """
    pages, kv_heads, d = plan.shape[0], k.shape[1], k.shape[2]
    fast = is_two_bit(record, d)
    _gather[(kv_heads, pages)](
        k, v, rows, plan,
        records, overlays, page_slot, row_pages, row_sink_end, row_history_end, row_pages.stride(0),
        RECORD=record,
        FAST=fast,
        D=d,
        DP=triton.next_power_of_2(d),
        JP=triton.next_power_of_2(d // 4),
        num_warps=warps_for(d) if fast else 4,
    )  # fmt: skip


@triton.jit
def _gather(
    k, v, rows, plan, records, overlays, page_slot, row_pages, row_sink_end, row_history_end, table_row,
    RECORD: tl.constexpr, FAST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """Program (h, n): page n of the plan, KV head h."""
    head, kv_heads = tl.program_id(0), tl.num_programs(0)
    n = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + tl.load(plan + 4 * n)).to(tl.int64)
    index = tl.load(plan + 4 * n + 1)
    place, count = tl.load(plan + 4 * n + 2).to(tl.int64), tl.load(plan + 4 * n + 3)
    page = page_of(row_pages + row * table_row, index)
    start = index * PAGE
    k += (place * kv_heads + head) * D
    v += (place * kv_heads + head) * D
    token_stride = kv_heads * D
    if (start >= tl.load(row_sink_end + row)) & (start < tl.load(row_history_end + row)):
        mine = records + (page * kv_heads + head) * RECORD.bytes
        if FAST:
            from_two_bits(k, v, count, kv_heads, mine, D, DP, RECORD.k.group)
        else:
            _from_record(k, v, token_stride, count, mine, RECORD, D, DP, JP)
    else:
        slot = tl.maximum(tl.load(page_slot + page), 0).to(tl.int64)
        overlay = overlays + (slot * 2 * kv_heads + head) * (PAGE * D)
        _copy(k, token_stride, count, overlay, D, DP)
        _copy(v, token_stride, count, overlay + kv_heads * (PAGE * D), D, DP)


@triton.jit
def _from_record(
    k, v, token_stride, count, record, RECORD: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, JP: tl.constexpr
):
    """Dequantize one record to the first ``count`` of PAGE rows of k and v."""
    KEYS: tl.constexpr = RECORD.k
    VALUES: tl.constexpr = RECORD.v
    D4: tl.constexpr = D // 4
    QUARTER: tl.constexpr = PAGE // 4

    token, j = tl.arange(0, PAGE)[:, None], tl.arange(0, JP)[None, :]
    low, high = packed(record, key_row(token), j, PAGE, D4, j < D4, KEYS)  # [PAGE, JP]
    for plane in tl.static_range(4):
        dim_k = plane * D4 + j
        if KEYS.channel:
            place = token // KEYS.group * D + dim_k
        else:
            place = dim_k // KEYS.group * PAGE + token
        x = dequantize(low, high, plane, record, place, dim_k, j < D4, KEYS)
        tl.store(k + token * token_stride + dim_k, x, mask=(j < D4) & (token < count))

    dim, i = tl.arange(0, DP)[:, None], tl.arange(0, QUARTER)[None, :]
    low, high = packed(record, dim, i, D, QUARTER, dim < D, VALUES)  # [DP, QUARTER]
    for plane in tl.static_range(4):
        token_v = plane * QUARTER + i
        y = dequantize(low, high, plane, record, dim // VALUES.group * PAGE + token_v, dim, dim < D, VALUES)
        tl.store(v + token_v * token_stride + dim, y, mask=(dim < D) & (token_v < count))


@triton.jit
def packed(record, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, mask, CODES: tl.constexpr):
    """Bytes (row, column) of both parts as int32; planes of the high one, if there is one, in its low bits."""
    low = tl.load(record + CODES.low + row * COLUMNS + column, mask=mask, other=0).to(tl.int32)
    high = low
    if CODES.bits == 4:
        high = tl.load(record + CODES.high + row * COLUMNS + column, mask=mask, other=0).to(tl.int32)
    elif CODES.bits == 3:
        HALF: tl.constexpr = ROWS // 2
        high = tl.load(record + CODES.high + row % HALF * COLUMNS + column, mask=mask, other=0).to(tl.int32)
        high = high >> (row // HALF * 4)
    return low, high


@triton.jit
def _copy(out, token_stride, count, rows, D: tl.constexpr, DP: tl.constexpr):
    """The first ``count`` of PAGE contiguous rows to rows ``token_stride`` apart."""
    dim = tl.arange(0, DP)[None, :]
    for first in tl.range(0, PAGE, 16):
        token = first + tl.arange(0, 16)[:, None]
        inside = (dim < D) & (token < count)
        tl.store(out + token * token_stride + dim, tl.load(rows + token * D + dim, mask=inside), mask=inside)


@triton.jit
def dequantize(low, high, plane: tl.constexpr, record, place, dim, mask, CODES: tl.constexpr):
    """BF16 values of one plane of packed codes; ``place`` is where each element's scale is among the scales."""
    code = (low >> (2 * plane)) & 3
    if CODES.bits == 4:
        code |= ((high >> (2 * plane)) & 3) << 2
    elif CODES.bits == 3:
        code |= ((high >> plane) & 1) << 2
    halves = record.to(tl.pointer_type(tl.float16)) + place
    scale = tl.load(halves + CODES.scale // 2, mask=mask, other=0.0).to(tl.float32)
    x = level_of(code, CODES).to(tl.float32)
    if CODES.has_offset:
        x = x * scale + tl.load(halves + CODES.offset // 2, mask=mask, other=0.0).to(tl.float32)
    else:
        x = (x - CODES.middle) * scale
    if CODES.centred:
        mean = record.to(tl.pointer_type(tl.float16)) + CODES.mean // 2 + dim
        x += tl.load(mean, mask=mask, other=0.0).to(tl.float32)
    return to_bf16(x)
