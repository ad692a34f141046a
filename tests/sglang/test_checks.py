"""Each setting and each kind of model that ``--kv-quant`` refuses; the usual ones pass."""

from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from sglang_kvq.cache.pool import PagePool
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError, typed
from sglang_kvq.releases import NEWEST
from sglang_kvq.sglang import checks, compat
from sglang_kvq.sglang.runtime import CONFIG_ATTRIBUTE, config_of
from tests.sglang.conftest import LLAMA

CONFIG = KVQuantConfig("hadamard")


def _fields() -> dict:
    from sglang.srt.server_args import ServerArgs

    if hasattr(ServerArgs, "__struct_fields__"):
        return dict(zip(reversed(ServerArgs.__struct_fields__), reversed(ServerArgs.__struct_defaults__)))
    return {f.name: f.default for f in ServerArgs.__dataclass_fields__.values()}


def _bad(refused: checks.Refused):
    """Returns a value that a user might give, and that is refused."""
    known = {"kv_cache_dtype": "fp8_e4m3", "dcp_size": 2, "attn_cp_size": 2}
    return known.get(refused.field, True if refused.allowed == (None, False, "") else "something")


@pytest.mark.parametrize("refused", checks.REFUSED, ids=lambda r: r.field)
def test_setting_is_refused_by_name(refused):
    with pytest.raises(KVQuantError, match=f"{typed(refused.field, True)}.*{refused.why[:20]}"):
        checks.check_flags({refused.field: _bad(refused)}, "cpu")


@pytest.mark.parametrize("refused", checks.REFUSED, ids=lambda r: r.field)
def test_default_is_not_refused(refused):
    assert _fields().get(refused.field, refused.allowed[0]) in refused.allowed


#: Fields that exist in only one of SGLang's two generations.
SOME_RELEASES = {
    "enable_unified_cache_external_linker",
    "disaggregation_decode_retraction_backup",
    "enable_pd_role_switch",
    "enable_prefill_context_parallel",
    "enable_dsa_prefill_context_parallel",
    "enable_kv_cache_sharding",
    "weight_cache_mode",
    "startup_weight_load_mode",
    "enable_nvidia_megakernel",
    "enable_amd_monokernel",
    "speculative_draft_kv_cache_dtype",
}


def test_fields_exist():
    assert {r.field for r in checks.REFUSED} - SOME_RELEASES <= set(_fields())


def test_all_refused_settings_are_listed_at_once():
    with pytest.raises(KVQuantError) as error:
        checks.check_flags({"enable_lmcache": True, "dcp_size": 2, "page_size": 1}, "cpu")
    assert all(flag in str(error.value) for flag in ("--enable-lmcache", "--dcp-size 2", "--page-size 1"))


@pytest.mark.parametrize(
    "values",
    [
        {"page_size": 16},
        {"attention_backend": "flashinfer"},
        {"prefill_attention_backend": "fa3"},
        {"decode_attention_backend": "fa3"},
        {"attention_backend": "triton"},
        {"cuda_graph_backend_prefill": "breakable"},
        {"chunked_prefill_size": 100},
    ],
    ids=lambda v: next(iter(v)),
)
def test_other_choice_is_refused(values):
    field, value = next(iter(values.items()))
    with pytest.raises(KVQuantError, match=f"--{field.replace('_', '-')} {value}"):
        checks.check_flags(values, "cpu")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"page_size": 64, "attention_backend": "triton"},
        {"kv_cache_dtype": "bfloat16", "chunked_prefill_size": 4096},
        {"enable_lora": True, "tp_size": 2, "dp_size": 2, "disable_radix_cache": True, "chunked_prefill_size": -1},
    ],
    ids=["nothing", "what is implied", "same dtype", "LoRA, TP, DP"],
)
def test_harmless_settings_pass(values):
    checks.check_flags(values, "cuda")


@pytest.mark.parametrize("entry", checks.REFUSED_ENVIRONMENT, ids=lambda e: e[0])
def test_environment_switch_is_refused(entry, monkeypatch):
    name, _, versions = entry
    monkeypatch.setenv(name, "0")
    checks.check_flags({}, "cpu")
    monkeypatch.setenv(name, "1")
    if compat.applies(versions, compat.sglang_version()):
        with pytest.raises(KVQuantError, match=f"{name}=1"):
            checks.check_flags({}, "cpu")


def test_other_device_is_refused():
    with pytest.raises(KVQuantError, match="--device xpu"):
        checks.device_of({"device": "xpu"})
    assert checks.device_of({"device": "cuda:1"}) == "cuda"
    assert checks.device_of({}) == "cpu"


def test_rocm_is_refused(monkeypatch):
    """SGLang names ROCm's devices cuda too, and there models write K and V into the pool whatever its dtype."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(KVQuantError, match="ROCm"):
        checks.device_of({"device": "cuda"})
    assert checks.device_of({"device": "cpu"}) == "cpu"


GPT_OSS = dict(architectures=["GptOssForCausalLM"], model_type="gpt_oss", sliding_window=128)
HYBRID = dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", head_dim=256, full_attention_interval=2)
#: A hybrid's config as Qwen 3.5 writes it, with its vision part.
QWEN3_5 = dict(
    architectures=["Qwen3_5ForConditionalGeneration"],
    model_type="qwen3_5",
    text_config={
        **LLAMA,
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    vision_config={"model_type": "qwen3_5"},
)
QWEN3_5_TEXT = {**QWEN3_5["text_config"], "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
MODELS = {
    "MLA": (
        dict(
            architectures=["DeepseekV2ForCausalLM"],
            model_type="deepseek_v2",
            kv_lora_rank=64,
            v_head_dim=64,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
        ),
        "MLA attention",
    ),
    "MLA and linear attention": (
        dict(
            architectures=["KimiLinearForCausalLM"],
            model_type="kimi_linear",
            kv_lora_rank=64,
            v_head_dim=64,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            linear_attn_config=dict(
                full_attn_layers=[2], kda_layers=[1], head_dim=64, num_heads=4, short_conv_kernel_size=4
            ),
        ),
        "MLA attention",
    ),
    "sparse attention": (
        dict(
            architectures=["MiniMaxM3SparseForCausalLM"],
            sparse_attention_config=dict(sparse_num_index_heads=1, sparse_index_dim=64, sparse_topk_blocks=4),
        ),
        "sparse attention",
    ),
    "an index of tokens": (HYBRID | dict(indexer_budget=2048), "sparse attention"),
    "linear attention": (HYBRID | dict(architectures=["SomeHybridForCausalLM"]), "recurrent state.*are served: Qwen3"),
    "mamba": (dict(architectures=["FalconH1ForCausalLM"], model_type="falcon_h1"), "recurrent state"),
    "windows in the plain pool": (
        dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", sliding_window=512),
        r"sliding windows in some layers.*\(of this architecture\), so that quantizing the others would save little",
    ),
    "windows in the plain pool: Cohere": (
        dict(architectures=["Cohere2ForCausalLM"], model_type="cohere2", sliding_window=512, num_hidden_layers=4),
        "sliding windows in some layers",
    ),
    "windows in the plain pool: Olmo": (
        dict(architectures=["Olmo3ForCausalLM"], model_type="olmo3", sliding_window=512, num_hidden_layers=4),
        "sliding windows in some layers",
    ),
    "windows everywhere": (
        {**GPT_OSS, "layer_types": ["sliding_attention"] * 2},
        "a sliding window in every layer",
    ),
    "soft-capping": (
        dict(
            architectures=["Gemma2ForCausalLM"],
            model_type="gemma2",
            attn_logit_softcapping=50.0,
            layer_types=["full_attention"] * 2,
        ),
        r"logit soft-capping \(50.0\)",
    ),
    "chunks": (
        dict(
            architectures=["Llama4ForConditionalGeneration"],
            model_type="llama4",
            text_config={**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 8192},
            vision_config={"model_type": "llama4_vision_model"},
        ),
        "chunks of 8192 tokens",
    ),
    "encoder-decoder": (
        dict(
            architectures=["WhisperForConditionalGeneration"],
            model_type="whisper",
            d_model=256,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
        ),
        "encoder with cross attention",
    ),
    "cross attention": (
        dict(
            architectures=["MllamaForConditionalGeneration"],
            model_type="mllama",
            text_config={**LLAMA, "model_type": "mllama_text_model"},
            vision_config={"model_type": "mllama_vision_model"},
        ),
        "encoder with cross attention",
    ),
    "embedding": (dict(architectures=["BertModel"], model_type="bert"), "no text generation"),
    "head_dim": (dict(head_dim=80), r"heads of 80 elements \(supported: 64"),
    "k and v differ": (dict(v_head_dim=32), "key heads of 64 and value heads of 32"),
    "float16": (dict(torch_dtype="float16"), "Add --dtype bfloat16"),
}


@pytest.mark.parametrize(("changes", "what"), MODELS.values(), ids=MODELS.keys())
def test_model_is_refused(model_folder, changes, what):
    from sglang.srt.configs.model_config import ModelConfig

    with pytest.raises(KVQuantError, match=what):
        checks.check_model(ModelConfig(model_path=model_folder(**changes)), CONFIG)


def test_a_text_model_that_a_flag_makes_an_embedding_model_is_refused_with_that_flag(model_folder):
    from sglang.srt.configs.model_config import ModelConfig

    with pytest.raises(KVQuantError, match="no text generation.*--is-embedding"):
        checks.check_model(ModelConfig(model_path=model_folder(), is_embedding=True), CONFIG)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", use_sliding_window=False, sliding_window=4096),
        dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128),
        dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None),
        GPT_OSS,
        dict(
            architectures=["MellumForCausalLM"],
            model_type="mellum",
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"],
        ),
        HYBRID,
        QWEN3_5,
        QWEN3_5 | dict(architectures=["Qwen3_5MoeForConditionalGeneration"]),
    ],
    ids=["llama", "qwen2", "qwen3", "mistral", "gpt-oss", "mellum", "qwen3_next", "qwen3_5", "qwen3_5_moe"],
)
def test_model_is_accepted(model_folder, monkeypatch, changes):
    """Some releases refuse some of these models (``releases.WITHOUT_WINDOWS``); the next test covers that."""
    from sglang.srt.configs.model_config import ModelConfig

    monkeypatch.setattr(compat, "sglang_version", lambda: Version(NEWEST))
    checks.check_model(ModelConfig(model_path=model_folder(**changes)), CONFIG)


@pytest.mark.parametrize(
    ("release", "changes", "refused"),
    [
        ("0.5.17", HYBRID, "recurrent states.*with SGLang 0.5.17. Use SGLang 0.5.16, 0.5.22 or 0.5.23, or serve it w"),
        ("0.5.18.post1", QWEN3_5, "recurrent states.*with SGLang 0.5.18.post1. Use"),
        ("0.5.16", QWEN3_5_TEXT, "recurrent states.*with SGLang 0.5.16. Use SGLang 0.5.22 or 0.5.23, or"),
        ("0.5.22", HYBRID, None),
        (
            "0.5.18",
            GPT_OSS,
            "sliding windows, which --kv-quant does not support with SGLang 0.5.18. Use SGLang 0.5.16 o",
        ),
        ("0.5.22", GPT_OSS, "sliding windows.*with SGLang 0.5.22"),
        ("0.5.22", MODELS["windows everywhere"][0], "a sliding window in every layer"),  # with the newest too
        ("0.5.18", {}, None),
        ("1.0.0", GPT_OSS, None),
    ],
)
def test_two_caches_in_releases_that_nobody_tried(model_folder, monkeypatch, release, changes, refused):
    from sglang.srt.configs.model_config import ModelConfig

    model = ModelConfig(model_path=model_folder(**changes))
    monkeypatch.setattr(compat, "sglang_version", lambda: Version(release))
    if refused is None:
        checks.check_model(model, CONFIG)
    else:
        with pytest.raises(KVQuantError, match=refused):
            checks.check_model(model, CONFIG)


def test_group_size_must_divide_head_dim(model_folder):
    from sglang.srt.configs.model_config import ModelConfig

    with pytest.raises(KVQuantError, match="--kv-quant-group-size 96.*head_dim 64"):
        checks.check_model(ModelConfig(model_path=model_folder()), KVQuantConfig("hadamard", group_size=96))


def _resolved(server_args):
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return server_args


def test_last_check_passes_a_plain_model(applied, command_line):
    checks.after_check_server_args(None, _resolved(command_line("--kv-quant", "hadamard")))


def test_windows_beyond_the_context_take_no_memory(applied, command_line):
    """A scheduler would reserve BF16 pages for windows that no request can fill."""
    flags = ("--kv-quant-recent", "1000000", "--kv-quant-recent-min", "640000", "--context-length", "2000")
    args = _resolved(command_line("--kv-quant", "hadamard", *flags))
    checks.after_check_server_args(None, args)
    config = config_of(args)
    assert (config.sink_tokens, config.recent_tokens, config.recent_min) == (64, 2112, 2112)


def test_mixed_batches_are_refused_where_they_were_not_tried(applied, command_line, monkeypatch):
    server_args = _resolved(command_line("--kv-quant", "hadamard", "--enable-mixed-chunk"))
    checks.after_check_server_args(None, server_args)
    resolved = compat.resolved
    with monkeypatch.context() as patch:
        drafts = {"speculative_algorithm": "NGRAM"}
        patch.setattr(compat, "resolved", lambda args, field, d=None: drafts.get(field) or resolved(args, field, d))
        with pytest.raises(KVQuantError, match="not tested with both mixed batches and speculative decoding"):
            checks.check_mixed(server_args, compat.model_config(server_args))
    monkeypatch.setattr(checks, "keeps_states", lambda model: True)
    with pytest.raises(SystemExit, match="--enable-mixed-chunk: .* mixed batches and recurrent states. Leave"):
        checks.after_check_server_args(None, server_args)
    checks.check_mixed(_resolved(command_line("--kv-quant", "hadamard")), compat.model_config(server_args))


def test_last_check_refuses_the_model_without_traceback(applied, command_line, model_folder, monkeypatch):
    from sglang.srt.configs.model_config import ModelConfig

    server_args = _resolved(command_line("--kv-quant", "hadamard"))
    other = ModelConfig(model_path=model_folder(head_dim=80))
    monkeypatch.setattr(compat, "model_config", lambda server_args: other)
    with pytest.raises(SystemExit, match="heads of 80"):
        checks.after_check_server_args(None, server_args)


@pytest.mark.parametrize(
    "more", [(), ("--kv-quant-rotations", "/nowhere/rotations")], ids=["none known", "missing folder"]
)
def test_last_check_loads_the_rotations(applied, command_line, more):
    with pytest.raises(SystemExit, match="rotations"):
        checks.after_check_server_args(None, _resolved(command_line("--kv-quant", "oscar", *more)))


def test_model_that_cannot_be_looked_at_yet_is_left_to_sglang(applied):
    checks.check_named_model({"model_path": "/nowhere/model"}, CONFIG)
    checks.check_named_model({}, CONFIG)


def test_last_check_ignores_servers_without_kv_quant(applied, command_line, model_folder):
    checks.after_check_server_args(None, _resolved(command_line(model=model_folder(head_dim=80))))


def test_resolved_setting_that_sglang_changed_is_refused(applied, command_line, monkeypatch):
    server_args = _resolved(command_line("--kv-quant", "hadamard"))
    resolved = compat.resolved
    changed = {"page_size": 1, "attention_backend": "fa3", "speculative_algorithm": "DFLASH"}
    monkeypatch.setattr(compat, "resolved", lambda sa, field, d=None: changed.get(field) or resolved(sa, field, d))
    with pytest.raises(KVQuantError) as error:
        checks.check_resolved(server_args, CONFIG)
    assert all(text in str(error.value) for text in ("page_size=1", "attention_backend=fa3", "--speculative-algorithm"))


def test_pool_of_sglang_stops_the_scheduler():
    class SomePool:
        pass

    result = SimpleNamespace(token_to_kv_pool=SomePool(), token_to_kv_pool_allocator=None)
    args = SimpleNamespace(**{CONFIG_ATTRIBUTE: CONFIG})
    with pytest.raises(SystemExit, match="SGLang built a SomePool as KV cache pool"):
        checks.after_configure(result, SimpleNamespace(server_args=args, is_draft_worker=False))
    checks.after_configure(result, SimpleNamespace(server_args=SimpleNamespace()))
    checks.after_configure(result, SimpleNamespace(server_args=args, is_draft_worker=True))


def test_allocator_of_sglang_stops_the_scheduler():
    ours = object.__new__(PagePool)
    result = SimpleNamespace(token_to_kv_pool=ours, token_to_kv_pool_allocator=torch.empty(0))
    args = SimpleNamespace(**{CONFIG_ATTRIBUTE: CONFIG})
    with pytest.raises(SystemExit, match="KV cache allocator"):
        checks.after_configure(result, SimpleNamespace(server_args=args, is_draft_worker=False))
