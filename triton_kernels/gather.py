"""Stored pages back to contiguous BF16 keys and values, for prefill over a stored prefix.

    k[place + t, h] = code * scale + zero   (a page of the history)   or its overlay's row t
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.formats.page import PageFormat
from sglang_kvq.kernels.common import PAGE, key_row, page_of, to_bf16


def gather_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    plan: torch.Tensor,
    *,
    format: PageFormat,
    records: torch.Tensor,
    overlays: torch.Tensor,
    page_slot: torch.Tensor,
    req_to_token: torch.Tensor,
    row_sink_end: torch.Tensor,
    row_history_end: torch.Tensor,
) -> None:
    """Fill k, v BF16 ``[tokens, kv_heads, D]`` (contiguous) with pages of a batch.

    plan: int32 ``[n, 4]``, for each page the index into ``rows`` int64 ``[batch]``, the page's index in that
    request, the row of k and v that its first token goes to, and how many of its tokens are wanted; records
    and overlays are one layer's, the tables ``PagePool``'s. A page without an overlay outside the history
    reads slot 0.
    """
    pages, kv_heads, d = plan.shape[0], k.shape[1], k.shape[2]
    _gather[(kv_heads, pages)](
        k, v, rows, plan,
        records, overlays, page_slot, req_to_token, row_sink_end, row_history_end, req_to_token.stride(0),
        D=d,
        DP=triton.next_power_of_2(d),
        JP=triton.next_power_of_2(d // 4),
        GROUP=format.group_size,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _gather(
    k, v, rows, plan, records, overlays, page_slot, req_to_token, row_sink_end, row_history_end, table_row,
    D: tl.constexpr, DP: tl.constexpr, JP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (h, n): page n of the plan, KV head h."""
    head, kv_heads = tl.program_id(0), tl.num_programs(0)
    n = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + tl.load(plan + 4 * n)).to(tl.int64)
    index = tl.load(plan + 4 * n + 1)
    place, count = tl.load(plan + 4 * n + 2).to(tl.int64), tl.load(plan + 4 * n + 3)
    page = page_of(req_to_token + row * table_row, index)
    start = index * PAGE
    k += (place * kv_heads + head) * D
    v += (place * kv_heads + head) * D
    token_stride = kv_heads * D
    if (start >= tl.load(row_sink_end + row)) & (start < tl.load(row_history_end + row)):
        RECORD: tl.constexpr = 2 * (PAGE * D // 4) + 8 * PAGE * (D // GROUP)
        _from_record(k, v, token_stride, count, records + (page * kv_heads + head) * RECORD, D, DP, JP, GROUP)
    else:
        slot = tl.maximum(tl.load(page_slot + page), 0).to(tl.int64)
        overlay = overlays + (slot * 2 * kv_heads + head) * (PAGE * D)
        _copy(k, token_stride, count, overlay, D, DP)
        _copy(v, token_stride, count, overlay + kv_heads * (PAGE * D), D, DP)


@triton.jit
def _from_record(
    k, v, token_stride, count, record, D: tl.constexpr, DP: tl.constexpr, JP: tl.constexpr, GROUP: tl.constexpr
):
    """Dequantise one record to the first ``count`` of PAGE rows of k and v."""
    D4: tl.constexpr = D // 4
    SCALES: tl.constexpr = PAGE * (D // GROUP)
    scales = (record + 2 * PAGE * D4).to(tl.pointer_type(tl.float16))

    token, j = tl.arange(0, PAGE)[:, None], tl.arange(0, JP)[None, :]
    packed = tl.load(record + key_row(token) * D4 + j, mask=j < D4, other=0).to(tl.int32)  # [PAGE, JP]
    for plane in tl.static_range(4):
        dim_k = plane * D4 + j
        x = _dequantise(packed, plane, scales, (dim_k // GROUP) * PAGE + token, j < D4, SCALES)
        tl.store(k + token * token_stride + dim_k, x, mask=(j < D4) & (token < count))

    dim, i = tl.arange(0, DP)[:, None], tl.arange(0, PAGE // 4)[None, :]
    packed_v = tl.load(record + PAGE * D4 + dim * (PAGE // 4) + i, mask=dim < D, other=0).to(tl.int32)
    for plane in tl.static_range(4):
        token_v = plane * (PAGE // 4) + i
        y = _dequantise(packed_v, plane, scales + 2 * SCALES, (dim // GROUP) * PAGE + token_v, dim < D, SCALES)
        tl.store(v + token_v * token_stride + dim, y, mask=(dim < D) & (token_v < count))


@triton.jit
def _copy(out, token_stride, count, rows, D: tl.constexpr, DP: tl.constexpr):
    """The first ``count`` of PAGE contiguous rows to rows ``token_stride`` apart."""
    token, dim = tl.arange(0, PAGE)[:, None], tl.arange(0, DP)[None, :]
    inside = (dim < D) & (token < count)
    tl.store(out + token * token_stride + dim, tl.load(rows + token * D + dim, mask=inside), mask=inside)


@triton.jit
def _dequantise(packed, plane: tl.constexpr, scales, place, mask, SCALES: tl.constexpr):
    """BF16 values of one plane of packed codes; ``place`` is each element's scale, its zero SCALES further."""
    scale = tl.load(scales + place, mask=mask, other=0.0).to(tl.float32)
    zero = tl.load(scales + SCALES + place, mask=mask, other=0.0).to(tl.float32)
    return to_bf16(((packed >> (2 * plane)) & 3).to(tl.float32) * scale + zero)
