"""The memory of the cache: INT2 records for every page, BF16 overlays for a few, and the tables between.

Pages and overlay slots number from 1; page 0 and slot 0 are reserved: padded rows of a CUDA-graph
batch write there and nobody reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat


@dataclass
class PagePool:
    """Both pools of one attention worker.

    Attributes:
        format: layout of a record.
        records: uint8 ``[layers, pages + 1, kv_heads, record_bytes]``, the INT2 storage of every page.
        overlays: BF16 ``[layers, slots + 1, 2, kv_heads, PAGE_SIZE, head_dim]``; axis 2 is K, V.
        page_slot: int32 ``[pages + 1]``, the overlay slot of a page, -1 for none; ``page_slot[0] == 0``.
        req_to_token: int32 ``[rows, context]``, SGLang's token locations (page * PAGE_SIZE + offset).
        row_sink_end, row_history_end: int32 ``[rows]``, token positions. For the batch about to run, a
            request on a row reads BF16 overlays in ``[0, sink_end)``, records in ``[sink_end,
            history_end)`` and BF16 overlays from ``history_end`` on. Both are multiples of
            ``PAGE_SIZE`` unless they equal the request's length.
    """

    format: PageFormat
    records: torch.Tensor
    overlays: torch.Tensor
    page_slot: torch.Tensor
    req_to_token: torch.Tensor
    row_sink_end: torch.Tensor
    row_history_end: torch.Tensor

    @classmethod
    def allocate(
        cls,
        format: PageFormat,
        *,
        layers: int,
        kv_heads: int,
        pages: int,
        slots: int,
        req_to_token: torch.Tensor,
    ) -> PagePool:
        """Zeroed pools on ``req_to_token``'s device for ``pages`` pages and ``slots`` overlays."""
        device, rows = req_to_token.device, req_to_token.shape[0]
        page_slot = torch.full((pages + 1,), -1, dtype=torch.int32, device=device)
        page_slot[0] = 0
        return cls(
            format=format,
            records=torch.zeros(layers, pages + 1, kv_heads, format.record_bytes, dtype=torch.uint8, device=device),
            overlays=torch.zeros(
                layers, slots + 1, 2, kv_heads, PAGE_SIZE, format.head_dim, dtype=torch.bfloat16, device=device
            ),
            page_slot=page_slot,
            req_to_token=req_to_token,
            row_sink_end=torch.zeros(rows, dtype=torch.int32, device=device),
            row_history_end=torch.zeros(rows, dtype=torch.int32, device=device),
        )

    @property
    def device(self) -> torch.device:
        return self.records.device

    @property
    def layers(self) -> int:
        return self.records.shape[0]

    @property
    def pages(self) -> int:
        return self.records.shape[1] - 1

    @property
    def slots(self) -> int:
        return self.overlays.shape[1] - 1

    @property
    def kv_heads(self) -> int:
        return self.records.shape[2]
