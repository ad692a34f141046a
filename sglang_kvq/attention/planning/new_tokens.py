"""Destinations of the new tokens of a prefill batch."""

from __future__ import annotations

import numpy as np

from sglang_kvq.constants import PAGE_SIZE


def split_new_tokens(
    prefix_lens: list[int], new_lens: list[int], sink_pages: int, recent_pages: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the new tokens that go to BF16 pages, and the starts of pages quantized directly from activations.

    A page is quantized directly if this batch writes all of it and leaves it outside the request's sinks and window.
    Returns int64 indices into the concatenated new tokens.
    """
    bf16_page: list[np.ndarray] = []
    direct: list[np.ndarray] = []
    start = 0
    for prefix, new in zip(prefix_lens, new_lens):
        first = max(-(-prefix // PAGE_SIZE), sink_pages)
        last = max((prefix + new) // PAGE_SIZE - recent_pages, first)
        begin, end = first * PAGE_SIZE - prefix, last * PAGE_SIZE - prefix
        if last > first:
            direct.append(start + np.arange(begin, end, PAGE_SIZE))
            bf16_page += [start + np.arange(0, begin), start + np.arange(end, new)]
        else:
            bf16_page.append(start + np.arange(new))
        start += new
    return _join(bf16_page), _join(direct)


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts])
