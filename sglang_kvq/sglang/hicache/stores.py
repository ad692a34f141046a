"""Adapts SGLang's storage back ends, so that a quantized page is one object and a damaged page can be removed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang.hicache.host_pool import KVQuantHostPool
from sglang_kvq.sglang.runtime import logger

#: Threads that read a batch of files. Mooncake and NIXL have threads of their own.
READERS = 4
#: Result of Mooncake's ``remove`` for an object that does not exist.
_NO_OBJECT = -704


def after_create(
    result: Any, factory: Any, backend_name: str, storage_config: Any, mem_pool_host: Any, **kwargs: Any
) -> None:
    """AFTER ``StorageBackendFactory.create_backend``: prepares a new back end for quantized pages."""
    if not isinstance(mem_pool_host, KVQuantHostPool):
        return
    result = getattr(result, "_backend", result)  # SGLang's tests wrap it in a back end that fails now and then
    if backend_name == "mooncake":
        # Mooncake and NIXL store a page's keys and values as two objects, but an MLA page as one. A page of ours is one
        # row of bytes. As two objects, its parts could be evicted separately, and later come from two computations.
        _set(result, backend_name, is_mla_backend=True, mla_suffix=f"{storage_config.tp_size}_{result.mha_suffix}")
    elif backend_name == "nixl":
        _set(result, backend_name, is_mla_model=True)
    mem_pool_host.readers = READERS if backend_name == "file" else 1
    remove = _REMOVE.get(backend_name)
    mem_pool_host.remove_stored = None if remove is None else partial(remove, result)


def _set(backend: Any, name: str, **values: object) -> None:
    """Sets attributes of a back end.

    Raises:
        KVQuantError: the back end lacks the attribute, so it names its objects in an unknown way.
    """
    for attribute, value in values.items():
        if not hasattr(backend, attribute):
            raise KVQuantError(
                f"--hicache-storage-backend {name}: this SGLang release names stored pages in an unknown way, without "
                f"{attribute}. Use file."
            )
        setattr(backend, attribute, value)


def _remove_file(backend: Any, key: str) -> None:
    """Removes a file, and forgets it where SGLang remembers files, so that the page is written again."""
    name = backend._get_suffixed_key(key)
    Path(backend.file_path, f"{name}.bin").unlink(missing_ok=True)
    if (known := getattr(backend, "metadata_cache", None)) is not None:
        known.remove(name)
    if (evictor := getattr(backend, "_evictor", None)) is not None:
        evictor.abort(name)


def _remove_object(backend: Any, key: str) -> None:
    """Removes an object of Mooncake, also while others read it: they too find that its checksum is wrong."""
    (tagged,) = backend._tag_keys([key])
    name = f"{tagged}_{backend.mla_suffix}_k"
    if (code := backend.store.remove(name, True)) not in (0, _NO_OBJECT):
        logger.warning("kv-quant: Mooncake did not remove the damaged page %s: error %d", name, code)


def _remove_nixl(backend: Any, key: str) -> None:
    """Removes a file of NIXL. Object storage needs no removal: SGLang overwrites an object that it computes again."""
    if backend.file_manager is None:
        return
    names = backend._get_key_list_from_meta([key]) if backend.is_zero_copy else [backend._get_suffixed_key(key)]
    for name in names:
        Path(backend.file_manager.get_file_path(name)).unlink(missing_ok=True)


_REMOVE: dict[str, Callable[[Any, str], None]] = {
    "file": _remove_file,
    "mooncake": _remove_object,
    "nixl": _remove_nixl,
}
