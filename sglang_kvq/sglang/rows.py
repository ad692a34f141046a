"""Hooks on SGLang's table of request rows: a row given back no longer pins its window.

``hooks.TABLE`` says which release has which of these; ``tests/sglang/test_rows.py`` that there are no others.
"""

from __future__ import annotations

from sglang_kvq.sglang import runtime


def around_free(original, self, req):
    """AROUND ``ReqToTokenPool.free`` (``OLD_TREE``): the row is on the request."""
    row = req.req_pool_idx
    original(self, req)
    _given_back([row])


def around_release_session(original, self, session_id):
    """AROUND ``StreamingSession.release_session`` (``OLD_TREE``): it appends the session's row to the list itself."""
    before = len(self.req_to_token_pool.free_slots)
    original(self, session_id)
    _given_back(self.req_to_token_pool.free_slots[before:])


def around_free_rows(original, self, indices):
    """AROUND ``ReqToTokenPool.free_rows`` (``NEW_TREE``): the one place where rows come back."""
    original(self, indices)
    _given_back(list(indices))


def _given_back(rows: list[int]) -> None:
    if runtime.tiers() is not None:
        runtime.tiers().pending.free_rows(rows)
