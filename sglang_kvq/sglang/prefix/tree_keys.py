"""Access to SGLang's prefix tree, before and after its replacement, by tokens and namespace: match, lock, insert."""

from __future__ import annotations

from array import array
from inspect import signature
from typing import Any

import torch

from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.types import PrefixCache, Req

_OLD = compat.applies(OLD_TREE, compat.sglang_version())


def key(req: Req, tokens: array[int], namespace: str | None) -> Any:
    """Returns the tree's key for tokens in a namespace, with the request's cache salt if the release has one."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    salt = {"cache_salt": req.cache_salt} if "cache_salt" in signature(RadixKey).parameters else {}
    return RadixKey(tokens, namespace, **salt)


def match(tree: PrefixCache, key: Any) -> tuple[torch.Tensor, Any]:
    """Returns the token locations of a key's longest cached prefix, and the node in which the prefix ends."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    found = tree.match_prefix(MatchPrefixParams(key=key))
    node = found.last_device_node
    return (found.device_indices if _OLD else tree.path_device_indices(node)), node


def prefix_len(req: Req) -> int:
    """Returns how many first tokens of a request SGLang found cached at its last match."""
    return len(req.prefix_indices) if _OLD else int(req.prefix_len)


def lock(tree: PrefixCache, node: Any) -> Any:
    if not _OLD:
        return tree.lock(node)
    tree.inc_lock_ref(node)
    return node


def unlock(tree: PrefixCache, lock: Any) -> None:
    if _OLD:
        tree.dec_lock_ref(lock)
    else:
        tree.unlock(lock)


def insert(tree: PrefixCache, key: Any, locations: torch.Tensor) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    result = tree.insert(InsertParams(key=key, value=locations.long()))
    if _OLD and result.prefix_len:  # newer trees free the duplicates themselves
        tree.token_to_kv_pool_allocator.free(locations[: result.prefix_len])


def allocate(tree: PrefixCache, tokens: int) -> torch.Tensor | None:
    """Allocates whole pages, and evicts cached prefixes for them; locked ones stay.

    Returns:
        Token locations, int64 ``[tokens]``; None, with nothing evicted, while running requests leave too few.
    """
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator, evictable = tree.token_to_kv_pool_allocator, tree.evictable_size()
    if (room := getattr(allocator, "room", None)) is not None:  # a shared memory may be full although ids are free
        if tokens > room() * allocator.page_size + evictable:
            return None
        allocator.evict_to_free_tokens(tree, tokens)
    elif (missing := tokens - allocator.available_size()) > 0:
        if missing > evictable:
            return None
        tree.evict(EvictParams(num_tokens=missing))
    locations: torch.Tensor | None = allocator.alloc(tokens)
    return locations
