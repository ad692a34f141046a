"""Hook on SGLang's admission: a prefill batch counts the tokens that it computes, not the pages that they fill.

With pages of 64 tokens, SGLang counts a prompt of 200 tokens as 256. Batches of short prompts would then stay smaller
than ``--chunked-prefill-size``, and the GPU would compute fewer tokens at a time than for a cache of single tokens.
"""

from __future__ import annotations

from typing import Any

from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.types import Original, PrefillAdder


def around_charge(
    original: Original, self: PrefillAdder, prefix_len: int, extend_input_len: int, *args: Any, **kwargs: Any
) -> None:
    """AROUND ``PrefillAdder._update_prefill_budget`` (``NEW_TREE``): gives back what SGLang counts beyond new tokens.

    The limits of memory still count whole pages. Without a prefix cache SGLang could then end a chunk in the middle of
    a page, so nothing is given back there. SGLang's own ``exact_chunk_fill`` always ends chunks so.
    """
    original(self, prefix_len, extend_input_len, *args, **kwargs)
    if runtime.tiers() is None or self.tree_cache.disable or self.exact_chunk_fill:
        return
    unused = self.ceil_paged_tokens(extend_input_len) - extend_input_len
    self.rem_input_tokens += unused
    if self.rem_chunk_tokens is not None:
        self.rem_chunk_tokens += unused
