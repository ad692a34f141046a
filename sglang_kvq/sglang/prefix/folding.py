"""Requests that end as a fold: chosen ones of their tokens become a prefix of their own in the tree.

A request says so in ``custom_params`` (``sessions.messages``). When it has finished, before SGLang takes back its
pages, pages for the chosen tokens are allocated, an event says what goes into them (``cache.pending.FoldedPages``), and
they enter the tree under the new name: an ordinary prefix from then on, evicted and counted like any other. The
request's own pages are freed; what of them is not in the tree yet does not enter it.

A request that is retracted or aborted folds nothing. Without room it ends with status 503: send it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeAlias

import torch

from sglang_kvq.cache.fold import check_moves
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sessions.messages import FOLD, Fold
from sglang_kvq.sglang import compat, runtime
from sglang_kvq.sglang.prefix import tree_keys
from sglang_kvq.sglang.types import Original, PrefixCache, Req

#: Chooses the tokens of a finished request that each layer and KV head of this worker keeps: int64 ``[layers, kv_heads,
#: kept]`` on the pool's device, indices below ``Fold.length``. The sinks' are first and in order. None if the request
#: was never scored. Ascending ones are moved fastest.
ChosenTokens: TypeAlias = Callable[[Req, Fold], torch.Tensor | None]

#: On a request: its fold, once decoded.
ATTRIBUTE = "_kvq_fold"
_OLD = compat.applies(OLD_TREE, compat.sglang_version())
#: Argument that says if a request's tokens enter the tree when it gives back its memory.
_ENTERS = "is_insert" if _OLD else "checkpoint"


def serve(chosen: ChosenTokens) -> None:
    """From now on requests may end as folds; called once, when this worker starts and its tiers exist.

    Only where clients cannot set ``custom_params`` themselves: a fold takes any name.

    Raises:
        KVQuantError: with this method tokens cannot be moved.
    """
    state = runtime.started()
    check_moves(state.config.method, state.geometry.formats)
    runtime.live_tiers().prepare_folds()
    state.chosen_tokens = chosen


def fold_of(req: Req) -> Fold | None:
    """Returns the request's fold; None for most requests, and for refused ones.

    Raises:
        KVQuantError: it cannot be read, or not be done here.
    """
    if hasattr(req, ATTRIBUTE):
        known: Fold | None = getattr(req, ATTRIBUTE)
        return known
    setattr(req, ATTRIBUTE, None)  # unless it is found to be right
    params = getattr(req.sampling_params, "custom_params", None)
    text = params.get(FOLD) if isinstance(params, dict) else None
    if text is None:
        return None
    state = runtime.current()
    if state is None or state.chosen_tokens is None:
        raise KVQuantError(f"custom_params {FOLD}: this server lets no client fold a request.")
    fold = Fold.decode(text)
    if len(req.origin_input_ids) < fold.length:
        raise KVQuantError(
            f"a fold of {fold.length} tokens of a prompt of {len(req.origin_input_ids)}; only the router sets it."
        )
    if req.session is not None:
        raise KVQuantError("a fold at the end of a session's request, which keeps its pages; send it without one.")
    setattr(req, ATTRIBUTE, fold)
    return fold


def around_release(original: Original, req: Req, tree_cache: PrefixCache, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``release_kv_cache``: a request gives back its row and pages, finished or not."""
    fold = getattr(req, ATTRIBUTE, None)
    if fold is None or runtime.tiers() is None or tree_cache.disable:
        return original(req, tree_cache, *args, **kwargs)
    if req.finished() and not _aborted(req):
        try:
            if problem := _fold(tree_cache, req, fold):
                _end_with(req, f"{problem}; send the request again.", HTTPStatus.SERVICE_UNAVAILABLE)
        except KVQuantError as error:
            _end_with(req, str(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    return original(req, tree_cache, **{_ENTERS: False})


def _fold(tree: PrefixCache, req: Req, fold: Fold) -> str | None:
    """Records the event and puts its pages into the tree; otherwise returns what is in the way now.

    Raises:
        KVQuantError: no tokens were chosen for this request, or not those of one.
    """
    key = tree_keys.key(req, array("q", req.origin_input_ids[: fold.kept]), fold.name)
    there = len(tree_keys.match(tree, key)[0])
    if there >= fold.kept:
        return None  # another request has done the same
    if there:
        return f"{there} of {fold.kept} tokens of the fold are cached already, perhaps chosen differently"
    state, tiers = runtime.started(), runtime.live_tiers()
    tokens = None if state.chosen_tokens is None else state.chosen_tokens(req, fold)
    if tokens is None:
        raise KVQuantError(f"request {req.rid} ends as a fold, and no tokens were chosen for it; it was not scored.")
    want = (tiers.pool.layers, tiers.pool.kv_heads, fold.kept)
    if tokens.shape != want or tokens.dtype != torch.int64:
        raise KVQuantError(f"chosen tokens {tokens.dtype} {list(tokens.shape)}: must be int64 {list(want)}.")
    with _frees_at_once(tree.token_to_kv_pool_allocator) as allocator:
        if (missing := fold.kept - allocator.available_size()) > 0:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            tree.evict(EvictParams(num_tokens=missing))  # the request's own prefix is locked
        own = allocator.alloc(fold.kept)
    if own is None:
        return f"no room for the {fold.kept} tokens of a fold"
    row = req.req_pool_idx if _OLD else req.kv.req_pool_idx
    source = tree.req_to_token_pool.req_to_token[row, : fold.length : PAGE_SIZE].long() // PAGE_SIZE
    sinks = torch.arange(min(tiers.sink_pages, fold.kept // PAGE_SIZE), device=source.device)
    tiers.pending.fold_pages(source, own[::PAGE_SIZE].long() // PAGE_SIZE, tokens, sinks)
    tree_keys.insert(tree, key, own)
    return None


def _aborted(req: Req) -> bool:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(req.finished_reason, FINISH_ABORT)


def _end_with(req: Req, problem: str, status: HTTPStatus) -> None:
    """The request, finished but not answered yet, ends with an error instead."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.finished_reason = FINISH_ABORT(f"sglang-kvq: {problem}", status, status.name)


@contextmanager
def _frees_at_once(allocator: Any) -> Iterator[Any]:
    """SGLang collects frees while it processes a batch: those so far, and what is evicted here, are done now."""
    collects = not allocator.is_not_in_free_group if _OLD else allocator.free_group is not None
    if collects:
        allocator.free_group_end()
    try:
        yield allocator
    finally:
        if collects:
            allocator.free_group_begin()
