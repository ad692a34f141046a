"""Memory of the cache: quantized records for every page, BF16 pages for a few, and the tables that link them.

Pages and BF16 slots are numbered from 1. Page 0 and slot 0 are reserved: padding rows of a CUDA-graph batch write
there, and no request reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_kvq.cache.shared.arena import Arena
from sglang_kvq.cache.sink_token_cache import SinkTokenCache
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.record import RecordFormat

#: Elements after each packed BF16 page. The first is 1 if the page had a BF16 copy; the 16 bytes keep pages aligned.
PACKED_TAIL = 8


@dataclass(frozen=True)
class RecordStore:
    """Records of all layers with one layout, in one tensor that a single kernel launch can cover.

    Attributes:
        format: the shared layout, without clipping: clip ranks may differ between layers (see ``PagePool.ranks``).
        layers: the layers' indices in the pool, ascending.
        layer_ids: the same indices on the device, int64 ``[n]``.
        records: uint8 ``[n, pages + 1, kv_heads, record_bytes]``; ``records[i]`` belongs to layer ``layers[i]``.
    """

    format: RecordFormat
    layers: tuple[int, ...]
    layer_ids: torch.Tensor
    records: torch.Tensor


@dataclass
class PagePool:
    """Quantized pages and BF16 pages of one attention worker.

    Attributes:
        formats: layout and clipping of each layer's records.
        stores: the records, by layout; every layer is in exactly one store.
        ranks: int32 ``[layers, 2]``, each layer's clip ranks of keys and of values (``formats.quantize.clip_rank``, 0
            clips nothing). They are data, so that one compiled kernel serves layers with different calibrated clips.
        bf16_pages: BF16 ``[layers, slots + 1, 2, kv_heads, PAGE_SIZE, head_dim]``; axis 2 is K, V.
        places: int32 ``[pages + 1]``, indexed by SGLang's page ids: the page that holds an id's tokens, 0 for none.
            Without an arena, each id equals its page. All other tables use pages in this sense, not ids.
        page_slot: int32 ``[pages + 1]``, a page's BF16 slot, -1 for none; ``page_slot[0] == 0``.
        req_to_token: int32 ``[rows, context]``, SGLang's token locations (page * PAGE_SIZE + offset). The scheduler may
            rewrite a row as soon as a batch is planned, while the batch's layers still run. So only plans read it.
        row_pages: int32 ``[rows, context / PAGE_SIZE]``, a row's pages at the last plan that included it. Layers
            read these. Only plans write them, on the stream that runs the layers.
        row_sink_end, row_history_end: int32 ``[rows]``, token positions. For the next batch, a row's request reads BF16
            pages in ``[0, sink_end)``, records in ``[sink_end, history_end)`` and BF16 pages from ``history_end``
            on. Both are multiples of ``PAGE_SIZE`` unless they equal the request's length.
        sink_cache: first tokens of pages that lost their BF16 copies; None if no layer's records need them.
        arena: sizes of the memory that records and BF16 pages share; None if their memories are separate.
    """

    formats: tuple[RecordFormat, ...]
    stores: tuple[RecordStore, ...]
    ranks: torch.Tensor
    bf16_pages: torch.Tensor
    places: torch.Tensor
    page_slot: torch.Tensor
    req_to_token: torch.Tensor
    row_pages: torch.Tensor
    row_sink_end: torch.Tensor
    row_history_end: torch.Tensor
    sink_cache: SinkTokenCache | None = None
    arena: Arena | None = None

    @classmethod
    def allocate(
        cls,
        formats: Sequence[RecordFormat],
        *,
        kv_heads: int,
        pages: int,
        slots: int,
        req_to_token: torch.Tensor,
        arena: Arena | None = None,
    ) -> PagePool:
        """Allocates zeroed pools on ``req_to_token``'s device for ``pages`` pages and ``slots`` BF16 pages.

        formats: one for each layer. arena: if given, records and BF16 pages share one memory of these sizes, and
        ``pages`` and ``slots`` must be the arena's.
        """
        device, (rows, context) = req_to_token.device, req_to_token.shape
        page_slot = torch.full((pages + 1,), -1, dtype=torch.int32, device=device)
        page_slot[0] = 0
        shape = (len(formats), slots + 1, 2, kv_heads, PAGE_SIZE, formats[0].head_dim)
        memory = None
        if arena is None:
            bf16_pages = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        else:
            memory = torch.zeros(arena.total_bytes, dtype=torch.uint8, device=device)
            part = memory.view(torch.bfloat16).unflatten(0, (slots + 1, len(formats), *shape[2:]))
            bf16_pages = part.transpose(0, 1)
        stores, at = [], 0 if arena is None else arena.slot_bytes
        for layout in dict.fromkeys(f.layout for f in formats):
            layers = tuple(i for i, f in enumerate(formats) if f.layout == layout)
            size = (len(layers), pages + 1, kv_heads, layout.record_bytes)
            ids = torch.tensor(layers, dtype=torch.int64, device=device)
            if memory is None or arena is None:
                records = torch.zeros(size, dtype=torch.uint8, device=device)
            else:
                of_layer = kv_heads * layout.record_bytes
                records = memory.as_strided(size, (of_layer, arena.page_bytes, layout.record_bytes, 1), at)
                at += of_layer * len(layers)
            stores.append(RecordStore(layout, layers, ids, records))
        places = torch.arange(pages + 1, dtype=torch.int32, device=device)
        sink_cache = None
        if any(f.keeps_first for f in formats):
            sink_cache = SinkTokenCache.allocate(len(formats), pages, kv_heads, formats[0].head_dim, device)
        return cls(
            formats=tuple(formats),
            stores=tuple(stores),
            ranks=torch.tensor([(f.rank_k, f.rank_v) for f in formats], dtype=torch.int32, device=device),
            bf16_pages=bf16_pages,
            places=places if arena is None else torch.zeros_like(places),
            page_slot=page_slot,
            req_to_token=req_to_token,
            row_pages=torch.zeros(rows, -(-context // PAGE_SIZE), dtype=torch.int32, device=device),
            row_sink_end=torch.zeros(rows, dtype=torch.int32, device=device),
            row_history_end=torch.zeros(rows, dtype=torch.int32, device=device),
            sink_cache=sink_cache,
            arena=arena,
        )

    def read_rows(self) -> None:
        """Sets ``row_pages`` of all rows, as plans do row by row; for pools that a test or benchmark fills directly."""
        self.row_pages.copy_(self.places[(self.req_to_token[:, ::PAGE_SIZE] // PAGE_SIZE).long()])

    def move_tokens(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies tokens between BF16 pages, in all layers; padding is copied within slot 0.

        target, source: int64 ``[n]``, token locations.
        """
        slot, old = (self.page_slot[self.places[x // PAGE_SIZE].long()].clamp(min=0).long() for x in (target, source))
        self.bf16_pages[:, slot, :, :, target % PAGE_SIZE] = self.bf16_pages[:, old, :, :, source % PAGE_SIZE]

    def read_bf16(self, slots: torch.Tensor) -> torch.Tensor:
        """Packs the BF16 pages in slots int64 ``[n]``, 0 for none, into BF16 ``[2, n, packed_elements]``: K, then V."""
        content = self.bf16_pages[:, slots].permute(2, 1, 0, 3, 4, 5).flatten(2)
        tail = content.new_zeros(*content.shape[:2], PACKED_TAIL)
        tail[..., 0] = (slots > 0).to(tail.dtype)
        return torch.cat([content, tail], dim=2)

    def write_bf16(self, slots: torch.Tensor, packed: torch.Tensor) -> None:
        """Unpacks ``read_bf16``'s result into slots int64 ``[n]``; slot 0 receives pages that are not wanted."""
        shape = (self.layers, self.kv_heads, PAGE_SIZE, self.head_dim)
        content = packed[..., :-PACKED_TAIL].unflatten(2, shape)
        self.bf16_pages[:, slots] = content.permute(2, 1, 0, 3, 4, 5)

    @property
    def packed_elements(self) -> int:
        """Number of BF16 elements of one page's keys (or values) in all layers, plus ``PACKED_TAIL``."""
        return self.layers * self.kv_heads * PAGE_SIZE * self.head_dim + PACKED_TAIL

    @cached_property
    def records(self) -> tuple[torch.Tensor, ...]:
        """Records of each layer, uint8 ``[pages + 1, kv_heads, record_bytes]``: views of the stores."""
        views = {layer: view for store in self.stores for layer, view in zip(store.layers, store.records)}
        return tuple(views[layer] for layer in range(self.layers))

    @property
    def page_stride(self) -> int:
        """Bytes from a page's records in a layer to those of the next page; 0 if these records are contiguous."""
        return 0 if self.arena is None else self.arena.page_bytes

    @property
    def device(self) -> torch.device:
        return self.bf16_pages.device

    @property
    def layers(self) -> int:
        return len(self.formats)

    @property
    def head_dim(self) -> int:
        return self.bf16_pages.shape[-1]

    @property
    def pages(self) -> int:
        return len(self.page_slot) - 1

    @property
    def slots(self) -> int:
        return self.bf16_pages.shape[1] - 1

    @property
    def kv_heads(self) -> int:
        return self.bf16_pages.shape[3]
