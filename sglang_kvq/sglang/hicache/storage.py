"""Pages in storage: gives them names that no other format shares, and checksums."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang.hicache.host_page import FORMAT
from sglang_kvq.sglang.hicache.host_pool import KVQuantHostPool, pages_of
from sglang_kvq.sglang.runtime import Runtime, logger
from sglang_kvq.sglang.types import CacheController, Original

_counting = threading.Lock()


def format_tag(state: Runtime, first_tokens: bool) -> str:
    """Returns a tag that distinguishes these pages from all others of the same model.

    SGLang names stored pages by the model alone, and appends this tag. The tag has the method's name, for people, and a
    hash of everything on which the bytes depend.
    """
    geometry = state.geometry
    parts = (
        FORMAT,
        state.config.method,
        state.config.seed or 0,
        state.status["rotations_sha256"] or state.status["rotations"],
        geometry.kv_heads,
        state.layer_ids,
        geometry.formats,
        first_tokens,
    )
    return f"kvq{FORMAT}-{state.config.method}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def before_page_set(
    controller: CacheController, hash_values: Sequence[str], host_indices: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """BEFORE ``_generic_page_set`` and ``_page_set_zero_copy`` of SGLang's controller: writes the pages' checksums."""
    host = controller.storage_host_pool
    if isinstance(host, KVQuantHostPool):
        for key, page in zip(hash_values, pages_of(host_indices).tolist()):
            host.page.seal(host.kv_buffer, page, key)


def around_page_get(
    original: Original,
    self: CacheController,
    operation: Any,
    hash_values: Sequence[str],
    host_indices: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> int:
    """AROUND ``HiCacheController._generic_page_get`` and ``_page_get_zero_copy``: verifies the pages read from storage.

    Returns the number of pages before the first one that is missing, damaged or unreadable; SGLang computes the others.
    SGLang reads files one after another, which leaves a disk idle most of the time. Here several threads read.
    """
    host = self.storage_host_pool
    if not isinstance(host, KVQuantHostPool):
        count: int = original(self, operation, hash_values, host_indices, *args, **kwargs)
        return count

    def read(keys: Sequence[str], places: torch.Tensor) -> int:
        """Returns the number of sound pages that a run of pages begins with.

        A file that is too short, or that the system cannot read, raises an error for the whole run. Its pages are then
        read one by one.
        """
        rows = pages_of(places).tolist()
        try:
            with host.reading(rows):
                count: int = original(self, operation, keys, places, *args, **kwargs)
        except OSError as error:
            if len(keys) > 1:
                single = [[key] for key in keys]
                return _together(single, map(read, single, places.split(PAGE_SIZE)))
            if error.errno is None:
                return _damaged(self, keys[0], str(error))
            # The page may be sound, so it is kept.
            logger.warning("kv-quant: page %s of the storage cannot be read and is computed again: %s", keys[0], error)
            return 0
        for i, (key, row) in enumerate(zip(keys[:count], rows)):
            if not host.page.is_sound(host.kv_buffer, row, key):
                return i + _damaged(self, key, "its checksum does not fit")
        return count

    if host.readers == 1 or len(hash_values) == 1:
        return read(hash_values, host_indices)
    size = -(-len(hash_values) // host.readers)
    runs = [hash_values[i : i + size] for i in range(0, len(hash_values), size)]
    with ThreadPoolExecutor(len(runs), "kvq-read") as threads:
        return _together(runs, threads.map(read, runs, host_indices.split(size * PAGE_SIZE)))


def _together(runs: Iterable[Sequence[str]], counts: Iterable[int]) -> int:
    """Returns the pages before the first gap in consecutive runs, of which each begins with so many pages."""
    total = 0
    for run, count in zip(runs, counts):
        total += count
        if count < len(run):
            break
    return total


def _damaged(controller: CacheController, key: str, why: str) -> int:
    """Counts a damaged page and removes it from storage; returns 0, the number of pages to use from it.

    Without removal the damaged page would stay, because SGLang never overwrites a page that storage has.
    """
    host = controller.storage_host_pool
    with _counting:
        host.damaged_pages += 1
    logger.warning("kv-quant: page %s of the storage is damaged and is computed again: %s", key, why)
    if host.remove_stored is not None:
        try:
            host.remove_stored(key)
        except OSError as error:  # such as read-only storage
            logger.warning("kv-quant: the damaged page %s stays in the storage: %s", key, error)
    return 0


def before_attach(controller: CacheController, storage_backend: str, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``HiCacheController.attach_storage_backend``: refuses unsupported storage, also on a running server.

    Raises:
        ValueError: the storage has not been tried with these pages.
    """
    from sglang.srt.mem_cache.utils import get_hash_str

    from sglang_kvq.sglang.hicache.checks import WINDOWS_STORED, refused_storage

    if isinstance(controller.storage_host_pool, KVQuantHostPool):
        for problem in refused_storage(storage_backend):
            raise ValueError(problem)
        if any(entry.name == "swa" for entry in getattr(controller.mem_pool_host, "entries", ())):
            raise ValueError(f"--hicache-storage-backend {storage_backend}: {WINDOWS_STORED}. Serve without storage.")
        # SGLang would compile this function at the first look-up, on a thread. A flush gives that thread 10 s to end,
        # and otherwise ends the server. So the function is compiled now.
        get_hash_str([0] * PAGE_SIZE)
