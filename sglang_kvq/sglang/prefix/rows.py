"""Hooks on SGLang's table of request rows, which record returned rows: a returned row no longer pins its window.

``hooks.TABLE`` says which release uses which hook. ``tests/sglang/memory/test_rows.py`` checks that rows are returned
nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.types import Original, Req, ReqToTokenPool


def around_free(original: Original, self: ReqToTokenPool, req: Req) -> None:
    """AROUND ``ReqToTokenPool.free`` (``OLD_TREE``): records the request's row."""
    row = req.req_pool_idx
    original(self, req)
    _given_back([row])


def around_release_session(original: Original, self: Any, session_id: str) -> None:
    """AROUND ``StreamingSession.release_session`` (``OLD_TREE``): records the row that it appends to the free list."""
    before = len(self.req_to_token_pool.free_slots)
    original(self, session_id)
    _given_back(self.req_to_token_pool.free_slots[before:])


def around_free_rows(original: Original, self: ReqToTokenPool, indices: Sequence[int]) -> None:
    """AROUND ``ReqToTokenPool.free_rows`` (``NEW_TREE``), through which all rows are returned: records them."""
    original(self, indices)
    _given_back(list(indices))


def _given_back(rows: list[int]) -> None:
    tiers = runtime.tiers()
    if tiers is not None:
        tiers.pending.free_rows(rows)
