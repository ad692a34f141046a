"""SGLang's view of quantized pages in host memory: a host pool whose bytes only this plugin interprets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang.hicache.host_page import HostPage


class _Targets(threading.local):
    """The rows that a thread is about to read from storage, in this order."""

    rows: Iterator[int] = iter(())


class KVQuantHostPool(HostKVCache):
    """Host pool with one row of bytes per page, which holds the records of all layers.

    SGLang measures the pool in tokens and indexes it by token; the indices of a page's tokens are consecutive.

    Attributes:
        page: offsets of a page's parts in a row.
        kv_buffer: uint8 ``[pages, page.page_bytes]``, pinned if the cache is on a GPU.
        places: int64 ``[n]`` on the host, rows of the next backup. SGLang passes them only on the device.
        gathered: the rows of the next backup's first tokens, and those tokens.
        damaged_pages: pages read from storage since the start that differed from the pages written.
        readers: threads that read pages of the attached storage at once.
        remove_stored: removes a page from the attached storage, by its key; None if the storage cannot remove pages.
    """

    kv_buffer: torch.Tensor

    def __init__(
        self,
        tiers: TierManager,
        *,
        start_layer: int,
        end_layer: int,
        ratio: float,
        size: float,
        tag: str,
        allocator_type: str,
        pool_label: str,
    ) -> None:
        """
        Args:
            ratio: tokens of this pool divided by those of the pool on the device.
            size: size in 10^9 bytes, which replaces ``ratio`` unless it is 0.
            tag: text that storage adds to the names of pages.
        """
        self.tiers, self.pool = tiers, tiers.pool
        self.page = HostPage(tiers.pool, tiers.sink_cache is not None)
        self.page_bytes = self.page.page_bytes
        self.places = torch.empty(0, dtype=torch.int64)
        self.gathered: tuple[list[int], torch.Tensor] | None = None
        self.damaged_pages = 0
        self.readers = 1
        self._targets = _Targets()
        self.remove_stored: Callable[[str], None] | None = None
        self.layer_num = self.target_layer_num = tiers.pool.layers
        super().__init__(
            dtype=torch.uint8,
            device_capacity_tokens=tiers.pool.pages * PAGE_SIZE,
            size_per_token=self.get_size_per_token(),
            start_layer=start_layer,
            end_layer=end_layer,
            host_to_device_ratio=ratio,
            host_size=size,
            page_size=PAGE_SIZE,
            layout="page_first",
            pin_memory=tiers.pool.device.type == "cuda",
            device="cpu",
            allocator_type=allocator_type,
            pool_label=pool_label,
        )
        self.storage_format_tag = tag

    # -- sizes -----------------------------------------------------------------------------------------

    def get_size_per_token(self) -> int:
        return self.page.page_bytes // PAGE_SIZE

    def get_ksize_per_token(self) -> int:
        """Returns the bytes per token of a page's single object, by which Mooncake measures its bandwidth."""
        return self.get_size_per_token()

    def init_kv_buffer(self) -> torch.Tensor:
        allocate = ALLOC_MEMORY_FUNCS[self.pool.device.type]
        buffer: torch.Tensor = allocate(
            (self.page_num, self.page.page_bytes),
            dtype=torch.uint8,
            device="cpu",
            pin_memory=self.pin_memory,
            allocator=self.allocator,
        )
        return buffer

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Returns whether storage may read and write rows in place by direct I/O, past the system's page cache."""
        return self.page.page_bytes % page_size_bytes == 0 and self.kv_buffer.data_ptr() % page_size_bytes == 0

    # -- between device and host, on SGLang's transfer streams ---------------------------------------------

    def prepare_transfer_indices(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns pages for the token indices on host and device.

        SGLang calls this on the transfer's stream, which waits for the events that gave the ids their pages. The pages
        then stay where they are until the transfer is done (``TierManager.wait_for_copies``).
        """
        return pages_of(host_indices), self.tiers.pages_of(pages_of(device_indices))

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        pages = self.prepare_transfer_indices(host_indices, device_indices, io_backend)
        self.backup_from_device_all_layer_physical(device_pool, *pages, io_backend)

    def backup_from_device_all_layer_physical(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Copies pages to the host. Indices are those of ``prepare_transfer_indices``.

        ``transfers.before_start_writing`` has made the pages' records and noted their rows in ``places``.

        Raises:
            RuntimeError: SGLang copies other pages than it had queued.
        """
        if len(self.places) != len(host_indices):
            raise RuntimeError(
                f"kv-quant: {len(host_indices)} pages go to the host, {len(self.places)} were announced. Please report "
                "this."
            )
        if not len(self.places):
            return
        self.page.layout.backup(self.pool, device_indices, self.kv_buffer, self.places)
        if self.gathered is not None:
            self.page.put_tokens(self.kv_buffer, *self.gathered)
            self.gathered = None

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        pages = self.prepare_transfer_indices(host_indices, device_indices, io_backend)
        self.load_to_device_per_layer_physical(device_pool, *pages, layer_id, io_backend, is_draft=is_draft)

    def load_to_device_per_layer_physical(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Loads one layer's records. Indices are those of ``prepare_transfer_indices``.

        ``transfers.before_start_loading`` has prepared the pages on the device.
        """
        self.page.layout.load_layer(self.pool, layer_id, self.kv_buffer, host_indices, device_indices)

    # -- between host and storage, on SGLang's threads -----------------------------------------------------

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[int(index) // PAGE_SIZE]

    @contextmanager
    def reading(self, rows: Iterable[int]) -> Iterator[None]:
        """Lets the calling thread read stored pages directly into these rows, in this order.

        SGLang asks for an empty page for each, fills it and gives it back. New memory for each would cost more than to
        read a file that the system has in memory.
        """
        self._targets.rows = iter(rows)
        try:
            yield
        finally:
            self._targets.rows = iter(())

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        row = next(self._targets.rows, None)
        return torch.empty(self.page.page_bytes, dtype=torch.uint8) if row is None else self.kv_buffer[row]

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        row = self.kv_buffer[int(index) // PAGE_SIZE]
        if row.data_ptr() != data_page.data_ptr():
            row.copy_(data_page)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages: list[int] = pages_of(indices).tolist()
        size = self.page.page_bytes
        return [self.kv_buffer.data_ptr() + page * size for page in pages], [size] * len(pages)


def pages_of(indices: torch.Tensor) -> torch.Tensor:
    """Returns page ids, or rows of host memory, int64 ``[n]`` for the token indices ``[64 n]`` of whole pages."""
    return indices[::PAGE_SIZE].long() // PAGE_SIZE
