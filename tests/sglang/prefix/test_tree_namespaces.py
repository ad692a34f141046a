"""Requests of the same tokens that SGLang keeps apart in its tree: neither takes the other's BF16 pages.

The tests are for ``OLD_TREE``, which looks a finished request's pages up again; later trees rewrite the row themselves.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import torch

from sglang_kvq.cache.pending import MovedBF16Pages
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat, runtime
from tests.sglang.memory.test_allocator import allocator, extend

__all__ = ["allocator"]


def finish(tree, allocator, row: int, tokens: list[int], **names) -> torch.Tensor:
    """Computes and finishes a request of these tokens; returns the pages it had."""
    locations = extend(allocator, len(tokens))
    tree.req_to_token_pool.req_to_token[row, : len(tokens)] = locations.int()
    req = SimpleNamespace(
        req_pool_idx=row,
        origin_input_ids=array("q", tokens),
        output_ids=array("q"),
        cache_protected_len=0,
        last_node=tree.root_node,
        priority=0,
        swa_uuid_for_lock=None,
        **{"extra_key": None, "cache_salt": None, **names},
    )
    tree.cache_finished_req(req, kv_len_to_handle=len(tokens))
    return locations[::P] // P


def moves() -> list[tuple[list[int], list[int]]]:
    """Returns the moves recorded since the last call that change something."""
    events = runtime.tiers().pending.drain(torch.device("cpu"))
    found = [(ids[0].tolist(), ids[1].tolist()) for ids in events if isinstance(ids, MovedBF16Pages)]
    return [(own, kept) for own, kept in found if own != kept]


if compat.applies(OLD_TREE, compat.sglang_version()):

    def test_salted_requests_keep_their_own_pages(applied, allocator, monkeypatch):
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        monkeypatch.setattr(applied, "_config", KVQuantConfig("int2"))
        rows = ReqToTokenPool(size=4, max_context_len=8 * P, device="cpu", enable_memory_saver=False)
        tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=allocator,
                page_size=P,
            )
        )
        tokens = list(range(2 * P))
        first = finish(tree, allocator, 1, tokens)
        assert not moves()
        again = finish(tree, allocator, 2, tokens)
        assert moves() == [(again.tolist(), first.tolist())]
        for name in ("extra_key", "cache_salt"):
            held = allocator.available_size()
            finish(tree, allocator, 3, tokens, **{name: "other"})
            kept_apart = held - allocator.available_size() == 2 * P  # up to 0.5.17 the salt is part of extra_key
            assert kept_apart or name == "cache_salt"
            assert bool(moves()) is not kept_apart, f"{name}: its pages are in the tree and their BF16 copies are taken"
