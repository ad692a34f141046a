"""Hooks on SGLang's table of request rows: a row given back no longer pins its window."""

from __future__ import annotations

from sglang_kvq.sglang import runtime


def on_free(original, self, req):
    """AROUND ``ReqToTokenPool.free`` (before 0.5.20: rows live on the request)."""
    row = req.req_pool_idx
    original(self, req)
    if runtime.tiers() is not None:
        runtime.tiers().pending.free_rows([row])


def on_free_rows(original, self, indices):
    """AROUND ``ReqToTokenPool.free_rows``: the one place later releases give rows back."""
    original(self, indices)
    if runtime.tiers() is not None:
        runtime.tiers().pending.free_rows(list(indices))
