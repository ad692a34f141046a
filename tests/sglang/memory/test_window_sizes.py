"""The division of memory between windows and the cache, by arithmetic and by SGLang's own configurator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry, bf16_slots
from sglang_kvq.cache.memory.windows import STOCK_RATIO, WindowNeed, need_of, split_windows
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.architectures import unsupported_windows
from sglang_kvq.sglang.doctor import capacity as doctor_capacity
from sglang_kvq.sglang.runtime import CONFIG_ATTRIBUTE

#: gpt-oss-120b on one GPU: 18 layers of each kind, 8 KV heads of 64.
LAYERS, KV_HEADS, D = 18, 8, 64
GEOMETRY = KVGeometry(KV_HEADS, (PageFormat(D, D),) * LAYERS)
BF16 = 2 * KV_HEADS * D * 2 * LAYERS  # bytes per token, for either kind of layers
CONFIG = KVQuantConfig("int2")
GB = 10**9


def split(budget: int = 60 * GB, **changes):
    return split_windows(budget, GEOMETRY, **{**dict(bf16_budget=0.1, window_bytes=BF16, wanted=200_000), **changes})


def taken(found) -> float:
    """Returns the bytes of all three parts."""
    bf16_pages = found.bf16_budget * 0.1
    return found.window_tokens * BF16 + bf16_pages + found.tokens * GEOMETRY.page_bytes / PAGE_SIZE


@pytest.mark.parametrize("changes", [{}, dict(ratio=0.8), dict(ratio=0.02), dict(wanted=10**9)], ids=str)
def test_all_of_the_budget_is_used_and_no_more(changes):
    found = split(**changes)
    assert 0.9999 * 60 * GB < taken(found) <= 60 * GB
    assert found.tokens % PAGE_SIZE == found.window_tokens % PAGE_SIZE == 0


def test_windows_get_what_they_need():
    found = split()
    assert 200_000 - PAGE_SIZE < found.window_tokens <= 200_000 and found.ratio < 0.03
    assert split(wanted=10**9).ratio == pytest.approx(STOCK_RATIO, rel=1e-3), "no more than SGLang gives them"
    assert split(ratio=0.5).ratio == pytest.approx(0.5, rel=1e-3), "as the user set it"
    # The gain is large at 2.5 bits and heads of 64: at 0.8, windows would take most of the memory.
    assert found.tokens > 3 * split(ratio=0.8).tokens


def test_what_a_draft_model_takes_comes_off():
    assert split(other_bytes=5000).tokens < 0.6 * split().tokens


def test_need():
    need = need_of(127, kept_behind=128, drafts=1, chunk=8192, batches=2, prefixes=None)
    assert need == WindowNeed(per_request=127 + 128 + 128, per_prefix=192, batches=2 * 8192 + 64, prefixes=None)
    assert need.tokens(100) == -(-(100 * 383 + 400 * 192 + 16448) // 64) * 64
    none = need_of(127, kept_behind=128, drafts=4, chunk=8192, batches=1, prefixes=0)
    assert none.tokens(10) == -(-(10 * (127 + 512 + 128 + 6) + 8256) // 64) * 64


class HfConfig(dict):
    """A config.json whose entries can also be read as attributes."""

    __getattr__ = dict.get


def kvc(draft_layers: int = 0, **changes):
    """Returns the parts of a KVCacheConfigurator that either release reads; a draft has the target's heads."""
    hf = dict(
        architectures=["GptOssForCausalLM"],
        num_hidden_layers=2 * LAYERS,
        layer_types=["sliding_attention", "full_attention"] * LAYERS,
        num_key_value_heads=KV_HEADS,
        num_attention_heads=64,
        head_dim=D,
    )
    ids = dict(
        swa_attention_layer_ids=list(range(0, 2 * LAYERS, 2)), full_attention_layer_ids=list(range(1, 2 * LAYERS, 2))
    )
    server_args = SimpleNamespace(
        **{CONFIG_ATTRIBUTE: CONFIG},
        **{
            **dict(
                swa_full_tokens_ratio=0.8,
                max_running_requests=None,
                chunked_prefill_size=8192,
                disable_overlap_schedule=False,
                disable_radix_cache=False,
                kv_cache_dtype="auto",
                speculative_algorithm=None,
                speculative_num_draft_tokens=None,
                speculative_draft_model_path=None,
                speculative_draft_kv_cache_dtype=None,
                enable_hisparse=False,
            ),
            **changes,
        },
    )
    model = SimpleNamespace(
        hf_config=HfConfig(hf),
        model_path="tiny",
        head_dim=D,
        v_head_dim=D,
        swa_head_dim=D,
        swa_v_head_dim=D,
        attention_arch=None,
        get_num_kv_heads=lambda *_: KV_HEADS,
        get_swa_num_kv_heads=lambda *_: KV_HEADS,
        **ids,
    )
    return SimpleNamespace(
        server_args=server_args,
        model_config=model,
        layer_info=SimpleNamespace(start_layer=0, end_layer=2 * LAYERS, **ids),
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        is_draft_worker=False,
        is_hybrid_swa=True,
        sliding_window_size=127,
        page_size=PAGE_SIZE,
        spec_algorithm=SimpleNamespace(
            is_eagle=lambda: draft_layers > 0,
            is_standalone=lambda: False,
            is_dflash_family=lambda: False,
            is_none=lambda: draft_layers == 0,
        ),
        spec_aux_config=SimpleNamespace(eagle_draft_num_layers=draft_layers, eagle_draft_swa_num_layers=None),
        use_mla_backend=False,
        fused_entry_bytes=lambda kind: None,
    )


@pytest.fixture
def configured(applied, monkeypatch):
    """``configured(**settings)`` returns SGLang's configurator, made as a scheduler makes it."""
    from sglang.srt.model_executor import pool_configurator

    from sglang_kvq.sglang import plugin
    from sglang_kvq.sglang.memory import window_sizes

    parallel = SimpleNamespace(attn_tp_size=1, attn_dp_size=1, attn_dcp_size=1)
    monkeypatch.setattr(pool_configurator, "get_parallel", lambda: parallel)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setattr("sglang.srt.layers.cp.utils.get_glm_dsa_layer_split_effective_num_layers", lambda kvc, n: n)
    monkeypatch.setattr(pool_configurator, "is_deepseek_v4", lambda config: False)
    monkeypatch.setattr(runtime, "_current", None)
    monkeypatch.setattr(plugin, "_config", CONFIG)

    def make(**settings):
        found = kvc(**settings)
        ratio, unset = found.server_args.swa_full_tokens_ratio, object()
        if hasattr(pool_configurator, "get_schedule"):  # 0.5.23 reads its settings from a context
            bag = SimpleNamespace(
                swa_full_tokens_ratio=ratio,
                max_running_requests=found.server_args.max_running_requests,
                _swa_full_tokens_ratio_explicitly_set=unset,
                chunked_prefill_size=8192,
            )
            memory = SimpleNamespace(
                enable_unified_memory=False, disable_radix_cache=found.server_args.disable_radix_cache
            )
            monkeypatch.setattr(pool_configurator, "get_schedule", lambda: bag)
            monkeypatch.setattr(pool_configurator, "get_memory", lambda: memory)
            found.server_args._swa_full_tokens_ratio_explicitly_set = settings.get("swa_full_tokens_ratio") is not None
        return pool_configurator.create_memory_pool_configurator(found)

    assert window_sizes.STOCK_RATIO == STOCK_RATIO
    return make


def test_sglang_divides_as_we_say(configured, caplog):
    caplog.set_level("INFO", logger="sglang_kvq")
    sizes = configured().calculate_pool_sizes(60 * GB, PAGE_SIZE)
    state = runtime.current()
    assert state.layer_ids == tuple(range(1, 2 * LAYERS, 2))
    assert state.windows.layer_ids == frozenset(range(0, 2 * LAYERS, 2))
    requests = bf16_slots(CONFIG, GEOMETRY, 60 * GB) // CONFIG.slots_per_request
    need = state.windows.need.tokens(requests)
    assert need - 2 * PAGE_SIZE <= sizes.swa_max_total_num_tokens <= need
    assert state.windows.tokens == sizes.swa_max_total_num_tokens
    bf16_pages = (state.budget_slots + 1) * GEOMETRY.slot_bytes + GEOMETRY.page_bytes
    records = sizes.full_max_total_num_tokens * GEOMETRY.page_bytes / PAGE_SIZE
    used = bf16_pages + records + sizes.swa_max_total_num_tokens * BF16
    assert 0.999 * 60 * GB < used <= 60 * GB
    plain = 60 * GB / (BF16 * 1.8)
    assert sizes.max_total_num_tokens > 6 * plain
    assert "divides the memory once: the model's sliding windows" in caplog.text


@pytest.mark.parametrize("gigabytes", [2, 60])
def test_doctor_says_what_a_server_has(configured, gigabytes):
    sizes = configured().calculate_pool_sizes(gigabytes * GB, PAGE_SIZE)
    model = SimpleNamespace(
        is_hybrid_swa=True,
        sliding_window_size=127,
        swa_attention_layer_ids=range(0, 2 * LAYERS, 2),
        get_swa_num_kv_heads=lambda tp: KV_HEADS,
        swa_head_dim=D,
        swa_v_head_dim=D,
    )
    found = doctor_capacity.capacity(CONFIG, GEOMETRY, model, 1, gigabytes * GB, 8192)
    assert found.tokens == sizes.full_max_total_num_tokens
    assert f"{sizes.swa_max_total_num_tokens:,} tokens" in found.beside
    assert found.tokens_bf16 == pytest.approx(gigabytes * GB / (BF16 * (1 + STOCK_RATIO)), abs=PAGE_SIZE)


def test_a_draft_model_is_priced_by_itself(configured, monkeypatch):
    """The draft's cache has as many BF16 tokens as the full-attention layers have tokens, within the same budget."""
    from sglang_kvq.sglang.memory import window_sizes

    draft_bytes = 3 * BF16 // LAYERS  # per token: three layers of the target's heads
    settings = dict(max_running_requests=16, speculative_algorithm="EAGLE", speculative_num_draft_tokens=4)
    sizes = configured(draft_layers=3, **settings).calculate_pool_sizes(60 * GB, PAGE_SIZE)
    state = runtime.current()
    assert sizes.swa_max_total_num_tokens == pytest.approx(16 * (127 + 512 + 134 + 4 * 192) + 2 * 8192, rel=0.02)
    bf16_pages = (state.budget_slots + 1) * GEOMETRY.slot_bytes + GEOMETRY.page_bytes
    records = sizes.full_max_total_num_tokens * (GEOMETRY.page_bytes / PAGE_SIZE + draft_bytes)
    used = bf16_pages + records + sizes.swa_max_total_num_tokens * BF16
    assert 0.999 * 60 * GB < used <= 60 * GB
    monkeypatch.setattr(runtime, "_current", None)
    monkeypatch.setattr(window_sizes, "draft_page_bytes", lambda kvc: 0)
    without = configured(draft_layers=3, **settings).calculate_pool_sizes(60 * GB, PAGE_SIZE)
    assert without.full_max_total_num_tokens > 1.4 * sizes.full_max_total_num_tokens


def test_a_concurrency_that_is_set_decides(configured):
    few = configured(max_running_requests=16).calculate_pool_sizes(60 * GB, PAGE_SIZE)
    assert few.swa_max_total_num_tokens == pytest.approx(16 * (383 + 4 * 192) + 2 * 8192, rel=0.02)
    assert few.max_total_num_tokens > 8 * 60 * GB / (BF16 * 1.8)


def test_a_ratio_that_is_set_is_kept(configured):
    sizes = configured(swa_full_tokens_ratio=0.5).calculate_pool_sizes(60 * GB, PAGE_SIZE)
    assert sizes.swa_max_total_num_tokens == pytest.approx(sizes.full_max_total_num_tokens / 2, rel=1e-3)


def test_fewer_tokens_need_no_smaller_windows(configured):
    configurator = configured(max_running_requests=16)
    windows = configurator.calculate_pool_sizes(60 * GB, PAGE_SIZE).swa_max_total_num_tokens
    sizes = configurator.calculate_pool_sizes_from_max_tokens(200_000, PAGE_SIZE)
    assert sizes.max_total_num_tokens == 200_000 // 64 * 64
    assert windows - PAGE_SIZE <= sizes.swa_max_total_num_tokens <= windows
    few = configurator.calculate_pool_sizes_from_max_tokens(4096, PAGE_SIZE)
    assert few.max_total_num_tokens == few.swa_max_total_num_tokens == 4096


def test_without_a_radix_tree_ours_is_used_too(configured):
    """Without a radix tree SGLang has another configurator, which knows nothing of BF16 pages; ours replaces it too."""
    sizes = configured(max_running_requests=16, disable_radix_cache=True).calculate_pool_sizes(60 * GB, PAGE_SIZE)
    assert sizes.swa_max_total_num_tokens == pytest.approx(16 * 383 + 2 * 8192, rel=0.02)
    assert runtime.current().budget_slots > 0


def test_no_memory_is_said(configured):
    with pytest.raises(
        SystemExit, match="do not hold a single page in addition to the sliding windows. Raise --mem-fraction-static"
    ):
        configured().calculate_pool_sizes(10_000, PAGE_SIZE)


def test_layers_that_sglang_counts_otherwise_are_refused(configured, monkeypatch):
    from sglang.srt.model_executor import pool_configurator

    found = kvc()
    for holder in (found.model_config, found.layer_info):
        holder.full_attention_layer_ids = list(range(0, 2 * LAYERS, 2))
    configured()
    with pytest.raises(SystemExit, match="according to SGLang, layers"):
        pool_configurator.HybridSWAPoolConfigurator(found)


def test_heads_of_two_sizes_are_refused():
    model = SimpleNamespace(
        is_hybrid_swa=True,
        full_attention_layer_ids=[1],
        is_hybrid_swa_compress=True,
        head_dim=512,
        v_head_dim=512,
        swa_head_dim=256,
        swa_v_head_dim=256,
    )
    assert "heads of 256 and 256 elements" in unsupported_windows(model, ())
