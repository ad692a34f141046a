"""Hooks on insertion into the radix tree: if SGLang replaces a request's pages, their BF16 copies move along.

If the tree already holds a request's tokens, SGLang frees the request's own pages and gives it the tree's pages. The
BF16 copies must then move to the tree's pages, or the request would lose its window.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.disaggregation import handover
from sglang_kvq.sglang.types import Original, PrefixCache, Req


class _WindowMove:
    """The window pages of a row before and after an insertion, recorded as one move event.

    The event is reserved before the insertion, so that it comes before the frees that SGLang makes meanwhile.

    Args:
        length: number of tokens that enter the tree; later tokens of the row keep their pages.
    """

    def __init__(self, tiers: TierManager, req_to_token: torch.Tensor, row: int, length: int) -> None:
        full = length // PAGE_SIZE  # only whole pages enter the tree
        sinks = min(tiers.sink_pages, full)
        recent = max(full - tiers.recent_pages - 1, sinks)
        bounds = ((0, full),) if recent == sinks else ((0, sinks), (recent, full))
        # Slices, because a list as index would be copied to the device, which waits for the batch that runs there.
        self.spans = [slice(a * PAGE_SIZE, b * PAGE_SIZE, PAGE_SIZE) for a, b in bounds if a < b]
        self.req_to_token, self.row, self.pending = req_to_token, row, tiers.pending
        if self.spans:
            self.own = self._pages(req_to_token[row])
            self.event = self.pending.reserve_move()

    def _pages(self, locations: torch.Tensor) -> torch.Tensor:
        parts = [locations[span] for span in self.spans]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).long() // PAGE_SIZE

    def finish(self, locations: torch.Tensor | None = None) -> None:
        """Completes the move event. ``locations`` are the tree's token locations; None reads the rewritten row."""
        if self.spans:
            kept = self._pages(self.req_to_token[self.row] if locations is None else locations)
            self.pending.fill_move(self.event, self.own, kept)


def _inserted(tree: PrefixCache, states: Any, length: int) -> int:
    """Returns how many of a request's first ``length`` tokens enter the tree.

    A hybrid model can use a prefix only with the recurrent state at its end. So the tree takes the tokens up to the
    last state that was kept. If the newer of two states is beyond ``length``, the older one counts.

    Args:
        states: the object with ``mamba_last_track_seqlen``: the request, or (``NEW_TREE``) its ``kv``.
    """
    if not tree.supports_mamba():
        return length
    kept = states.mamba_last_track_seqlen or 0
    if kept > length and hasattr(states, "mamba_prev_track_seqlen"):
        older = states.mamba_prev_track_seqlen
        kept = 0 if older is None or older > length else older
    return min(kept, length)


def around_unfinished(original: Original, self: PrefixCache, req: Req, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``cache_unfinished_req`` of either tree (``OLD_TREE``), which rewrites the row: records the move."""
    tiers = runtime.tiers()
    if tiers is None or self.disable:
        return original(self, req, *args, **kwargs)
    length = _inserted(self, req, len(req.get_fill_ids()))
    move = _WindowMove(tiers, self.req_to_token_pool.req_to_token, req.req_pool_idx, length)
    result = original(self, req, *args, **kwargs)
    move.finish()
    return result


def around_finished(original: Original, self: PrefixCache, req: Req, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``cache_finished_req`` of either tree (``OLD_TREE``): records the move, looking up the tree's pages.

    SGLang frees duplicate pages here and leaves the row as it was.
    """
    is_insert = kwargs.get("is_insert", args[0] if args else True)
    tiers = runtime.tiers()
    if tiers is None or self.disable or not is_insert or getattr(self, "disable_finished_insert", False):
        return original(self, req, *args, **kwargs)
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    length = _inserted(self, req, kwargs["kv_len_to_handle"])
    # EAGLE's keys are pairs of tokens: the last token begins no pair, so it stays out of the tree.
    cached = length - 1 if self.is_eagle else length
    move = _WindowMove(tiers, self.req_to_token_pool.req_to_token, req.req_pool_idx, cached)
    # All names by which this release separates requests with equal tokens: pages under other names replace nothing.
    names = {name: getattr(req, name) for name in ("extra_key", "cache_salt") if name in signature(RadixKey).parameters}
    key = RadixKey((req.origin_input_ids + req.output_ids)[:length], **names)
    result = original(self, req, *args, **kwargs)
    if req.req_pool_idx is None:  # a streaming session has taken the row, pages and all
        return result
    kept = self.match_prefix(MatchPrefixParams(key=key)).device_indices
    if len(kept) >= cached // PAGE_SIZE * PAGE_SIZE:
        move.finish(kept)
    return result


def around_checkpoint(original: Original, self: PrefixCache, req: Req, *, up_to: int, **kwargs: Any) -> Any:
    """AROUND ``UnifiedRadixCache.checkpoint_into_tree`` (``NEW_TREE``): records the move.

    It rewrites the row of finished and unfinished requests. A decode server also calls it for a request that was
    aborted before it ran. Such a request stays out of the tree: nothing was ever recorded about its pages.
    """
    tiers, transfers = runtime.tiers(), handover.current()
    if tiers is None or self.disable:
        return original(self, req, up_to=up_to, **kwargs)
    if transfers is not None and transfers.waits(req.kv.req_pool_idx):
        return None
    length = _inserted(self, req.kv, up_to)
    move = _WindowMove(tiers, self.req_to_token_pool.req_to_token, req.kv.req_pool_idx, length)
    result = original(self, req, up_to=up_to, **kwargs)
    move.finish()
    return result
