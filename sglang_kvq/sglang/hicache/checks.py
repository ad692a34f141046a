"""Refuses settings that cannot be combined with HiCache and ``--kv-quant``, each with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.releases import NEW_TREE, NEW_TREE_RELEASES
from sglang_kvq.sessions.config import EPICACHE
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.prefix.selection import ENABLED
from sglang_kvq.sglang.types import ModelConfig, ServerArgs

#: Storage back ends that have been tried with quantized pages. ``dynamic`` is a class that the user provides.
STORAGE = ("file", "mooncake", "nixl", "dynamic")

#: Settings of HiCache: field, values that work, and why others do not.
_SETTINGS = (
    ("hicache_io_backend", ("kernel",), "pages are copied by kernels, as their width differs by layer. Leave it out"),
    ("hicache_mem_layout", ("page_first",), "quantized pages have one layout in host memory. Leave it out"),
)


def refused_flags(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields a text for each typed setting that cannot be served with HiCache."""
    if not values.get("enable_hierarchical_cache"):
        return
    release = compat.sglang_version()
    if not compat.applies(NEW_TREE, release):
        yield (
            f"--enable-hierarchical-cache: SGLang {release} has a prefix cache that keeps plain BF16 rows on the host. "
            f"Use SGLang {' or '.join(NEW_TREE_RELEASES)}."
        )
        return
    for field, allowed, why in _SETTINGS:
        if values.get(field) not in (None, *allowed):
            yield f"--{field.replace('_', '-')} {values[field]}: {why}."
    if (backend := values.get("hicache_storage_backend")) is not None:
        yield from refused_storage(backend)


def refused_storage(backend: str) -> Iterator[str]:
    """Yields a text if quantized pages cannot be kept in this storage back end."""
    if backend not in STORAGE:
        yield (
            f"--hicache-storage-backend {backend}: {_WHY_NOT.get(backend, 'it has not been tried with these pages')}. "
            f"Use {', '.join(STORAGE[:-1])} or {STORAGE[-1]}."
        )


def _names_have_namespaces() -> bool:
    """Returns True if this SGLang derives the names of stored pages also from a request's namespace.

    Chosen pages of a history are cached under a namespace of their own, which must not be lost in storage.
    """
    from sglang.srt.mem_cache import utils

    return hasattr(utils, "storage_namespace_seed")


#: Why storage is refused for models with sliding windows.
WINDOWS_STORED = "SGLang stores this model's sliding windows without a checksum, so damage would change answers"
_TWO = "it stores keys and values of a page separately, and was not tried with pages that are one object"
_WHY_NOT = {
    **dict.fromkeys(("hf3fs", "eic", "simm", "mori", "tensorcast", "seaweedfs"), _TWO),
    "aibrix": "it needs the shapes of plain keys and values, which quantized pages do not have",
    "npu_memcache": "it is for NPUs",
}


def check_resolved(server_args: ServerArgs, config: KVQuantConfig, model: ModelConfig) -> None:
    """Refuses HiCache with models and features whose state it would move only in part, or with which it was not tried.

    Raises:
        KVQuantError: names the flag and the reason.
    """
    if not compat.resolved(server_args, "enable_hierarchical_cache", False):
        return
    from sglang.srt.configs.hybrid_arch import mambaish_config

    for wrong, why in (
        (
            mambaish_config(model) is not None,
            "SGLang answers wrongly when recurrent states come back from the host (its issue 39830). Leave out "
            "--enable-hierarchical-cache",
        ),
        (
            model.is_hybrid_swa and compat.resolved(server_args, "hicache_storage_backend") is not None,
            f"{WINDOWS_STORED}. Leave out --hicache-storage-backend",
        ),
        (
            model.is_hybrid_swa and compat.resolved(server_args, "speculative_algorithm") is not None,
            "drafts were not tried with sliding windows that come from the host. Leave out --speculative-algorithm",
        ),
        (
            config.episodic is not None and config.episodic.policy == EPICACHE,
            "--episodic-policy epicache was not tried with HiCache. Use --episodic-policy retrieve",
        ),
        (
            (config.episodic is not None or os.environ.get(ENABLED) == "1") and not _names_have_namespaces(),
            "this SGLang release names stored pages by their tokens alone, so chosen pages would be confused with "
            f"others. Use {NEW_TREE_RELEASES[-1]}, or leave out --episodic-policy",
        ),
        (
            compat.resolved(server_args, "kv_canary", "none") not in (None, "none"),
            "the canary's notes about a page are not moved with it. Leave out --kv-canary",
        ),
    ):
        if wrong:
            raise KVQuantError(f"--enable-hierarchical-cache: {why}.")
