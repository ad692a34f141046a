"""Copies of quantized pages to and from host memory: one row of bytes for each page, with the records of all layers.

A host page consists of

    layer 0's records of the page, [kv_heads, record_bytes]
    layer 1's records, ...
    a tail that belongs to the caller, if its buffer is wider than ``page_bytes``

Layers may have different widths. Every layer's part begins at a multiple of 16 bytes. This module only copies bytes:
``TierManager.before_backup`` and ``before_load`` decide which pages may be copied, and when.

``HostLayout`` copies between any devices in torch. On a GPU with pinned host memory it copies differently:

* Loads read host memory in the kernel ``kernels.tiers.host_rows``, with one launch for each layer.
* Backups gather pages into a buffer on the GPU with the same kernel, and the copy engine copies the buffer to the host.
  A kernel that writes to host memory would slow other kernels: concurrent decode steps took up to 3.2 times as long
  (docs/notes/hicache.md).

The kernel needs host rows that begin at multiples of 16 bytes.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from sglang_kvq.cache.pool import PagePool
from sglang_kvq.errors import KVQuantError

#: Bytes to which each layer's part of a host page is aligned.
ALIGNED = 16
#: Bytes of the buffer on the GPU, which holds at least one page. Copies of this size use the bus well.
STAGED = 32 << 20


class HostLayout:
    """Layout of a pool's records in a host page, and the copies in both directions.

    Args:
        pool: the pool to copy from and to. Methods also accept other pools, if their records have the same sizes.

    Attributes:
        row_bytes: bytes of each layer's records of one page, ``kv_heads * record_bytes``.
        offsets: where each layer's records begin in a host page.
        page_bytes: bytes of a host page, without the caller's tail; a multiple of ``ALIGNED``.
    """

    def __init__(self, pool: PagePool) -> None:
        self.row_bytes = _row_bytes(pool)
        *starts, end = accumulate((-(-size // ALIGNED) * ALIGNED for size in self.row_bytes), initial=0)
        self.offsets, self.page_bytes = tuple(starts), end
        self._connect(pool)

    def backup(self, pool: PagePool, pages: torch.Tensor, host: torch.Tensor, host_pages: torch.Tensor) -> None:
        """Copies records of ``pages``, all layers, to the rows ``host_pages`` of ``host``.

        The bytes after ``page_bytes`` in each row do not change.

        Args:
            pages: int64 ``[n]`` on any device, pages with valid records (``TierManager.before_backup``).
            host: uint8 ``[host pages, page_bytes or more]``, last axis contiguous.
            host_pages: int64 ``[n]``, all different, on the host, because the host starts one copy for each row.

        Ids are not checked. The host does not wait for the device.

        Raises:
            KVQuantError: a shape, dtype or stride does not fit, or the pool's records have other sizes.
        """
        if not self._check(pool, pages, host, host_pages):
            return
        if host_pages.device.type != "cpu":
            raise KVQuantError(f"host_pages: on {host_pages.device}; must be on the host.")
        if self._kernel is not None and _is_mapped(host, pool.device):
            self._kernel.backup(pages.to(pool.device), host, host_pages.tolist())
            return
        there, pages = host_pages.to(host.device), pages.to(pool.device)
        for records, start, size in zip(pool.records, self.offsets, self.row_bytes):
            host[there, start : start + size] = records[pages].flatten(1).to(host.device)

    def load_layer(
        self, pool: PagePool, layer: int, host: torch.Tensor, host_pages: torch.Tensor, pages: torch.Tensor
    ) -> None:
        """Copies one layer's records from the rows ``host_pages`` of ``host`` to ``pages``; changes nothing else.

        Args:
            layer: index in the pool.
            host: uint8 ``[host pages, page_bytes or more]``, last axis contiguous.
            host_pages: int64 ``[n]``.
            pages: int64 ``[n]``, all different; their records were not valid before ``TierManager.before_load``.

        Both id tensors may be on any device. Ids are not checked, so the host does not wait for the device.

        Raises:
            KVQuantError: a shape, dtype or stride does not fit, or the pool's records have other sizes.
        """
        if not 0 <= layer < len(self.row_bytes):
            layers = len(self.row_bytes)
            raise KVQuantError(f"layer {layer}: the pool has {layers} layers. Choose 0 to {layers - 1}.")
        if not self._check(pool, pages, host, host_pages):
            return
        if self._kernel is not None and _is_mapped(host, pool.device):
            self._kernel.load(layer, pages.to(pool.device), host, host_pages.to(pool.device))
            return
        records, start, size = pool.records[layer], self.offsets[layer], self.row_bytes[layer]
        rows = host[host_pages.to(host.device), start : start + size].to(pool.device)
        records[pages.to(pool.device)] = rows.unflatten(1, records.shape[1:])

    def _check(self, pool: PagePool, pages: torch.Tensor, host: torch.Tensor, host_pages: torch.Tensor) -> bool:
        """Checks shapes, dtypes and strides without waiting for the device; returns whether there are pages to copy."""
        if pool is not self._pool:
            self._connect(pool)
        for name, ids in (("pages", pages), ("host_pages", host_pages)):
            if ids.dim() != 1 or ids.dtype != torch.int64:
                raise KVQuantError(f"{name}: {ids.dtype} {list(ids.shape)}; must be int64 [n].")
        if len(pages) != len(host_pages):
            raise KVQuantError(f"host_pages: {len(host_pages)} for {len(pages)} pages; must be as many.")
        if host.dtype != torch.uint8 or host.dim() != 2 or host.shape[1] < self.page_bytes or host.stride(1) != 1:
            raise KVQuantError(
                f"host: {host.dtype} {list(host.shape)} with strides {list(host.stride())}; must be uint8 [host pages, "
                f"{self.page_bytes} or more], its last axis contiguous."
            )
        return len(pages) > 0

    def _connect(self, pool: PagePool) -> None:
        """Makes ``pool`` the pool to copy from and to."""
        if (given := _row_bytes(pool)) != self.row_bytes:
            raise KVQuantError(
                f"pool: its layers have {list(given)} bytes per page, not {list(self.row_bytes)}. Make a HostLayout "
                "for this pool."
            )
        self._pool = pool
        self._kernel = _Kernel(pool, self.offsets, self.page_bytes) if _has_kernel(pool.device) else None


class _Kernel:
    """Copies from and to one pool on a GPU."""

    def __init__(self, pool: PagePool, offsets: tuple[int, ...], page_bytes: int) -> None:
        from sglang_kvq.kernels.tiers import host_rows  # imports Triton, which a CPU does not need

        self._rows, self._table = host_rows, host_rows.row_table(pool.records, offsets)
        self._buffer = torch.zeros(max(1, STAGED // page_bytes), page_bytes, dtype=torch.uint8, device=pool.device)
        self._places = torch.arange(len(self._buffer), device=pool.device)
        # Copies the reserved page to the buffer and back, so that no request waits for the compiler.
        page = torch.zeros(1, dtype=torch.int64, device=pool.device)
        self._gather(page)
        self.load(0, page, self._buffer, page)

    def _gather(self, pages: torch.Tensor) -> None:
        """Copies pages int64 ``[n]`` to the first rows of the buffer."""
        self._rows.gather_rows(self._table, pages, self._buffer, self._places[: len(pages)])

    def backup(self, pages: torch.Tensor, host: torch.Tensor, host_pages: list[int]) -> None:
        """Copies pages through the buffer, part by part.

        The stream's order ensures that a part is copied out before the next one overwrites the buffer.
        """
        size, width = self._buffer.shape
        for start in range(0, len(host_pages), size):
            self._gather(pages[start : start + size])
            for mine, place in zip(self._buffer, host_pages[start : start + size]):
                host[place, :width].copy_(mine, non_blocking=True)

    def load(self, layer: int, pages: torch.Tensor, host: torch.Tensor, host_pages: torch.Tensor) -> None:
        self._rows.load_rows(self._table, layer, pages, host, host_pages)


def _row_bytes(pool: PagePool) -> tuple[int, ...]:
    return tuple(records[0].numel() for records in pool.records)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda"


def _is_mapped(host: torch.Tensor, device: torch.device) -> bool:
    """Returns whether the GPU ``device`` can address ``host``: ``host`` is on that GPU or in pinned memory."""
    return host.device == device or (host.device.type == "cpu" and host.is_pinned())
