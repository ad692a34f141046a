"""Dequantization of stored pages to contiguous BF16 keys and values, for prefill over a stored prefix.

k[first + t, h] = level * scale + offset (+ mean), or level * gain (a page of the history)   or its BF16 copy's row t
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.decode.decode_attention import is_two_bit
from sglang_kvq.kernels.device.arguments import Stored, field_count, load_fields
from sglang_kvq.kernels.device.codes import PlaneRecord, Record, level_of, page_bytes
from sglang_kvq.kernels.device.common import PAGE, key_row, page_of, to_bf16
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.plane_codes import is_planes
from sglang_kvq.kernels.device.shape import shape_of
from sglang_kvq.kernels.extend.gather_planes import from_planes
from sglang_kvq.kernels.extend.gather_two_bits import from_two_bits, warps_for


class PageRead(NamedTuple):
    """A page to read: four int32 fields, in this order.

    Attributes:
        request: index in the batch; index: the page's index in that request.
        first: the row of k and v for its first token.
        count: how many of its tokens to read.
    """

    request: int
    index: int
    first: int
    count: int


FIELDS = field_count(PageRead)


def gather_pages(
    k: torch.Tensor,
    v: torch.Tensor | None,
    rows: torch.Tensor,
    plan: torch.Tensor,
    record: Record | PlaneRecord,
    stored: Stored,
) -> None:
    """Fills k, v BF16 ``[tokens, kv_heads, D]`` (contiguous) with pages of a batch.

    plan: int32 ``[n, 4]``, a ``PageRead`` each; rows: int64 ``[batch]``; record, stored: of one layer. A page
    outside the history that has no BF16 copy is read from slot 0. v: None for keys alone.
    """
    kv_heads, d = k.shape[1:]
    fast = is_two_bit(record, d)
    start_kernel(
        _gather, (kv_heads, len(plan)),
        k, k if v is None else v, rows, plan, stored,
        RECORD=record,
        SHAPE=shape_of(kv_heads, d),
        FAST=fast,
        VALUES=v is not None,
        num_warps=warps_for(d) if fast or isinstance(record, PlaneRecord) else 4,
    )  # fmt: skip


@triton.jit
def _gather(
    k, v, rows, plan, stored,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Program (h, n): page n of the plan, KV head h, from its record or its BF16 copy."""
    D: tl.constexpr = SHAPE.D
    head, kv_heads = tl.program_id(0), tl.num_programs(0)
    read = PageRead(*load_fields(plan + tl.program_id(1).to(tl.int64) * FIELDS, FIELDS))
    if read.count == 0:  # a CUDA graph has reads to spare
        return
    row = tl.load(rows + read.request).to(tl.int64)
    page = page_of(stored.row_pages + row * stored.pages_row, read.index)
    start = read.index * PAGE
    first = read.first.to(tl.int64)
    k += (first * kv_heads + head) * D
    v += (first * kv_heads + head) * D
    token_stride = kv_heads * D
    if (start >= tl.load(stored.row_sink_end + row)) & (start < tl.load(stored.row_history_end + row)):
        record = stored.records + page * page_bytes(RECORD, SHAPE.KV_HEADS) + head * RECORD.bytes
        read_record(k, v, read.count, kv_heads, record, RECORD, SHAPE, FAST, VALUES)
    else:
        slot = tl.maximum(tl.load(stored.page_slot + page), 0).to(tl.int64)
        bf16_page = stored.bf16_pages + slot * stored.slot + head * (PAGE * D)
        _copy(k, read.count, token_stride, bf16_page, SHAPE)
        if VALUES:
            _copy(v, read.count, token_stride, bf16_page + kv_heads * (PAGE * D), SHAPE)


@triton.jit
def read_record(
    k, v, count, kv_heads, record, RECORD: tl.constexpr, SHAPE: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr
):
    """Dequantizes one record of any kind to the first ``count`` of PAGE rows of k, and of v if VALUES.

    k, v: BF16 ``[PAGE, kv_heads, D]``, at this head. Records of planes, and FAST, need ``warps_for`` warps.
    """
    if is_planes(RECORD):
        from_planes(k, v, count, kv_heads, record, RECORD, SHAPE, VALUES)
    elif FAST:
        from_two_bits(k, v, count, kv_heads, record, RECORD, SHAPE, VALUES)
    else:
        _from_record(k, v, count, kv_heads * SHAPE.D, record, RECORD, SHAPE, VALUES)


@triton.jit
def _from_record(k, v, count, token_stride, record, RECORD: tl.constexpr, SHAPE: tl.constexpr, VALUES: tl.constexpr):
    """Dequantizes one record to the first ``count`` of PAGE rows of k and v, ``token_stride`` apart."""
    K_CODES: tl.constexpr = RECORD.k
    V_CODES: tl.constexpr = RECORD.v
    D: tl.constexpr = SHAPE.D
    D4: tl.constexpr = SHAPE.D4
    QUARTER: tl.constexpr = PAGE // 4

    token, j = tl.arange(0, PAGE)[:, None], tl.arange(0, SHAPE.JP)[None, :]
    low, high = packed(record, key_row(token), j, PAGE, D4, j < D4, K_CODES)  # [PAGE, JP]
    for plane in tl.static_range(4):
        dim_k = plane * D4 + j
        x = dequantize(low, high, plane, record, key_scale(token, dim_k, D, K_CODES), dim_k, j < D4, K_CODES)
        tl.store(k + token * token_stride + dim_k, x, mask=(j < D4) & (token < count))

    if VALUES:
        dim, i = tl.arange(0, SHAPE.DP)[:, None], tl.arange(0, QUARTER)[None, :]
        low, high = packed(record, dim, i, D, QUARTER, dim < D, V_CODES)  # [DP, QUARTER]
        for plane in tl.static_range(4):
            token_v = plane * QUARTER + i
            y = dequantize(low, high, plane, record, dim // V_CODES.group * PAGE + token_v, dim, dim < D, V_CODES)
            tl.store(v + token_v * token_stride + dim, y, mask=(dim < D) & (token_v < count))


@triton.jit
def key_scale(token, dim, D: tl.constexpr, CODES: tl.constexpr):
    """Returns the index of an element's scale among K's scales."""
    if CODES.channel:
        return token // CODES.group * D + dim
    else:
        return dim // CODES.group * PAGE + token


@triton.jit
def packed(record, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, mask, CODES: tl.constexpr):
    """Loads bytes (row, column) of both parts as int32; the high part's planes, if any, are in its low bits."""
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
def _copy(out, count, token_stride, rows, SHAPE: tl.constexpr):
    """Copies the first ``count`` of PAGE contiguous rows to rows ``token_stride`` apart."""
    D: tl.constexpr = SHAPE.D
    dim = tl.arange(0, SHAPE.DP)[None, :]
    for first in tl.range(0, PAGE, 16):
        token = first + tl.arange(0, 16)[:, None]
        inside = (dim < D) & (token < count)
        tl.store(out + token * token_stride + dim, tl.load(rows + token * D + dim, mask=inside), mask=inside)


@triton.jit
def dequantize(low, high, plane: tl.constexpr, record, at, dim, mask, CODES: tl.constexpr):
    """Returns BF16 values of one plane of packed codes; ``at`` is the index of each element's scale."""
    code = (low >> (2 * plane)) & 3
    if CODES.bits == 4:
        code |= ((high >> (2 * plane)) & 3) << 2
    elif CODES.bits == 3:
        code |= ((high >> plane) & 1) << 2
    halves = record.to(tl.pointer_type(tl.float16)) + at
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
