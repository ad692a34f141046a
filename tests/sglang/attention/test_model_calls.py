"""SGLang's models over our real pool and backend, on a CPU.

Models find the pools, do not write to the cache themselves, and pass no argument that would be ignored.

Models that can fuse RoPE with the cache write look at the pool first, on any device. ``models.utils`` is told that it
runs on CUDA, where it would fuse for a pool of bfloat16.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry, MemoryLayout
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.sglang import runtime
from sglang_kvq.sglang.runtime import CONFIG_ATTRIBUTE

LAYERS, HEADS, D, TOKENS = 2, 2, 64, 70
CONFIG = KVQuantConfig("int2")


class Model(torch.nn.Module):
    """A model that consists of the given attention layers."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)


def attention(layer_id: int, **more):
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(HEADS, D, D**-0.5, num_kv_heads=HEADS, layer_id=layer_id, **more)


@pytest.fixture
def make_runner(applied, monkeypatch):
    """``make_runner(model)`` returns SGLang's ModelRunner as ``create_backend`` sees it; our hook makes its pool."""
    from sglang_kvq.sglang.memory.pool import build_mha_kv_pool

    server_args = SimpleNamespace(**{CONFIG_ATTRIBUTE: CONFIG}, enable_lora=False, lora_paths=None)

    def make(model, layer_ids=tuple(range(LAYERS)), **hf):
        geometry = KVGeometry(HEADS, (PageFormat(D, D),) * LAYERS)
        state = runtime.Runtime(CONFIG, geometry, layer_ids)
        state.layout = MemoryLayout(geometry, pages=16, slots=16, max_requests=2, whole_windows=2)
        monkeypatch.setattr(runtime, "_current", state)
        configurator = SimpleNamespace(
            server_args=server_args,
            is_draft_worker=False,
            kv_cache_dtype=torch.bfloat16,
            device="cpu",
            model_config=SimpleNamespace(dtype=torch.bfloat16, context_len=4096),
        )
        pool = build_mha_kv_pool(
            pytest.fail, configurator, max_total_num_tokens=16 * PAGE_SIZE, mha_pool_class=None, quant_method=None
        )
        rows = torch.zeros(3, 16 * PAGE_SIZE, dtype=torch.int32)
        state.pages = PagePool.allocate(geometry.formats, kv_heads=HEADS, pages=16, slots=16, req_to_token=rows)
        hf = dict(
            architectures=["Qwen3MoeForCausalLM"],
            num_hidden_layers=layer_ids[-1] + 1,
            num_key_value_heads=HEADS,
            head_dim=D,
            **hf,
        )
        return SimpleNamespace(
            server_args=server_args,
            model=model,
            device="cpu",
            token_to_kv_pool=pool,
            model_config=SimpleNamespace(hf_config=hf, model_path="tiny"),
            req_to_token_pool=SimpleNamespace(req_to_token=rows),
        )

    return make


@pytest.fixture
def backend(make_runner):
    from sglang_kvq.sglang.attention.worker import create_backend

    return create_backend(make_runner(Model(*(attention(i) for i in range(LAYERS)))))


@pytest.fixture
def serving(backend):
    """Yields the backend while models use it."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with forward_context(ForwardContext(attn_backend=backend)):
        yield backend


@pytest.fixture
def on_cuda(monkeypatch):
    from sglang.srt.models import utils

    monkeypatch.setattr(utils, "_is_cuda", True)
    for name in ("is_prefill_context_parallel_enabled", "is_cp_active"):  # 0.5.16 to 0.5.18, and later
        monkeypatch.setattr(utils, name, lambda *args: False, raising=False)
    return utils


def prefill(backend):
    """Returns a planned batch: one new prompt of ``TOKENS`` tokens in row 1, on pages 1 and 2."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    loc = torch.arange(PAGE_SIZE, PAGE_SIZE + TOKENS)
    backend.tiers.pool.req_to_token[1, :TOKENS] = loc.int()
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([TOKENS]),
        seq_lens_cpu=torch.tensor([TOKENS]),
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[TOKENS],
        out_cache_loc=loc,
        positions=torch.arange(TOKENS),
        global_num_token_non_padded_cpu=None,
        mha_return_lse=False,
        _attn_output=None,
    )
    backend.init_forward_metadata(batch)
    return batch


def activations(tokens: int = TOKENS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, HEADS * D, generator=generator).bfloat16() for _ in range(3)]


def stored(backend, layer: int) -> torch.Tensor:
    """Returns the BF16 keys of the prompt's tokens, ``[TOKENS, HEADS, D]``; all are in the window."""
    pages = backend.tiers.pool
    slots = pages.page_slot[1:3].long()
    assert (slots > 0).all()
    return pages.bf16_pages[layer, slots, 0].transpose(1, 2).reshape(2 * PAGE_SIZE, HEADS, D)[:TOKENS]


# -- what models find --------------------------------------------------------------------------------------------------


def test_models_find_the_pools(serving):
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool

    from sglang_kvq.sglang.memory.pool import KVQuantPool

    assert isinstance(get_token_to_kv_pool(), KVQuantPool)
    assert get_req_to_token_pool().req_to_token is serving.tiers.pool.req_to_token


def test_plain_bfloat16_would_be_fused(applied, on_cuda):
    """SGLang would fuse writes into a plain bfloat16 pool; otherwise the tests of fusion could not fail."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.dtype = torch.bfloat16
    with forward_context(ForwardContext(attn_backend=SimpleNamespace(token_to_kv_pool=pool))):
        assert on_cuda.enable_fused_set_kv_buffer(SimpleNamespace())


def test_models_do_not_store_themselves(serving, on_cuda):
    assert on_cuda.enable_fused_set_kv_buffer(SimpleNamespace()) is False


def test_a_model_that_stores_all_the_same_is_told(serving, on_cuda):
    with pytest.raises(NotImplementedError, match="--kv-quant keeps no plain K and V buffers"):
        on_cuda.create_fused_set_kv_buffer_arg(torch.zeros(1), attention(0), SimpleNamespace())


def test_batches_padded_on_a_cpu(backend):
    """Since 0.5.22 SGLang pads lengths with this value under data-parallel attention, with or without graphs."""
    assert backend.get_cpu_graph_seq_len_fill_value() == backend.get_cuda_graph_seq_len_fill_value() == 1


# -- models' own attention modules -------------------------------------------------------------------------------------


class Rope(torch.nn.Module):
    """Stand-in for RoPE that records whether it was asked to write the cache."""

    rotary_dim, asked = D, None

    def forward(self, positions, q, k, fused_set_kv_buffer_arg=None):
        self.asked = fused_set_kv_buffer_arg
        return q, k


class Project(torch.nn.Module):
    """Stand-in for a linear layer that returns a given result, or else its input."""

    def __init__(self, result=None):
        super().__init__()
        self.result = result

    def forward(self, x):
        return (x if self.result is None else self.result), None


def qwen3_moe(qkv, **parts):
    from sglang.srt.models.qwen3_moe import Qwen3MoeAttention

    return bare(
        Qwen3MoeAttention,
        qkv_proj=Project(qkv),
        o_proj=Project(),
        compatible_with_fused_kv_buffer=True,
        use_fused_qk_norm_rope=False,
        use_fused_qk_norm_rope_cpu=False,
        q_norm=None,
        k_norm=None,
        **parts,
    )


def mellum(qkv, **parts):
    from sglang.srt.models.mellum import MellumAttention

    return bare(
        MellumAttention,
        qkv_proj=Project(qkv),
        o_proj=Project(),
        compatible_with_fused_kv_buffer=True,
        use_fused_qk_norm_rope=False,
        q_norm=None,
        k_norm=None,
        **parts,
    )


def bailing_moe(qkv, **parts):
    from sglang.srt.models.bailing_moe import BailingMoEAttention

    return bare(
        BailingMoEAttention,
        query_key_value=Project(qkv),
        dense=Project(),
        use_qk_norm=False,
        is_mrope_enabled=False,
        **parts,
    )


def bare(kind, **parts):
    """Returns an attention module with only these parts: its ``forward`` is SGLang's, its projections are ours."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, part in parts.items():
        setattr(module, name, part)
    return module


@pytest.mark.parametrize("family", [qwen3_moe, mellum, bailing_moe], ids=lambda f: f.__name__)
def test_attention_of_models_that_can_fuse(serving, on_cuda, monkeypatch, family):
    """A prefill stores a layer's keys, and the module answers like RadixAttention alone."""
    batch, (q, k, v) = prefill(serving), activations()
    rope, layer = Rope(), attention(1)
    module = family(
        torch.cat([q, k, v], dim=1),
        attn=layer,
        rotary_emb=rope,
        q_size=HEADS * D,
        kv_size=HEADS * D,
        head_dim=D,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        alt_stream=None,
    )
    monkeypatch.setattr(sys.modules[type(module).__module__], "apply_qk_norm", lambda q, k, **norms: (q, k))
    answer = module(batch.positions, torch.zeros(TOKENS, 8), batch)
    assert rope.asked is None
    assert torch.equal(stored(serving, 1), k.view(TOKENS, HEADS, D))
    assert torch.equal(answer, layer(q, k, v, batch))


# -- what a call may ask -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["forward_extend", "forward_decode"])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(save_kv_cache=False), r"save_kv_cache=False"),
        (dict(k=None, v=None, save_kv_cache=False), "another layer's keys and values"),
        (dict(k=None, v=None), "another layer's keys and values"),
        (dict(q_rope=torch.zeros(1), k_rope=torch.zeros(1)), "q_rope=..., k_rope=..."),
        (dict(return_lse=True), "return_lse=..."),
        (dict(idx_q=torch.zeros(1), idx_k=torch.zeros(1), idx_v=None), "idx_q=..., idx_k=.... "),
        (dict(score_mod=print, aux_tensors=[]), "score_mod=..., aux_tensors=..."),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_call_that_would_be_answered_wrongly(backend, mode, changes, text):
    batch, (q, k, v) = prefill(backend), activations()
    before = backend.tiers.pool.bf16_pages.clone()
    call = {**dict(q=q, k=k, v=v, layer=attention(1), forward_batch=batch, save_kv_cache=True), **changes}
    with pytest.raises(NotImplementedError, match="attention layer 1 asks for") as error:
        getattr(backend, mode)(**call)
    assert text.replace("\\", "") in str(error.value)
    assert torch.equal(backend.tiers.pool.bf16_pages, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned_sinks(serving, dtype):
    """A prefill and a decode step both apply learned sinks: each takes its share of the softmax."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch, (q, k, v) = prefill(serving), activations()
    sinks = torch.tensor([0.5, 3.0], dtype=dtype)
    plain, with_sinks = (attention(1)(q, k, v, batch, sinks=s).view(TOKENS, HEADS, D) for s in (None, sinks))
    # The first token sees itself only.
    score = (q[0].float() * k[0].float()).view(HEADS, D).sum(-1) * D**-0.5
    share = torch.sigmoid(score - sinks.float())
    torch.testing.assert_close(with_sinks[0].float(), plain[0].float() * share[:, None], rtol=2e-2, atol=1e-3)
    step = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([TOKENS]),
        seq_lens_cpu=torch.tensor([TOKENS]),
        out_cache_loc=batch.out_cache_loc[-1:],
    )
    serving.init_forward_metadata(step)
    last = (x[-1:] for x in (q, k, v))
    got = serving.forward_decode(*last, attention(1), step, sinks=sinks).view(HEADS, D)
    torch.testing.assert_close(got, with_sinks[-1], rtol=2e-2, atol=1e-3)


def test_learned_sinks_are_found_before_any_layer_passes_them(applied):
    """Layers without sinks count too; layers that SGLang serves itself do not, and other parameters are no sinks."""
    from sglang_kvq.sglang.attention.layers import sink_types

    def owner(layer_id, **parameters):
        module = Model()
        module.attn = attention(layer_id)
        for name, (size, dtype) in parameters.items():
            setattr(module, name, torch.nn.Parameter(torch.zeros(size, dtype=dtype)))
        return module

    owners = (
        owner(0, sinks=(HEADS, torch.bfloat16)),
        owner(1, attention_sink_bias=(HEADS, torch.float32)),
        owner(2, sinks=(HEADS + 1, torch.bfloat16), bias=(HEADS, torch.bfloat16)),
        owner(3, sinks=(HEADS, torch.float16)),
    )
    model = Model(*owners)
    assert sink_types(model, (0, 1)) == [torch.bfloat16, torch.float32]
    assert sink_types(model, (0, 1, 2)) == [torch.bfloat16, torch.float32, None]


def test_sglangs_models_name_their_sinks_so():
    folder = Path(*find_spec("sglang.srt.models").submodule_search_locations)
    passed = [(f.name, x) for f in sorted(folder.glob("*.py")) for x in re.findall(r"\bsinks=([\w.]+)", f.read_text())]
    assert passed and all(x.startswith("self.") and "sink" in x for _, x in passed), passed


@pytest.mark.parametrize("mode", ["forward_extend", "forward_decode"])
@pytest.mark.parametrize(
    "sinks", [torch.zeros(HEADS + 1), torch.zeros(1), torch.zeros(HEADS, dtype=torch.int32), 0.0], ids=repr
)
def test_sinks_that_are_no_heads_are_refused(backend, mode, sinks):
    batch, (q, k, v) = prefill(backend), activations()
    with pytest.raises(NotImplementedError, match="the sinks of attention layer 1 are .*, not one number for each of"):
        getattr(backend, mode)(q, k, v, attention(1), batch, sinks=sinks)


def test_an_argument_that_asks_for_nothing(serving):
    batch, (q, k, v) = prefill(serving), activations()
    assert torch.equal(attention(1)(q, k, v, batch, sinks=None), attention(1)(q, k, v, batch))


def test_layers_are_found_by_their_ids(make_runner):
    """In a hybrid every fourth layer is cached; the cache's second layer is found by its id, the model's eighth."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    from sglang_kvq.sglang.attention.worker import create_backend

    layers = [attention(i) for i in (3, 7)]
    backend = create_backend(make_runner(Model(*layers), layer_ids=(3, 7), full_attention_interval=4))
    batch, keys = prefill(backend), []
    with forward_context(ForwardContext(attn_backend=backend)):
        for layer in layers:
            q, k, v = (x * (layer.layer_id + 1) for x in activations())
            layer(q, k, v, batch)
            keys.append(k.view(TOKENS, HEADS, D))
    assert torch.equal(stored(backend, 0), keys[0]) and torch.equal(stored(backend, 1), keys[1])
    assert backend.token_to_kv_pool.layer_ids == (3, 7)
    with pytest.raises(SystemExit, match=r"layers.1 is attention layer 4, but the cache holds layers 3, 7"):
        create_backend(make_runner(Model(attention(3), attention(4)), layer_ids=(3, 7)))


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((0, 1, 1), "layers.1 and layers.2 share the cache of layer 1"),
        ((0, 1, 2), "layers.2 is attention layer 2, but the cache holds layers 0, 1"),
    ],
    ids=["shared", "out of range"],
)
def test_layers_without_a_place_of_their_own(make_runner, layers, text):
    from sglang_kvq.sglang.attention.worker import create_backend

    with pytest.raises(SystemExit, match=text):
        create_backend(make_runner(Model(*(attention(i) for i in layers))))


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("sliding_window_size", 128, "a sliding window of 128 tokens"),
        ("logit_cap", 30.0, "logit soft-capping"),
        ("xai_temperature_len", 1024, "a temperature that depends on the position"),
        ("is_cross_attention", True, "cross attention"),
        ("v_head_dim", 128, "different sizes"),
        ("tp_k_head_num", 1, "1 KV heads on this worker, where SGLang sized the cache for 2. .*--enable-dp-attention"),
    ],
)
def test_a_layer_that_attends_in_another_way_is_refused(attribute, value, said):
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_kvq.sglang.attention.layers import check_layers

    model = torch.nn.Module()
    model.attn = RadixAttention(4, 64, 0.125, num_kv_heads=2, layer_id=0)
    check_layers(model, 64, 2)
    setattr(model.attn, attribute, value)
    with pytest.raises(SystemExit, match=f"attn has .*{said}"):
        check_layers(model, 64, 2)
