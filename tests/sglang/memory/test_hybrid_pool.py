"""Our pool inside the one that SGLang builds for a model with recurrent states."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry, MemoryLayout
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sglang import checks, runtime
from sglang_kvq.sglang.memory.build import build_allocator
from sglang_kvq.sglang.memory.pool import KVQuantPool, build_hybrid_linear_kv_pool, build_mha_kv_pool, quantized_pool
from sglang_kvq.sglang.runtime import CONFIG_ATTRIBUTE

CONFIG, HEADS, D, PAGES = KVQuantConfig("int2"), 2, 256, 8
LAYERS = (3, 7)


@pytest.fixture
def state(monkeypatch):
    geometry = KVGeometry(HEADS, (PageFormat(D, 128),) * len(LAYERS))
    state = runtime.Runtime(CONFIG, geometry, LAYERS)
    state.layout = MemoryLayout(geometry, pages=PAGES, slots=6, max_requests=1, whole_windows=1)
    monkeypatch.setattr(runtime, "_current", state)
    return state


def configurator(**changes) -> SimpleNamespace:
    known = dict(
        server_args=SimpleNamespace(**{CONFIG_ATTRIBUTE: CONFIG}),
        is_draft_worker=False,
        kv_cache_dtype=torch.bfloat16,
        model_config=SimpleNamespace(dtype=torch.bfloat16, context_len=4096),
        device="cpu",
    )
    return SimpleNamespace(**(known | changes))


def as_sglang_does(self, *, max_total_num_tokens, req_to_token_pool, mha_pool_class, **_):
    """Builds the pool from these arguments as ``_build_hybrid_linear_kv_pool`` does in all releases."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return HybridLinearKVPool(
        size=max_total_num_tokens,
        page_size=P,
        dtype=self.kv_cache_dtype,
        head_num=HEADS,
        head_dim=D,
        full_attention_layer_ids=list(LAYERS),
        device=self.device,
        mamba_pool=req_to_token_pool.mamba_pool,
        start_layer=0,
        full_kv_pool_class=mha_pool_class,
        quant_method=None,
        use_mla=False,
    )


def build(kvc, **more):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    rows = SimpleNamespace(mamba_pool=SimpleNamespace(), req_to_token=torch.zeros(2, PAGES * P, dtype=torch.int32))
    sizes = dict(max_total_num_tokens=PAGES * P, req_to_token_pool=rows, mha_pool_class=MHATokenToKVPool)
    return rows, build_hybrid_linear_kv_pool(as_sglang_does, kvc, **sizes, **more)


def test_it_holds_our_pool(applied, state):
    _, pool = build(configurator(), mla_pool_class=None, dsa_pool_class=None)
    ours = quantized_pool(pool)
    assert isinstance(ours, KVQuantPool) and ours is pool.full_kv_pool and ours.layer_ids == LAYERS
    assert (ours.layer_num, ours.start_layer, ours.end_layer) == (2, 3, 8)  # SGLang's transfers number layers by them
    assert pool.mem_usage == pytest.approx(state.layout.total_bytes / 2**30)
    # Models that fuse RoPE with the cache write ask for the dtype; only our pool's dtype forbids fusing.
    assert ours.dtype == torch.uint8 and pool.dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="keeps no plain K and V buffers"):
        pool.get_key_buffer(LAYERS[0])


def test_both_pools_are_allocated_for_it(applied, state):
    kvc = configurator()
    rows, pool = build(kvc)
    allocator = build_allocator(
        None,
        kvc,
        sizes=SimpleNamespace(max_total_num_tokens=PAGES * P),
        token_to_kv_pool=pool,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=None,
    )
    assert state.pages.layers == len(LAYERS) and allocator.available_size() == PAGES * P
    assert allocator.get_kvcache() is pool, "SGLang asks it for its states"
    result = SimpleNamespace(token_to_kv_pool=pool, token_to_kv_pool_allocator=allocator)
    checks.after_configure(result, kvc)

    class Sparse(type(pool)):
        """Stand-in for a pool like ``QSATokenToKVPool``, whose attention reads more than keys and values."""

    pool.__class__ = Sparse
    with pytest.raises(SystemExit, match="SGLang built a Sparse as KV cache pool"):
        checks.after_configure(result, kvc)


@pytest.mark.parametrize(
    "changes", [dict(is_draft_worker=True), dict(server_args=SimpleNamespace())], ids=["draft", "off"]
)
def test_others_keep_sglangs(applied, state, changes):
    _, pool = build(configurator(**changes))
    assert quantized_pool(pool) is None and type(pool.full_kv_pool).__name__ == "MHATokenToKVPool"
    asked = dict(max_total_num_tokens=PAGES * P, mha_pool_class=type(pool.full_kv_pool), quant_method="another")
    assert build_mha_kv_pool(lambda self, **given: given, configurator(**changes), **asked) == asked


def test_another_dtype(applied, state):
    with pytest.raises(SystemExit, match="Add --dtype bfloat16"):
        build(configurator(model_config=SimpleNamespace(dtype=torch.float16)))
