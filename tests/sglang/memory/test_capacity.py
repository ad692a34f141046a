"""The number of requests that run at once, a stage's layers, and the longest prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.releases import OLD_TREE
from sglang_kvq.sglang import compat, observe, runtime
from sglang_kvq.sglang.memory import capacity
from sglang_kvq.sglang.runtime import attach

OLD = compat.applies(OLD_TREE, compat.sglang_version())


@pytest.fixture
def layout_of(monkeypatch):
    """Returns the requests and the layout of one worker, whose pool ``--max-total-tokens`` has made small."""

    def resolve(given: int | None, workers: int, **more):
        config = KVQuantConfig("int2")
        state = runtime.Runtime(config, KVGeometry(1, (PageFormat(64, 64, 0.96, 0.92),)), (0,))
        state.budget_slots = 4000
        monkeypatch.setattr(runtime, "_current", state)
        args = SimpleNamespace(max_running_requests=given, chunked_prefill_size=8192, **more)
        attach(config, args)
        parallel = {"ps": SimpleNamespace(attn_dp_size=workers)} if OLD else {"attn_dp_size": workers}
        configurator = SimpleNamespace(server_args=args, **parallel)
        share = 100 if given is None else max(given // workers, 1)
        requests = capacity.resolve_max_num_reqs(lambda self, tokens: share, configurator, 200 * 64)
        return requests, state.layout

    return resolve


@pytest.mark.parametrize("given", [None, 16])
def test_workers_share_the_running_requests(layout_of, given):
    """A worker has windows for its own share only: more would take BF16 pages from idle conversations."""
    requests, layout = layout_of(given, workers=4)
    alone = layout_of(None if given is None else given // 4, workers=1)
    assert (requests, layout.slots) == (alone[0], alone[1].slots)


def test_fewer_requests_than_workers_are_one_each(layout_of):
    requests, layout = layout_of(3, workers=8)
    assert requests == 1 and layout.slots == layout_of(1, workers=1)[1].slots


def test_every_request_of_streaming_sessions_has_a_page_to_resume(layout_of):
    for more, slots in (({}, 16 * 6 + 1), ({"enable_streaming_session": True}, 16 * 7)):
        requests, layout = layout_of(16, workers=1, **more)
        assert (requests, layout.slots) == (16, slots)


def test_a_server_without_kv_quant_runs_as_many_as_sglang_says(monkeypatch):
    monkeypatch.setattr(runtime, "_current", None)
    configurator = SimpleNamespace(server_args=SimpleNamespace(max_running_requests=None))
    assert capacity.resolve_max_num_reqs(lambda self, tokens: 2049, configurator, 200 * 64) == 2049


def test_a_stage_caches_its_own_layers(monkeypatch):
    monkeypatch.setattr(runtime, "_current", None)
    hf = LlamaConfig(num_hidden_layers=6, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    configurator = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf, model_path="models/llama"),
        layer_info=SimpleNamespace(start_layer=2, end_layer=5),
        server_args=SimpleNamespace(disaggregation_mode="null"),
    )
    state = capacity.start_cache(configurator, KVQuantConfig("int2"), kv_heads=2, num_layers=3)
    assert state.layer_ids == (2, 3, 4) and state.geometry.layers == 3
    with pytest.raises(SystemExit, match="keeps 4 layers of models/llama in its KV cache, but .* 3 have full"):
        capacity.start_cache(configurator, KVQuantConfig("int2"), kv_heads=2, num_layers=4)


@pytest.mark.parametrize(("context", "limit"), [(2048, 1408), (1024, 1018)], ids=["cache", "context"])
def test_prompts_leave_a_page_for_their_answers(layout_of, monkeypatch, context, limit):
    """SGLang's own limit is six tokens below the context, or below the cache if that is smaller."""
    monkeypatch.setattr(observe, "fixed_state", lambda state: {})
    layout_of(None, workers=1)
    scheduler = SimpleNamespace(max_total_num_tokens=1536, max_req_input_len=min(context, 1536) - 6)
    capacity.limit_prompts(None, scheduler)
    told = observe.add_init_info({"max_req_input_len": scheduler.max_req_input_len}, scheduler)
    assert told["max_req_input_len"] == scheduler.max_req_input_len == limit
