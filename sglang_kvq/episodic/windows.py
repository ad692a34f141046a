"""A conversation in windows of whole pages: all that a server can do, which sees tokens and no turns."""

from __future__ import annotations

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError

#: Pages of a window.
WINDOW_PAGES = 2


def windows(tokens: int, pages: int = WINDOW_PAGES) -> list[tuple[int, int]]:
    """Token spans ``[start, end)`` of all runs of ``pages`` whole pages, one page after the other.

    They overlap, so that what is said across two pages is whole in some window. A history of fewer whole pages is one
    window; one of none has none. More tokens append windows and change none, except the one of a short history.

    Raises:
        KVQuantError: fewer than one page, or than no tokens.
    """
    if pages < 1 or tokens < 0:
        raise KVQuantError(f"windows of {pages} pages in {tokens} tokens: give 1 page or more, 0 tokens or more.")
    whole = tokens // PAGE_SIZE
    size = min(pages, whole)
    return [(n * PAGE_SIZE, (n + size) * PAGE_SIZE) for n in range(whole - size + 1)] if whole else []
