"""Requests that end as a fold: a choice of their tokens becomes a separate prefix in the tree.

A request asks for a fold in ``custom_params`` (``sessions.messages``). When it has finished, before SGLang frees its
pages, new pages are allocated for the chosen tokens. An event says which tokens go there
(``cache.pending.FoldedPages``). The new pages enter the tree under the fold's name, as an ordinary prefix: they are
evicted and counted like any other. The request's own pages are freed, and those that the tree does not have yet do not
enter it.

A request that is retracted or aborted folds nothing. If there is no room for a fold, the request ends with status 503,
and the router sends it again.
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

#: Chooses the tokens of a finished request that each layer and KV head of this worker keeps. Returns int64 ``[layers,
#: kv_heads, kept]`` on the pool's device: indices below ``Fold.length``, those of sinks first and in order. Ascending
#: indices are moved fastest. Returns None if the request was never scored.
ChosenTokens: TypeAlias = Callable[[Req, Fold], torch.Tensor | None]

#: Attribute of a request that holds its fold, once decoded.
ATTRIBUTE = "_kvq_fold"
_OLD = compat.applies(OLD_TREE, compat.sglang_version())
#: Argument of SGLang's function that says whether a request's tokens enter the tree when its memory is freed.
_ENTERS = "is_insert" if _OLD else "checkpoint"


def serve(chosen: ChosenTokens) -> None:
    """Allows requests to end as folds. Call it once, when this worker starts and its tiers exist.

    Call it only if clients cannot set ``custom_params`` themselves, because a fold may take any name.

    Raises:
        KVQuantError: tokens cannot be moved with this method.
    """
    state = runtime.started()
    check_moves(state.config.method, state.geometry.formats)
    runtime.live_tiers().prepare_folds()
    state.chosen_tokens = chosen


def fold_of(req: Req) -> Fold | None:
    """Returns the request's fold; None for most requests, and for refused ones.

    Raises:
        KVQuantError: the message cannot be read, or this request cannot fold.
    """
    if hasattr(req, ATTRIBUTE):
        known: Fold | None = getattr(req, ATTRIBUTE)
        return known
    setattr(req, ATTRIBUTE, None)  # stays None if an error is raised below
    params = getattr(req.sampling_params, "custom_params", None)
    text = params.get(FOLD) if isinstance(params, dict) else None
    if text is None:
        return None
    state = runtime.current()
    if state is None or state.chosen_tokens is None:
        raise KVQuantError(f"custom_params {FOLD}: this server does not let clients fold a request.")
    fold = Fold.decode(text)
    if len(req.origin_input_ids) < fold.length:
        raise KVQuantError(
            f"a fold of {fold.length} tokens of a prompt of {len(req.origin_input_ids)}; only the router sends such "
            "requests."
        )
    if req.session is not None:
        raise KVQuantError(
            "a request of an SGLang session keeps its pages, so it cannot end as a fold. Leave session_params out."
        )
    setattr(req, ATTRIBUTE, fold)
    return fold


def around_release(original: Original, req: Req, tree_cache: PrefixCache, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``release_kv_cache``, which frees a request's row and pages, finished or not: folds a finished request."""
    fold = getattr(req, ATTRIBUTE, None)
    if fold is None or runtime.tiers() is None or tree_cache.disable:
        return original(req, tree_cache, *args, **kwargs)
    if req.finished() and not _aborted(req):
        try:
            if problem := _fold(tree_cache, req, fold):
                _end_with(req, f"{problem}. Send the request again.", HTTPStatus.SERVICE_UNAVAILABLE)
        except KVQuantError as error:
            _end_with(req, str(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    return original(req, tree_cache, **{_ENTERS: False})


def _fold(tree: PrefixCache, req: Req, fold: Fold) -> str | None:
    """Records the fold's event and inserts its pages into the tree; returns why not, if it cannot now.

    Raises:
        KVQuantError: no tokens were chosen for this request, or they have a wrong shape or dtype.
    """
    key = tree_keys.key(req, array("q", req.origin_input_ids[: fold.kept]), fold.name)
    there = len(tree_keys.match(tree, key)[0])
    if there >= fold.kept:
        return None  # another request has already made this fold
    if there:
        return f"{there} of {fold.kept} tokens of the fold are cached already, perhaps chosen differently"
    state, tiers = runtime.started(), runtime.live_tiers()
    tokens = None if state.chosen_tokens is None else state.chosen_tokens(req, fold)
    if tokens is None:
        raise KVQuantError(
            f"request {req.rid} should end as a fold, but it was never scored, so no tokens were chosen."
        )
    want = (tiers.pool.layers, tiers.pool.kv_heads, fold.kept)
    if tokens.shape != want or tokens.dtype != torch.int64:
        raise KVQuantError(f"chosen tokens {tokens.dtype} {list(tokens.shape)}: must be int64 {list(want)}.")
    with _frees_at_once(tree.token_to_kv_pool_allocator):
        own = tree_keys.allocate(tree, fold.kept)  # the request's own prefix is locked
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
    """Makes a finished request, whose answer is not sent yet, end with an error."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.finished_reason = FINISH_ABORT(f"sglang-kvq: {problem}", status, status.name)


@contextmanager
def _frees_at_once(allocator: Any) -> Iterator[Any]:
    """Makes frees take effect immediately: those in the body, and those that SGLang has collected in this batch."""
    collects = not allocator.is_not_in_free_group if _OLD else allocator.free_group is not None
    if collects:
        allocator.free_group_end()
    try:
        yield allocator
    finally:
        if collects:
            allocator.free_group_begin()
