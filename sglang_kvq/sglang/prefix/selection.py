"""Requests that begin with chosen pages of another prefix, which are copied before the scheduler matches the request.

A request names the pages in ``custom_params`` (``sessions.messages``). Its first tokens stand for the pages and are
never computed. Right before SGLang matches the request against its tree, copies of the pages are inserted there, under
the request's own namespace. So the copies are an ordinary prefix: they are evicted and counted like any other, and
after a retraction they are made again. A request is not admitted before all its copies are in the tree
(``around_add``): it waits, or ends if they can never fit.
"""

from __future__ import annotations

import os
from array import array
from typing import Any

import numpy as np
import torch

from sglang_kvq.cache.transfer import to_device
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sessions.messages import GONE, SELECTION, TOO_SMALL, Selection
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.prefix import episodes, folding, tree_keys
from sglang_kvq.sglang.types import ForwardBatch, Original, PrefillAdder, PrefixCache, Req

#: Environment variable that only tests of this file set to 1. Without the session router, which knows the owner of each
#: prefix, every client of the server could then read every prefix in its cache.
ENABLED = "KVQ_PAGE_SELECTION"
#: Attribute of a request that holds its selection, once decoded.
_ATTRIBUTE = "_kvq_selection"


def enabled() -> bool:
    """Returns True if requests may choose pages: with ``--episodic-policy``, whose router lets no client choose."""
    state = runtime.current()
    return (state is not None and state.config.episodic is not None) or os.environ.get(ENABLED) == "1"


def selection_of(req: Req) -> Selection | None:
    """Returns the request's selection; None for requests without one and for aborted requests.

    Raises:
        KVQuantError: the selection cannot be read, or this server accepts none.
    """
    if hasattr(req, _ATTRIBUTE):
        known: Selection | None = getattr(req, _ATTRIBUTE)
        return known
    params = getattr(req.sampling_params, "custom_params", None)
    text = params.get(SELECTION) if isinstance(params, dict) else None
    if text is not None and not enabled():
        raise KVQuantError(f"custom_params {SELECTION}: this server does not let clients choose pages.")
    selection = None if text is None else Selection.decode(text)
    setattr(req, _ATTRIBUTE, selection)
    return selection


def around_next_round(
    original: Original, self: Req, tree_cache: PrefixCache | None = None, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ``Req.init_next_round_input``, which matches a waiting request in the tree: copies its pages first."""
    if runtime.tiers() is None or tree_cache is None:
        return original(self, tree_cache, *args, **kwargs)
    if self.to_finish is not None and len(self.origin_input_ids) == 1:
        _forget(self)  # SGLang has refused it, such as for its grammar, and has replaced its prompt by one token
    there = False
    try:
        episodes.prepare(tree_cache, self)
        selection = selection_of(self)
        there = selection is None or _bring(tree_cache, self, selection)
    except KVQuantError as error:
        _end(self, error)
    result = original(self, tree_cache, *args, **kwargs)
    found, needed = tree_keys.prefix_len(self), stand_ins(self)
    if there and found < needed:  # the request would wait forever
        problem = (
            f"the prompt's first {needed} tokens represent cached history, but SGLang found only {found} of them in "
            "the cache. Send the request again. Report this if it happens again."
        )
        _end(self, KVQuantError(problem))
        result = original(self, tree_cache, *args, **kwargs)
    return result


def around_add(original: Original, self: PrefillAdder, req: Req, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``PrefillAdder.add_one_req``: admits a request once all tokens that stand for a history are cached."""
    if runtime.tiers() is None or tree_keys.prefix_len(req) >= stand_ins(req):
        return original(self, req, *args, **kwargs)
    from sglang.srt.managers.schedule_policy import AddReqResult

    # SGLang withdraws "no token" only when a running request ends. A queued load begins with this round's batch.
    busy = self.can_run_list or (self.running_batch is not None and self.running_batch.reqs)
    return AddReqResult.NO_TOKEN if busy and loads_allow(self.tree_cache) else AddReqResult.OTHER


def stand_ins(req: Req) -> int:
    """Returns how many first tokens of a request stand for others and must never be computed; 0 for most requests."""
    selection, prefix = selection_of(req), episodes.prefix_of(req)
    return len(selection.pages) * PAGE_SIZE if selection else prefix.tokens if prefix else 0


def _end(req: Req, error: KVQuantError) -> None:
    """Makes a waiting request end with an error; SGLang then replaces its prompt by one token."""
    _forget(req)
    req.set_finish_with_abort(f"sglang-kvq: {error}")


def _forget(req: Req) -> None:
    """Removes from a request what its first tokens stand for, and its fold."""
    for attribute in (_ATTRIBUTE, folding.ATTRIBUTE):
        setattr(req, attribute, None)
    episodes.forget_prefix(req)


def _bring(tree: PrefixCache, req: Req, selection: Selection) -> bool:
    """Copies the chosen pages into the tree under the request's namespace, unless they are there already.

    Returns:
        False if there is no room now, or if pages must first be loaded from the host: then the request waits.

    Raises:
        KVQuantError: the history is no longer cached, the cache is too small for the history and the copies, or the
            request does not begin with the pages' tokens.
    """
    tokens = _ids(selection.tokens)
    if array("q", req.origin_input_ids[: len(tokens)]) != tokens or len(req.origin_input_ids) <= len(tokens):
        raise KVQuantError(
            "the prompt must begin with the chosen pages' tokens and have more; only the router sends such requests."
        )
    key = tree_keys.key(req, tokens, req.extra_key)
    if len(tree_keys.match(tree, key)[0]) >= len(tokens):
        return True
    locations, node = tree_keys.match(tree, tree_keys.key(req, _ids(selection.history), selection.namespace))
    if len(locations) < len(selection.history):
        raise KVQuantError(
            f"{len(selection.history) - len(locations)} of {len(selection.history)} tokens of the history are {GONE}. "
            "Send them again."
        )
    if not loads_allow(tree):
        return False
    own = _room(tree, node, len(selection.history), len(tokens))
    if own is None:
        return False
    tiers = runtime.live_tiers()
    count = len(selection.pages)
    near = [i for i in range(count) if i < tiers.sink_pages or i >= count - tiers.recent_pages]
    chosen, windows = to_device([selection.pages.astype(np.int64), np.array(near)], locations.device)
    source = locations[::PAGE_SIZE].long()[chosen] // PAGE_SIZE
    tiers.pending.copy_pages(source, own[::PAGE_SIZE].long() // PAGE_SIZE, windows)
    tree_keys.insert(tree, key, own)
    return True


def loads_allow(tree: PrefixCache) -> bool:
    """Returns whether pages of the tree can be copied, because no load from the host is still queued."""
    controller = getattr(tree, "cache_controller", None)
    if controller is None:
        return True
    from sglang_kvq.sglang.hicache.transfers import wait_for_loads  # imported only with HiCache

    return wait_for_loads(controller)


def _room(tree: PrefixCache, node: Any, history: int, copies: int) -> torch.Tensor | None:
    """Allocates locations for copies, without evicting the history that is copied.

    Args:
        node: the node of the tree at which the history ends.
        history, copies: numbers of tokens.

    Returns:
        Token locations, int64 ``[copies]``; None while running requests leave too few.

    Raises:
        KVQuantError: history and copies exceed the whole cache.
    """
    allocator = tree.token_to_kv_pool_allocator
    if history + copies > allocator.size:
        raise KVQuantError(
            f"the KV cache of {allocator.size} tokens {TOO_SMALL} a history of {history} tokens and copies of {copies} "
            "of them. Lower --episodic-budget, or give the cache more memory."
        )
    lock = tree_keys.lock(tree, node)
    try:
        return tree_keys.allocate(tree, copies)
    finally:
        tree_keys.unlock(tree, lock)


def _ids(tokens: np.ndarray) -> array[int]:
    return array("q", tokens.astype(np.int64).tobytes())


def offset_of(req: Req) -> int:
    """Returns how far the positions of a request's new tokens exceed their indices in the request."""
    selection, prefix = selection_of(req), episodes.prefix_of(req)
    return selection.offset if selection else prefix.offset if prefix else 0


def after_new_batch(result: ForwardBatch, cls: type, batch: Any, *args: Any, **kwargs: Any) -> ForwardBatch:
    """AFTER ``ForwardBatch.init_new``: tells the tiers whose batch runs next, and moves its positions."""
    if (tiers := runtime.tiers()) is not None:
        tiers.requests = tuple(result.rids or ())
        _move_positions(result, batch)
    return result


def _move_positions(result: ForwardBatch, batch: Any) -> None:
    """Gives tokens the positions that they would have after the whole history."""
    if not enabled() or batch.forward_mode.is_idle():
        return
    offsets = [offset_of(req) for req in batch.reqs]
    if any(offsets):
        each = [1] * len(offsets) if batch.forward_mode.is_decode() else list(map(int, batch.extend_lens))
        (moved,) = to_device([np.repeat(offsets, each)], result.positions.device)
        result.positions = result.positions + 0  # a copy: SGLang's tensor may be a view of another
        result.positions[: len(moved)] += moved.to(result.positions.dtype)
