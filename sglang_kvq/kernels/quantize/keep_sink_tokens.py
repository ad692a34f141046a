"""Keeps sequences' first tokens when their pages lose their BF16 copies, and restores BF16 pages with these tokens.

``cache.sink_token_cache.SinkTokenCache`` and ``ReferenceOps.restore_pages`` do the same in torch, bit for bit. Both
kernels are launched for every plan; on the device they may find nothing to do.
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.decode.decode_attention import is_two_bit
from sglang_kvq.kernels.device.codes import PlaneRecord, Record, page_bytes
from sglang_kvq.kernels.device.common import PAGE
from sglang_kvq.kernels.device.launch import start_kernel
from sglang_kvq.kernels.device.shape import shape_of
from sglang_kvq.kernels.extend.gather_pages import read_record
from sglang_kvq.kernels.extend.gather_two_bits import warps_for

#: Rows (K or V of a head) that a program copies at a time; then programs per layer, which share the pages.
_ROWS = 16
_PROGRAMS = 8


def keep_sink_tokens(
    slots: torch.Tensor, entries: torch.Tensor, count: torch.Tensor, bf16_pages: torch.Tensor, sink_cache: torch.Tensor
) -> None:
    """Copies first tokens from BF16 pages to their entries, while reassigned BF16 pages still have their old values.

    slots: int64 ``[n]``; entries: int32 ``[n]``, 0 for none. Only the first ``count``, int64 ``[1]``, are read.
    bf16_pages: BF16 ``[layers, slots + 1, 2, kv_heads, PAGE_SIZE, D]``. sink_cache: ``SinkTokenCache.tokens``.
    """
    layers, kv_heads, d = bf16_pages.shape[0], bf16_pages.shape[3], bf16_pages.shape[-1]
    start_kernel(
        _keep, (layers, _PROGRAMS), slots, entries, count, bf16_pages, sink_cache,
        bf16_pages.stride(0), bf16_pages.stride(1), sink_cache.stride(0),
        SHAPE=shape_of(kv_heads, d),
        ROWS=_ROWS,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _keep(
    slots, entries, count, bf16_pages, sink_cache, bf16_pages_layer, bf16_pages_slot, sink_layer,
    SHAPE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (l, j): layer l of pages j, j + programs, ..."""
    D: tl.constexpr = SHAPE.D
    HEADS: tl.constexpr = 2 * SHAPE.KV_HEADS  # of K, then of V
    layer = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, SHAPE.DP)[None, :]
    for i in range(tl.program_id(1), tl.load(count).to(tl.int32), tl.num_programs(1)):
        entry = tl.load(entries + i).to(tl.int64)
        if entry > 0:
            slot = tl.load(slots + i)
            for start in range(0, HEADS, ROWS):
                row = start + tl.arange(0, ROWS)[:, None]
                inside = (row < HEADS) & (dim < D)
                source = bf16_pages + layer * bf16_pages_layer + slot * bf16_pages_slot + row * (PAGE * D) + dim
                target = sink_cache + layer * sink_layer + (entry * HEADS + row) * D + dim
                tl.store(target, tl.load(source, mask=inside), mask=inside)


def restore_pages(
    pages: torch.Tensor,
    records: torch.Tensor,
    record: Record | PlaneRecord,
    layers: torch.Tensor,
    page_slot: torch.Tensor,
    bf16_pages: torch.Tensor,
    sink_entry: torch.Tensor,
    sink_cache: torch.Tensor,
) -> None:
    """Fills the BF16 pages of pages int ``[n]``, 0 for none, from records of the layers of one store.

    records: uint8 ``[m, pages + 1, kv_heads, record.bytes]`` of layers ``layers`` int64 ``[m]``; page_slot: int32
    ``[pages + 1]``; sink_entry, sink_cache: ``SinkTokenCache.entry`` and ``tokens``. A page's token 0 comes from
    ``sink_cache`` if the page has an entry.
    """
    m, kv_heads, d = records.shape[0], records.shape[2], bf16_pages.shape[-1]
    fast = is_two_bit(record, d)
    start_kernel(
        _restore, (kv_heads, m, len(pages)), pages, records, layers, page_slot, bf16_pages, sink_entry, sink_cache,
        records.stride(0), bf16_pages.stride(0), bf16_pages.stride(1), sink_cache.stride(0),
        RECORD=record,
        SHAPE=shape_of(kv_heads, d),
        FAST=fast,
        num_warps=warps_for(d) if fast or isinstance(record, PlaneRecord) else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pages"], do_not_specialize_on_alignment=["pages"])
def _restore(
    pages, records, layers, page_slot, bf16_pages, sink_entry, sink_cache, records_layer, bf16_pages_layer,
    bf16_pages_slot, sink_layer, RECORD: tl.constexpr, SHAPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Program (h, l, i): KV head h of the store's layer l, page i."""
    D: tl.constexpr = SHAPE.D
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    page = tl.load(pages + tl.program_id(2)).to(tl.int32)
    slot = tl.load(page_slot + page).to(tl.int64)  # 0 for page 0
    if slot > 0:
        head = tl.program_id(0)
        layer = tl.load(layers + tl.program_id(1))
        record = records + tl.program_id(1).to(tl.int64) * records_layer
        record += page.to(tl.int64) * page_bytes(RECORD, KV_HEADS) + head * RECORD.bytes
        k = bf16_pages + layer * bf16_pages_layer + slot * bf16_pages_slot + head * (PAGE * D)
        v = k + KV_HEADS * (PAGE * D)
        read_record(k, v, PAGE, 1, record, RECORD, SHAPE, FAST, True)
        entry = tl.load(sink_entry + page).to(tl.int64)
        if entry > 0:
            dim = tl.arange(0, SHAPE.DP)
            first = sink_cache + layer * sink_layer + (entry * 2 * KV_HEADS + head) * D + dim
            tl.debug_barrier()  # other threads wrote the record's token 0
            tl.store(k + dim, tl.load(first, mask=dim < D), mask=dim < D)
            tl.store(v + dim, tl.load(first + KV_HEADS * D, mask=dim < D), mask=dim < D)
