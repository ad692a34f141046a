"""An SGLang plugin for tests: the cache has 20 MB, and no flag says how to divide them."""

from __future__ import annotations

BYTES = 20 << 20


def install() -> None:
    from sglang_kvq.sglang.memory import capacity

    given = capacity.calculate_pool_sizes

    def limited(original, self, available_bytes, page_size):
        return given(original, self, min(available_bytes, BYTES), page_size)

    capacity.calculate_pool_sizes = limited
