"""Copies of quantized pages between the pool and host memory that the GPU can address.

    buffer[places[i], offset(l) :][: bytes(l)]  =  records(l)[pages[i]]         gather: every layer l
    records(l)[pages[i]]  =  host[host_pages[i], offset(l) :][: bytes(l)]       load: one layer l

A page's records of one layer are contiguous on both sides; the pages need not be. Records are opaque bytes, moved 16 at
a time. A table on the device says where each layer's records are, so that one launch can gather layers of different
widths.

At most ``_PROGRAMS`` programs share the rows (page, layer), because copies slow the kernels that run meanwhile: decode
steps take 1 to 5% longer with 4 programs, 9 and 22% with 32 (docs/notes/hicache.md). A backup first gathers pages on
the device; then the copy engine moves them (``cache.host_pages``).

The host's side of a load is a tensor in pinned memory: Triton asks the driver for the device address of each argument,
and refuses memory that the device cannot reach.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_kvq.errors import KVQuantError
from sglang_kvq.kernels.device.arguments import field_count, load_fields
from sglang_kvq.kernels.device.launch import start_kernel

#: Bytes of a vector, and alignment of all rows.
VECTOR = 16
#: 4-byte words of a row that a program moves at a time: 16 KiB in flight.
_WORDS = 4096
#: Programs of a launch, at most.
_PROGRAMS = 4


class Row(NamedTuple):
    """One layer's records, int64 each, in the order of ``row_table``.

    Attributes:
        address: address of page 0's records; those of page p are p * stride later.
        stride: bytes from one page's records to those of the next.
        bytes: size of a page's records, all KV heads.
        offset: start of the records in a host page.
    """

    address: int
    stride: int
    bytes: int
    offset: int


FIELDS = field_count(Row)


def row_table(records: Sequence[torch.Tensor], offsets: Sequence[int]) -> torch.Tensor:
    """Returns where the layers' rows are, int64 ``[layers, 4]`` on the records' device; waits for the device.

    records: uint8 ``[pages + 1, kv_heads, record_bytes]`` of each layer, contiguous in a page; they must outlive the
    table. offsets: where each layer's records begin in a host page.

    Raises:
        KVQuantError: a row does not begin or end at a multiple of 16 bytes.
    """
    rows = [Row(x.data_ptr(), x.stride(0), x[0].numel(), offset) for x, offset in zip(records, offsets, strict=True)]
    for layer, row in enumerate(rows):
        if any(n % VECTOR for n in row):
            raise KVQuantError(
                f"layer {layer}: records of {row.bytes} bytes per page, every {row.stride} bytes from address "
                f"{row.address:#x}, and at offset {row.offset} of a host page: the kernel moves {VECTOR} bytes at a "
                f"time. Align all to {VECTOR}."
            )
    return torch.tensor(rows, dtype=torch.int64).to(records[0].device)


def gather_rows(table: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor, places: torch.Tensor) -> None:
    """Copies all layers' records of ``pages`` to rows of ``buffer``.

    table: from ``row_table``. pages, places: int64 ``[n]`` on the device. buffer: uint8 ``[rows, page bytes or more]``
    on the device; its rows begin at multiples of 16 bytes.

    Raises:
        KVQuantError: rows of ``buffer`` are not aligned.
    """
    _launch(table, pages, buffer, places, first=0, layers=len(table), gather=True)


def load_rows(
    table: torch.Tensor, layer: int, pages: torch.Tensor, host: torch.Tensor, host_pages: torch.Tensor
) -> None:
    """Copies one layer's records of ``pages`` from rows of ``host``, on the device or pinned; see ``gather_rows``."""
    _launch(table, pages, host, host_pages, first=layer, layers=1, gather=False)


def _launch(
    table: torch.Tensor,
    pages: torch.Tensor,
    host: torch.Tensor,
    host_pages: torch.Tensor,
    *,
    first: int,
    layers: int,
    gather: bool,
) -> None:
    if host.data_ptr() % VECTOR or host.stride(0) % VECTOR:
        raise KVQuantError(
            f"host: rows of {host.stride(0)} bytes from address {host.data_ptr():#x}; the kernel moves {VECTOR} "
            f"bytes at a time. Align both to {VECTOR}."
        )
    rows = len(pages) * layers
    start_kernel(
        _copy_rows, (min(rows, _PROGRAMS),),
        table, first, layers, rows, pages, host, host_pages, host.stride(0),
        GATHER=gather,
        WORDS=_WORDS,
        num_warps=8,
    )  # fmt: skip


# Nothing is specialized: a copy must not wait for the compiler because of the number of its pages.
@triton.jit(
    do_not_specialize=["table", "first", "layers", "rows", "pages", "host", "host_pages", "host_bytes"],
    do_not_specialize_on_alignment=["table", "pages", "host", "host_pages"],
)  # fmt: skip
def _copy_rows(
    table, first, layers, rows, pages, host, host_pages, host_bytes, GATHER: tl.constexpr, WORDS: tl.constexpr
):
    """Program p: rows p, p + programs, ...; row r is layer first + r % layers of page r // layers.

    host_bytes: bytes from one host page to the next.
    """
    VECTOR: tl.constexpr = 16
    for r in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = Row(*load_fields(table + (first + r % layers) * FIELDS, FIELDS))
        page, there = tl.load(pages + r // layers), tl.load(host_pages + r // layers)
        mine, theirs = row.address + page * row.stride, host + there * host_bytes + row.offset
        # The compiler cannot see that all are multiples of a vector.
        mine = tl.multiple_of(mine.to(tl.pointer_type(tl.int32)), VECTOR)
        theirs = tl.multiple_of(theirs.to(tl.pointer_type(tl.int32)), VECTOR)
        words = row.bytes.to(tl.int32) // VECTOR * (VECTOR // 4)
        for start in range(0, words, WORDS):
            word = start + tl.arange(0, WORDS)
            inside = word < words
            if GATHER:
                tl.store(theirs + word, tl.load(mine + word, mask=inside), mask=inside)
            else:
                tl.store(mine + word, tl.load(theirs + word, mask=inside), mask=inside)
