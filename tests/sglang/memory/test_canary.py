"""The pool's side of SGLang's KV canary; ``tests/e2e/test_canary.py`` has servers that run it."""

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import checks

CPU = torch.device("cpu")


@pytest.fixture
def pool():
    from sglang_kvq.sglang.memory.pool import KVQuantPool

    pool = KVQuantPool.__new__(KVQuantPool)  # the canary reads only its sizes
    pool.size, pool.page_size = 6 * PAGE_SIZE, PAGE_SIZE
    return pool


def _attach(pool, mode: str):
    """Attaches the canary's buffers as SGLang does at start, with ``--kv-canary-real-data`` of this mode."""
    from sglang.srt.kv_canary import config
    from sglang.srt.kv_canary.pool_patcher.api import attach_canary_buffers

    settings = SimpleNamespace(real_kv_hash_mode=config.RealKvHashMode[mode])
    return attach_canary_buffers(pool=pool, config=settings, device=CPU, kv_token_id_vs_position_offset=0)


def test_sglang_finds_the_attacher_by_the_pools_class(pool):
    from sglang_kvq.sglang.memory import canary
    from sglang_kvq.sglang.memory.pool import KVQuantPool

    canary.register(KVQuantPool)
    (group,) = _attach(pool, "NONE")
    last = pool.size + PAGE_SIZE - 1  # page 0 is reserved, so slot ids begin after it
    for buffer in (group.k_head, group.k_tail):
        assert buffer[last].nbytes == 32 and len(buffer) == last + 1 and not buffer.any()
    assert group.k_head.data_ptr() != group.k_tail.data_ptr()
    assert not group.has_v_half and group.kind.name == "FULL"
    assert group.real_kv_sources_k == group.real_kv_sources_v == ()


@pytest.mark.parametrize("mode", ["PARTIAL", "ALL"])
def test_cached_bytes_are_not_hashed(pool, mode):
    from sglang_kvq.sglang.memory import canary
    from sglang_kvq.sglang.memory.pool import KVQuantPool

    canary.register(KVQuantPool)
    with pytest.raises(KVQuantError, match="--kv-canary-real-data.*Leave the flag out"):
        _attach(pool, mode)


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_the_flag_is_accepted(mode):
    checks.check_flags({"kv_canary": mode, "kv_canary_real_data": "none", "kv_canary_sweep_interval": 100}, "cuda")


def test_hashing_bytes_is_refused_at_start():
    with pytest.raises(KVQuantError, match="--kv-canary-real-data all: a page's bytes change"):
        checks.check_flags({"kv_canary": "raise", "kv_canary_real_data": "all"}, "cuda")
