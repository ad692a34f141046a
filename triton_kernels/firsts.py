"""First tokens of sequences: kept when their pages have been written, and overlays that are restored with them.

What ``cache.firsts.FirstTokens`` and ``ReferenceOps.restore_pages`` do in torch, bit for bit. Both launch for every row
of a batch, and find on the device that there is nothing to do.
"""

import torch
import triton
import triton.language as tl

from sglang_kvq.kernels.codes import PlaneRecord, Record
from sglang_kvq.kernels.common import PAGE
from sglang_kvq.kernels.decode import is_two_bit
from sglang_kvq.kernels.gather import read_record
from sglang_kvq.kernels.gather_two_bits import warps_for
from sglang_kvq.kernels.shape import shape_of
from sglang_kvq.kernels.tiers import first_entry

#: Pages that a program compares its own with at a time; rows (a layer's K or V of a head) that it copies at a time.
_PAGES = 256
_ROWS = 64


def keep_firsts(
    pages: torch.Tensor,
    page_slot: torch.Tensor,
    overlays: torch.Tensor,
    first_page: torch.Tensor,
    firsts: torch.Tensor,
) -> None:
    """Keep the first tokens of pages int32 ``[n]``, 0 for none, that have overlays and whose entries can be taken.

    page_slot: int32 ``[pages + 1]``; overlays: BF16 ``[layers, slots + 1, 2, kv_heads, PAGE_SIZE, D]``.
    first_page, firsts: ``FirstTokens.pages`` and ``tokens``.
    """
    layers, kv_heads, d = overlays.shape[0], overlays.shape[3], overlays.shape[-1]
    _keep[(len(pages),)](
        pages, page_slot, overlays, first_page, firsts,
        overlays.stride(0), firsts.stride(0), layers, len(first_page) - 1,
        SHAPE=shape_of(kv_heads, d),
        PAGES=_PAGES,
        ROWS=_ROWS,
        num_warps=4,
    )  # fmt: skip


# What varies between pools is data; a plan waits for no compiler (``overlays``).
@triton.jit(do_not_specialize=["pages", "layers", "count"], do_not_specialize_on_alignment=["pages"])
def _keep(
    pages, page_slot, overlays, first_page, firsts, overlays_layer, firsts_layer, layers, count,
    SHAPE: tl.constexpr, PAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program i: page i, unless another before it has the same entry."""
    D: tl.constexpr = SHAPE.D
    HEADS: tl.constexpr = 2 * SHAPE.KV_HEADS  # of K, then of V
    page = tl.load(pages + tl.program_id(0)).to(tl.int32)
    slot = tl.load(page_slot + page).to(tl.int64)  # of page 0 it is 0
    if slot > 0:
        entry = first_entry(page, count)
        # Only the first of a batch looks at the entry and takes it, so that no two do, and always the same one.
        before = tl.zeros([], tl.int32)
        for start in range(0, tl.program_id(0), PAGES):
            i = start + tl.arange(0, PAGES)
            other = tl.load(pages + i, mask=i < tl.program_id(0), other=0).to(tl.int32)
            same = (tl.load(page_slot + other, mask=other > 0, other=0) > 0) & (first_entry(other, count) == entry)
            before += tl.sum(same.to(tl.int32), 0)
        if (before == 0) & (tl.load(first_page + entry) == 0):
            tl.store(first_page + entry, page)
            dim = tl.arange(0, SHAPE.DP)[None, :]
            for start in range(0, layers * HEADS, ROWS):
                row = start + tl.arange(0, ROWS)[:, None]
                layer, head = (row // HEADS).to(tl.int64), row % HEADS
                inside = (row < layers * HEADS) & (dim < D)
                source = overlays + layer * overlays_layer + (slot * HEADS + head) * (PAGE * D) + dim
                target = firsts + layer * firsts_layer + (entry.to(tl.int64) * HEADS + head) * D + dim
                tl.store(target, tl.load(source, mask=inside), mask=inside)


def restore_pages(
    pages: torch.Tensor,
    records: torch.Tensor,
    record: Record | PlaneRecord,
    layers: torch.Tensor,
    page_slot: torch.Tensor,
    overlays: torch.Tensor,
    first_page: torch.Tensor,
    firsts: torch.Tensor,
) -> None:
    """Fill the overlays that pages int ``[n]`` have, 0 for none, from records of the layers of one store.

    records: uint8 ``[m, pages + 1, kv_heads, record.bytes]`` of layers ``layers`` int64 ``[m]``; the rest as in
    ``keep_firsts``. Token 0 is the one that is kept.
    """
    m, kv_heads, d = records.shape[0], records.shape[2], overlays.shape[-1]
    fast = is_two_bit(record, d)
    _restore[(kv_heads, m, len(pages))](
        pages, records, layers, page_slot, overlays, first_page, firsts,
        records.stride(0), overlays.stride(0), firsts.stride(0), len(first_page) - 1,
        RECORD=record,
        SHAPE=shape_of(kv_heads, d),
        FAST=fast,
        num_warps=warps_for(d) if fast or isinstance(record, PlaneRecord) else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pages", "count"], do_not_specialize_on_alignment=["pages"])
def _restore(
    pages, records, layers, page_slot, overlays, first_page, firsts,
    records_layer, overlays_layer, firsts_layer, count,
    RECORD: tl.constexpr, SHAPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Program (h, l, i): KV head h of the store's layer l, page i."""
    D: tl.constexpr = SHAPE.D
    KV_HEADS: tl.constexpr = SHAPE.KV_HEADS
    page = tl.load(pages + tl.program_id(2)).to(tl.int32)
    slot = tl.load(page_slot + page).to(tl.int64)  # of page 0 it is 0
    if slot > 0:
        head = tl.program_id(0)
        layer = tl.load(layers + tl.program_id(1))
        record = records + tl.program_id(1).to(tl.int64) * records_layer
        record += (page.to(tl.int64) * KV_HEADS + head) * RECORD.bytes
        k = overlays + layer * overlays_layer + (slot * 2 * KV_HEADS + head) * (PAGE * D)
        v = k + KV_HEADS * (PAGE * D)
        read_record(k, v, PAGE, 1, record, RECORD, SHAPE, FAST, True)
        entry = first_entry(page, count).to(tl.int64)
        if tl.load(first_page + entry) == page:
            dim = tl.arange(0, SHAPE.DP)
            first = firsts + layer * firsts_layer + (entry * 2 * KV_HEADS + head) * D + dim
            tl.debug_barrier()  # other threads wrote the record's token 0
            tl.store(k + dim, tl.load(first, mask=dim < D), mask=dim < D)
            tl.store(v + dim, tl.load(first + KV_HEADS * D, mask=dim < D), mask=dim < D)
