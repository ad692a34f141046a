"""A small config for each architecture that SGLang lists, as its config.json could look.

If transformers or SGLang has a class for the config, the example is that class's defaults (those of a published model)
plus the fields that the class leaves open. Otherwise it is a tiny Llama's config plus the fields that SGLang's model
reads.
"""

from __future__ import annotations

from tests.sglang.conftest import LLAMA

Config = dict[str, object]

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def llama(**more: object) -> Config:
    return {**LLAMA, **more}


def of(model_type: str, **more: object) -> Config:
    """Returns a config that leaves every other field to the config class of ``model_type``."""
    return {"model_type": model_type, **more}


MLA = llama(kv_lora_rank=64, v_head_dim=64, qk_nope_head_dim=64, qk_rope_head_dim=32, rope_scaling=None)
KIMI_LINEAR = of(
    "kimi_linear",
    kv_lora_rank=64,
    v_head_dim=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    num_experts=4,
    num_hidden_layers=4,
    linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 64},
)
JET = llama(model_type="jet_nemotron", layer_types=["jet", "attn"])
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
BAILING = llama(
    **MOE,
    embedding_dropout=0,
    first_k_dense_replace=0,
    n_group=0,
    num_nextn_predict_layers=0,
    num_shared_experts=1,
    partial_rotary_factor=1.0,
    rope_theta=1e4,
    router_dtype=None,
    score_function=None,
    tie_word_embeddings=False,
    topk_group=0,
    use_bias=False,
    use_qk_norm=False,
    use_qkv_bias=False,
)
NEMOTRON_BLOCK = {
    "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
    "ffn": {"ffn_mult": 2.0, "no_op": False, "replace_with_linear": False},
}
QWEN_OMNI_TEXT = of("qwen3_omni_moe_text", head_dim=128)
DELTA_RULE = dict(full_attention_interval=4, linear_num_value_heads_cpu=32, linear_num_key_heads_cpu=16)
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
QWEN3_5 = dict(**DELTA_RULE, rope_parameters=ROPE)
SIZES = {name: value for name, value in LLAMA.items() if name not in ("model_type", "architectures")}
STEP = dict(layer_types=[FULL, SLIDING], sliding_window=64, head_dim=64, num_hidden_layers=2)

#: Architectures whose example is neither the config class's defaults nor a tiny Llama's config.
EXAMPLES: dict[str, Config] = {
    # Plain attention
    "ArceeForCausalLM": of("arcee", head_dim=128),
    "BailingMoEForCausalLM": BAILING,
    "BailingMoeForCausalLM": BAILING,
    "BailingMoeV2ForCausalLM": BAILING,
    "ChatGLMModel": of("chatglm", multi_query_attention=True, multi_query_group_num=2),
    "DeciLMForCausalLM": llama(block_configs=[NEMOTRON_BLOCK] * 2),
    "DeepseekForCausalLM": llama(
        **MOE, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, moe_layer_freq=1
    ),
    "DotsOCRForCausalLM": of("dots_ocr"),
    "Ernie4_5_ForCausalLM": of("ernie4_5", head_dim=128),
    "ExaoneForCausalLM": of("exaone", pad_token_id=0),
    "GPT2LMHeadModel": of("gpt2"),
    "Glm4MoeForCausalLM": of("glm4_moe", head_dim=128),
    "Glm4vMoeForConditionalGeneration": of("glm4v_moe", text_config=of("glm4v_moe_text", head_dim=128)),
    "GlmImageForConditionalGeneration": llama(vision_vocab_size=512),
    "HYV3ForCausalLM": of("hy_v3", route_norm=True),
    "K2HorizonForCausalLM": of("k2_horizon", **SIZES, mlp_only_layers=[0, 1]),
    "LocateAnythingForConditionalGeneration": of("locateanything"),
    "MiniCPMForCausalLM": llama(dim_model_base=64, scale_depth=1.4, scale_emb=12),
    "MiniMaxM2ForCausalLM": of("minimax_m2", scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True),
    "NanbeigeForCausalLM": of("nanbeige", num_loops=1),
    "PhiMoEForCausalLM": llama(
        num_local_experts=4, num_experts_per_tok=2, attention_bias=False, lm_head_bias=True, rope_theta=1e4
    ),
    "QWenLMHeadModel": llama(
        kv_channels=64,
        num_key_value_heads=4,
        layer_norm_epsilon=1e-5,
        no_bias=True,
        rotary_emb_base=1e4,
        scale_attn_weights=True,
        seq_length=2048,
        use_logn_attn=False,
    ),
    "QuantMixtralForCausalLM": of("mixtral"),
    "Qwen3OmniMoeForConditionalGeneration": of("qwen3_omni_moe", thinker_config={"text_config": QWEN_OMNI_TEXT}),
    "SarvamMoEForCausalLM": BAILING,
    "StableLmForCausalLM": of("stablelm", hidden_size=2048),
    "Step3VLForConditionalGeneration": of("step3_vl"),
    "XllmForCausalLM": of("xllm", **SIZES),
    "XverseMoeForCausalLM": llama(num_experts=4, num_shared_experts=1, moe_top_k=2, norm_topk_prob=True),
    # Served or refused depending on the checkpoint: here what is served
    "Exaone4ForCausalLM": of("exaone4", sliding_window=None, layer_types=[FULL] * 2, num_hidden_layers=2),
    "ExaoneMoEForCausalLM": of("exaone_moe", layer_types=[FULL] * 2, num_hidden_layers=2, is_moe_layer=[False, True]),
    "ExaoneMoeForCausalLM": of("exaone_moe", layer_types=[FULL] * 2, num_hidden_layers=2, is_moe_layer=[False, True]),
    "GraniteMoeHybridForCausalLM": of("granitemoehybrid", layer_types=["attention"] * 2, num_hidden_layers=2),
    # Recurrent state
    "BailingMoeV2_5ForCausalLM": of("bailing_hybrid"),
    "BailingMoeV3ForCausalLM": of("bailing_hybrid"),
    "BailingMoeV3VLForConditionalGeneration": of("bailing_moe_v3_vl"),
    "FalconMambaForCausalLM": of("falcon_mamba"),
    "GigaChat35ForCausalLM": of("gigachat3_5"),
    "Glm5NextForConditionalGeneration": of("glm5_next"),
    "InklingForConditionalGeneration": of("inkling_mm_model"),
    "InternS2MobiusForConditionalGeneration": of("interns2_mobius"),
    "InternS2PreviewForConditionalGeneration": of("intern_s2_preview"),
    "JetNemotronForCausalLM": JET,
    "JetVLMForConditionalGeneration": of("jet_vlm", text_config=JET),
    "KimiK3ForConditionalGeneration": of("kimi_k3", text_config=KIMI_LINEAR),
    "KimiK3LinearForCausalLM": KIMI_LINEAR,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "MambaForCausalLM": of("mamba"),
    "MiniCPMSALAForCausalLM": of(
        "minicpm_sala", mixer_types=["lightning-attn", "minicpm4"], lightning_nkv=32, num_hidden_layers=2
    ),
    "MiniCPMV4_6ForConditionalGeneration": of("minicpmv4_6"),
    "MiniCPMV4_7ForConditionalGeneration": of("minicpmv4_7"),
    "NemotronHPuzzleForCausalLM": of("nemotron_h_puzzle", block_configs=[]),
    "NemotronH_Nano_Omni_Reasoning_V3": of("NemotronH_Nano_Omni_Reasoning_V3"),
    "NemotronH_Nano_VL_V2": of("NemotronH_Nano_VL_V2"),
    "NemotronH_Omni_Reasoning_V3": of("nemotron_h_omni"),
    "Qwen3NextForCausalLM": of("qwen3_next", **DELTA_RULE),
    "Qwen3_5ForCausalLM": of("qwen3_5_text", **QWEN3_5),
    "Qwen3_5ForConditionalGeneration": of("qwen3_5", text_config=of("qwen3_5_text", **QWEN3_5)),
    "Qwen3_5MoeForCausalLM": of("qwen3_5_moe_text", **QWEN3_5),
    "Qwen3_5MoeForConditionalGeneration": of("qwen3_5_moe", text_config=of("qwen3_5_moe_text", **QWEN3_5)),
    "Qwen4ExpForConditionalGeneration": of("qwen4_exp"),
    "ZayaForCausalLM": of("zaya"),
    # Windows
    "AfmoeForCausalLM": of("afmoe", num_experts=4, head_dim=64, layer_types=[SLIDING, FULL], num_hidden_layers=2),
    "IQuestLoopCoderForCausalLM": llama(loop_num=2, loop_window_size=64),
    "IQuestQ1ForCausalLM": of("iquest_q1"),
    "MiMoV2FlashForCausalLM": llama(hybrid_layer_pattern=[1, 0], v_head_dim=32, head_dim=64),
    "MiMoV2ForCausalLM": llama(hybrid_layer_pattern=[1, 0], v_head_dim=32, head_dim=64),
    "BeamForCausalLM": of("beam", layer_types=[SLIDING, FULL], num_hidden_layers=2),
    "GptOssForCausalLM": of("gpt_oss", swiglu_limit=7.0),
    "MuseGlimmerForCausalLM": llama(layer_types=[SLIDING, FULL]),
    "MuseGlimmerForConditionalGeneration": llama(layer_types=[SLIDING, FULL]),
    "MuseSparkForConditionalGeneration": llama(layer_types=[SLIDING, FULL]),
    "Spark2_5ForCausalLM": of("spark2_5"),
    "Step3p5ForCausalLM": llama(**STEP),
    "Step3p7ForConditionalGeneration": llama(**STEP),
    # MLA and sparse attention
    "DeepseekV4ForCausalLM": llama(
        **{**MLA, "head_dim": 64}, sliding_window=128, index_head_dim=64, compress_ratios=[0, 4]
    ),
    "DeepseekVL2ForCausalLM": of("deepseek_vl_v2"),
    "Dots3NoteForCausalLM": of("dots3_note", layer_types=[SLIDING, FULL], num_hidden_layers=2),
    "DotsVLMForCausalLM": of("dots_vlm"),
    "HYV4ForCausalLM": of("hy_v4"),
    "KimiK25ForConditionalGeneration": of("kimi_k25"),
    "KimiVLForConditionalGeneration": of("kimi_vl"),
    "MiniCPM3ForCausalLM": MLA,
    "MiniMaxM3SparseForCausalLM": llama(num_local_experts=4),
    "MiniMaxM3SparseForConditionalGeneration": llama(num_local_experts=4),
    "MistralLarge3ForCausalLM": MLA,
    "SarvamMLAForCausalLM": MLA,
    # Bidirectional attention
    "DiffusionGemmaForBlockDiffusion": llama(layer_types=[SLIDING, FULL]),
    "LLaDA2MoeModelLM": BAILING,
    "Gemma4ForConditionalGeneration": of("gemma4_text"),
    "Gemma4UnifiedForConditionalGeneration": of("gemma4_text"),
    "SDARMoeForCausalLM": llama(**MOE, decoder_sparse_step=1, mlp_only_layers=[], attention_bias=False),
}

#: Configs that must be refused, from families that are served only in part.
REFUSED: dict[str, Config] = {
    "Exaone4ForCausalLM": of("exaone4"),
    "ExaoneMoEForCausalLM": of("exaone_moe"),
    "ExaoneMoeForCausalLM": of("exaone_moe"),
    "GraniteMoeHybridForCausalLM": of("granitemoehybrid", layer_types=["mamba", "attention"], num_hidden_layers=2),
    "NanbeigeForCausalLM": of("nanbeige", num_loops=2),
    "PixtralForConditionalGeneration": MLA,
}


def model_types() -> dict[str, str]:
    """Returns the ``model_type`` of each architecture that transformers knows."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for mapping in sorted(name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")):
        for model_type, architectures in getattr(modeling_auto, mapping).items():
            for name in (architectures,) if isinstance(architectures, str) else architectures:
                found.setdefault(name, model_type)
    return found


def example(architecture: str, types: dict[str, str]) -> Config:
    """Returns the example config of ``architecture``, with the architecture's name in it.

    Args:
        types: the result of ``model_types``.
    """
    plain = of(types[architecture]) if architecture in types else llama()
    return {"torch_dtype": "bfloat16", **EXAMPLES.get(architecture, plain), "architectures": [architecture]}
