"""Puts our pool into SGLang's pool of a model with sliding windows; SGLang still keeps the layers with windows."""

from __future__ import annotations

from typing import Any

from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat
from sglang_kvq.sglang.memory.pool import KVQuantPool, make_pool
from sglang_kvq.sglang.runtime import config_of
from sglang_kvq.sglang.types import Configurator, KVCache, Original


def build_hybrid_swa_kv_pool(original: Original, self: Configurator, *, mha_pool_class: type, **rest: Any) -> Any:
    """AROUND ``KVCacheConfigurator._build_hybrid_swa_kv_pool``: replaces the pool of the layers that see all tokens.

    SGLang builds that pool and the one of the layers with windows by ``mha_pool_class``.

    Raises:
        SystemExit: SGLang put the two pools elsewhere than expected.
    """
    if config_of(self.server_args) is None or self.is_draft_worker:
        return original(self, mha_pool_class=mha_pool_class, **rest)
    made: list[KVCache] = []

    def make(*, size: int, allocation_label: str | None = None, **more: Any) -> KVCache:
        # Older releases build the windows' pool first; newer ones name the pool by a label.
        old = compat.applies(OLD_TREE, compat.sglang_version())
        is_full = len(made) == 1 if old else allocation_label == "Full"
        if not old:
            more["allocation_label"] = allocation_label
        made.append(make_pool(self, size) if is_full else mha_pool_class(size=size, **more))
        return made[-1]

    pool = original(self, mha_pool_class=make, **rest)
    if not isinstance(pool.full_kv_pool, KVQuantPool) or isinstance(pool.swa_kv_pool, KVQuantPool) or len(made) != 2:
        raise SystemExit(
            f"--kv-quant: SGLang {compat.sglang_version()} builds the pools of sliding windows in a way that "
            "sglang-kvq does not know. Install a release that it supports, or leave out --kv-quant."
        )
    return pool
