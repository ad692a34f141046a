"""Requests that begin with chosen pages of another prefix: copied before the scheduler looks for what is cached.

A request says so in ``custom_params`` (``episodic.selection``). Its first tokens stand for the pages and are never
computed: right before SGLang matches the request against its tree, the copies are put there under the request's own
namespace. So they are an ordinary prefix, evicted and counted like any other; after a retraction they are made again.
"""

from __future__ import annotations

import os
from array import array
from inspect import signature
from typing import Any

import numpy as np
import torch

from sglang_kvq.cache.transfer import to_device
from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.episodic.selection import GONE, PARAMETER, Selection
from sglang_kvq.errors import KVQuantError
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat, runtime
from sglang_kvq.sglang.types import ForwardBatch, Original, PrefixCache, Req

#: Set to 1 in tests of this file alone: without the router of ``sessions``, which knows whose a prefix is, whoever can
#: reach the server may then read every prefix in its cache.
ENABLED = "KVQ_PAGE_SELECTION"
#: On a request: its selection, once decoded.
_ATTRIBUTE = "_kvq_selection"
_OLD = compat.applies(OLD_TREE, compat.sglang_version())


def enabled() -> bool:
    """Whether requests may choose pages: with ``--episodic-policy``, whose router refuses it from clients."""
    state = runtime.current()
    return (state is not None and state.config.episodic is not None) or os.environ.get(ENABLED) == "1"


def selection_of(req: Req) -> Selection | None:
    """The request's selection; None for the others, and for those that were aborted.

    Raises:
        KVQuantError: it has one that cannot be read.
    """
    if hasattr(req, _ATTRIBUTE):
        known: Selection | None = getattr(req, _ATTRIBUTE)
        return known
    params = getattr(req.sampling_params, "custom_params", None)
    text = params.get(PARAMETER) if isinstance(params, dict) else None
    if text is not None and not enabled():
        raise KVQuantError(f"custom_params {PARAMETER}: this server lets no client choose pages.")
    selection = None if text is None else Selection.decode(text)
    setattr(req, _ATTRIBUTE, selection)
    return selection


def around_next_round(
    original: Original, self: Req, tree_cache: PrefixCache | None = None, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ``Req.init_next_round_input``, which matches a waiting request against the tree."""
    if runtime.tiers() is None or tree_cache is None:
        return original(self, tree_cache, *args, **kwargs)
    from sglang_kvq.sglang import folding  # it uses this module

    try:
        folding.fold_of(self)
        selection = selection_of(self)
        there = selection is None or _bring(tree_cache, self, selection)
    except KVQuantError as error:
        setattr(self, _ATTRIBUTE, None)
        self.set_finish_with_abort(f"sglang-kvq: {error}")
        there = True
    if there:
        return original(self, tree_cache, *args, **kwargs)
    # No room: what is not there must not be computed. In a namespace without a prefix the request needs more tokens
    # than can be had, so that it waits.
    name, self.extra_key = self.extra_key, f"{self.extra_key}-waits"
    try:
        return original(self, tree_cache, *args, **kwargs)
    finally:
        self.extra_key = name


def _bring(tree: PrefixCache, req: Req, selection: Selection) -> bool:
    """Copy the pages into the tree under the request's name, unless they are there; False if there is no room.

    Raises:
        KVQuantError: the history is no longer cached, or the request does not begin with the pages' tokens.
    """
    tokens = _ids(selection.tokens)
    if array("q", req.origin_input_ids[: len(tokens)]) != tokens or len(req.origin_input_ids) <= len(tokens):
        raise KVQuantError(
            "the prompt does not begin with the chosen pages' tokens and go on; only the router sets it."
        )
    key = _key(req, tokens, req.extra_key)
    if len(_match(tree, key)[0]) >= len(tokens):
        return True
    locations, node = _match(tree, _key(req, _ids(selection.history), selection.namespace))
    if len(locations) < len(selection.history):
        raise KVQuantError(
            f"{len(selection.history) - len(locations)} of {len(selection.history)} tokens of the history are {GONE}; "
            "send them again."
        )
    allocator = tree.token_to_kv_pool_allocator
    lock = _lock(tree, node)
    try:
        if (missing := len(tokens) - allocator.available_size()) > 0:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            tree.evict(EvictParams(num_tokens=missing))
        own = allocator.alloc(len(tokens))
    finally:
        _unlock(tree, lock)
    if own is None:
        return False
    tiers = runtime.live_tiers()
    count = len(selection.pages)
    near = [i for i in range(count) if i < tiers.sink_pages or i >= count - tiers.recent_pages]
    chosen, windows = to_device([selection.pages.astype(np.int64), np.array(near)], locations.device)
    source = locations[::PAGE_SIZE].long()[chosen] // PAGE_SIZE
    tiers.pending.copy_pages(source, own[::PAGE_SIZE].long() // PAGE_SIZE, windows)
    _insert(tree, key, own)
    return True


def _ids(tokens: np.ndarray) -> array[int]:
    return array("q", tokens.astype(np.int64).tobytes())


def _key(req: Req, tokens: array[int], namespace: str | None) -> Any:
    """A key as the tree makes it of a request's tokens, in a namespace."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    salt = {"cache_salt": req.cache_salt} if "cache_salt" in signature(RadixKey).parameters else {}
    return RadixKey(tokens, namespace, **salt)


def _match(tree: PrefixCache, key: Any) -> tuple[torch.Tensor, Any]:
    """Token locations of what is cached of a key, and the node that it ends in."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    found = tree.match_prefix(MatchPrefixParams(key=key))
    node = found.last_device_node
    return (found.device_indices if _OLD else tree.path_device_indices(node)), node


def _lock(tree: PrefixCache, node: Any) -> Any:
    if not _OLD:
        return tree.lock(node)
    tree.inc_lock_ref(node)
    return node


def _unlock(tree: PrefixCache, lock: Any) -> None:
    if _OLD:
        tree.dec_lock_ref(lock)
    else:
        tree.unlock(lock)


def _insert(tree: PrefixCache, key: Any, locations: torch.Tensor) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    result = tree.insert(InsertParams(key=key, value=locations.long()))
    if _OLD and result.prefix_len:  # the other trees free what they had already
        tree.token_to_kv_pool_allocator.free(locations[: result.prefix_len])


def move_positions(result: ForwardBatch, cls: type, batch: Any, *args: Any, **kwargs: Any) -> ForwardBatch:
    """AFTER ``ForwardBatch.init_new``: tokens stand where they would behind the whole history."""
    if runtime.tiers() is None or not enabled() or batch.forward_mode.is_idle():
        return result
    offsets = [selection.offset if (selection := selection_of(req)) else 0 for req in batch.reqs]
    if any(offsets):
        each = [1] * len(offsets) if batch.forward_mode.is_decode() else list(map(int, batch.extend_lens))
        (moved,) = to_device([np.repeat(offsets, each)], result.positions.device)
        result.positions = result.positions + 0  # SGLang's own tensor may be another's view
        result.positions[: len(moved)] += moved.to(result.positions.dtype)
    return result
