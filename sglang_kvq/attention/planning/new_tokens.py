"""Decides which new tokens of a prefill batch are quantized directly and which go to BF16 pages."""

from __future__ import annotations

import numpy as np

from sglang_kvq.constants import PAGE_SIZE


def direct_tokens(prefix_lens: list[int], new_lens: list[int], sink_pages: int, recent_pages: int) -> np.ndarray:
    """Returns the first new token of each page that is quantized directly; tokens of other pages go to BF16 pages.

    A page is quantized directly if this batch writes all of it, and it lies outside the request's sinks and window
    afterwards. Returns int64 indices into the concatenated new tokens.
    """
    direct = [np.empty(0, np.int64)]
    start = 0
    for prefix, new in zip(prefix_lens, new_lens):
        first = max(-(-prefix // PAGE_SIZE), sink_pages)
        last = max((prefix + new) // PAGE_SIZE - recent_pages, first)
        begin, end = first * PAGE_SIZE - prefix, last * PAGE_SIZE - prefix
        if last > first:
            direct.append(start + np.arange(begin, end, PAGE_SIZE))
        start += new
    return np.concatenate(direct)
