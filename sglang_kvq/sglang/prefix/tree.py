"""Hooks on insertion into the radix tree: BF16 pages move along when a request is repointed.

When the tree already holds a request's tokens, SGLang frees the request's own pages and uses the
tree's. The own pages' BF16 copy then belong on the tree's pages, or the window would be lost.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from sglang_kvq.cache.tiers import TierManager
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.types import Original, PrefixCache, Req


class _WindowMove:
    """The window pages of a row before and after an insertion, recorded as one move in order.

    Args:
        length: tokens that enter the tree; of a longer row, those after it keep their pages.
    """

    def __init__(self, tiers: TierManager, req_to_token: torch.Tensor, row: int, length: int) -> None:
        full = length // PAGE_SIZE  # only whole pages enter the tree
        sinks = min(tiers.sink_pages, full)
        recent = max(full - tiers.recent_pages - 1, sinks)
        bounds = ((0, full),) if recent == sinks else ((0, sinks), (recent, full))
        # Slices: an index by a list would be copied to the device, which waits for the batch that runs there.
        self.spans = [slice(a * PAGE_SIZE, b * PAGE_SIZE, PAGE_SIZE) for a, b in bounds if a < b]
        self.req_to_token, self.row, self.pending = req_to_token, row, tiers.pending
        if self.spans:
            self.own = self._pages(req_to_token[row])
            self.event = self.pending.reserve_move()

    def _pages(self, locations: torch.Tensor) -> torch.Tensor:
        parts = [locations[span] for span in self.spans]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).long() // PAGE_SIZE

    def finish(self, locations: torch.Tensor | None = None) -> None:
        """``locations`` holds the tree's token locations; None reads the rewritten row."""
        if self.spans:
            kept = self._pages(self.req_to_token[self.row] if locations is None else locations)
            self.pending.fill_move(self.event, self.own, kept)


def _inserted(tree: PrefixCache, states: Any, length: int) -> int:
    """Returns the number of a request's first ``length`` tokens that enter the tree.

    A hybrid model's prefix is of use only with the recurrent state at its end, so the tree takes tokens up to the last
    state that was kept. Of two, the older one serves a request that ends before the newer.

    Args:
        states: what has the request's ``mamba_last_track_seqlen``: the request, or (``NEW_TREE``) its record.
    """
    if not tree.supports_mamba():
        return length
    kept = states.mamba_last_track_seqlen or 0
    if kept > length and hasattr(states, "mamba_prev_track_seqlen"):
        older = states.mamba_prev_track_seqlen
        kept = 0 if older is None or older > length else older
    return min(kept, length)


def around_unfinished(original: Original, self: PrefixCache, req: Req, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``cache_unfinished_req`` of either tree (``OLD_TREE``): rewrites the row itself."""
    tiers = runtime.tiers()
    if tiers is None or self.disable:
        return original(self, req, *args, **kwargs)
    length = _inserted(self, req, len(req.get_fill_ids()))
    move = _WindowMove(tiers, self.req_to_token_pool.req_to_token, req.req_pool_idx, length)
    result = original(self, req, *args, **kwargs)
    move.finish()
    return result


def around_finished(original: Original, self: PrefixCache, req: Req, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``cache_finished_req`` of either tree (``OLD_TREE``): frees duplicates, leaves the row."""
    is_insert = kwargs.get("is_insert", args[0] if args else True)
    tiers = runtime.tiers()
    if tiers is None or self.disable or not is_insert or getattr(self, "disable_finished_insert", False):
        return original(self, req, *args, **kwargs)
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    length = _inserted(self, req, kwargs["kv_len_to_handle"])
    # EAGLE's keys are pairs of tokens: the last has none after it and stays out.
    cached = length - 1 if self.is_eagle else length
    move = _WindowMove(tiers, self.req_to_token_pool.req_to_token, req.req_pool_idx, cached)
    # Everything by which this release keeps requests of the same tokens apart: another's pages replace nothing.
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
    """AROUND ``UnifiedRadixCache.checkpoint_into_tree`` (``NEW_TREE``): rewrites the row in both cases."""
    tiers = runtime.tiers()
    if tiers is None or self.disable:
        return original(self, req, up_to=up_to, **kwargs)
    length = _inserted(self, req.kv, up_to)
    move = _WindowMove(tiers, self.req_to_token_pool.req_to_token, req.kv.req_pool_idx, length)
    result = original(self, req, up_to=up_to, **kwargs)
    move.finish()
    return result
