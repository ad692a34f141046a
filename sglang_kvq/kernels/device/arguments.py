"""Named tuples that group kernel arguments, in launches, in kernels and in their device functions.

Triton specializes a tuple's integers in spite of ``do_not_specialize``. So a number that varies from launch to launch,
and that no kernel should be compiled for, is an argument of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class View(NamedTuple):
    """A tensor ``[tokens, heads, D]`` whose last axis is contiguous.

    Attributes:
        data: the tensor; in kernels a pointer, possibly advanced to a program's part.
        token, head: strides in elements.
    """

    data: torch.Tensor
    token: int
    head: int


def view(x: torch.Tensor) -> View:
    token, head, _ = x.stride()
    return View(x, token, head)


class Stored(NamedTuple):
    """Stored keys and values of one layer, and the tables that locate them (``PagePool``'s).

    Attributes:
        records: uint8 ``[pages + 1, kv_heads, record.bytes]``.
        bf16_pages: BF16 ``[slots + 1, 2, kv_heads, PAGE_SIZE, D]``; slot: elements from slot to slot.
        page_slot: int32 ``[pages + 1]``, -1 for a page without a BF16 copy.
        row_pages: int32 ``[rows, pages]``; pages_row: elements of its rows.
        row_sink_end, row_history_end: int32 ``[rows]``.
    """

    records: torch.Tensor
    bf16_pages: torch.Tensor
    slot: int
    page_slot: torch.Tensor
    row_pages: torch.Tensor
    pages_row: int
    row_sink_end: torch.Tensor
    row_history_end: torch.Tensor


@triton.jit
def load_fields(address, COUNT: tl.constexpr):
    """Loads COUNT consecutive integers as a tuple."""
    fields = ()
    for n in tl.static_range(COUNT):
        fields += (tl.load(address + n),)
    return fields


@triton.jit
def store_fields(address, fields, mask):
    """Stores integers where ``load_fields`` can load them; addresses and fields may be tensors."""
    for n in tl.static_range(len(fields)):
        tl.store(address + n, fields[n], mask=mask)


def field_count(kind: Any) -> tl.constexpr:
    """Returns the number of fields of a named tuple, for kernels."""
    return tl.constexpr(len(kind._fields))
