"""Hooks on SGLang's table of request rows: a row given back no longer pins its window.

``hooks.TABLE`` says which release has which of these; ``tests/sglang/memory/test_rows.py`` that there are no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.types import Original, Req, ReqToTokenPool


def around_free(original: Original, self: ReqToTokenPool, req: Req) -> None:
    """AROUND ``ReqToTokenPool.free`` (``OLD_TREE``): the row is on the request."""
    row = req.req_pool_idx
    original(self, req)
    _given_back([row])


def around_release_session(original: Original, self: Any, session_id: str) -> None:
    """AROUND ``StreamingSession.release_session`` (``OLD_TREE``): it appends the session's row to the list itself."""
    before = len(self.req_to_token_pool.free_slots)
    original(self, session_id)
    _given_back(self.req_to_token_pool.free_slots[before:])


def around_free_rows(original: Original, self: ReqToTokenPool, indices: Sequence[int]) -> None:
    """AROUND ``ReqToTokenPool.free_rows`` (``NEW_TREE``): all rows that come back pass here."""
    original(self, indices)
    _given_back(list(indices))


def _given_back(rows: list[int]) -> None:
    tiers = runtime.tiers()
    if tiers is not None:
        tiers.pending.free_rows(rows)
