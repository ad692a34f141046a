"""Table of all architectures in the supported SGLang releases, by family.

It says whether ``--kv-quant`` serves a family and how that was tested, or why it is refused and what would lift the
refusal. One table covers all releases. ``checks.py`` reads it to refuse models whose unsupported property shows only in
loaded layers. ``kvq doctor --model`` answers from it, and ``docs/models.py`` writes it to docs/results/models.md.
``tests/sglang/test_architectures.py`` compares it with SGLang and with the checks. A family is one line: to serve a
family, change its line. This module does not import SGLang.
"""

# ruff: noqa: E501  (one line per family, however long: so changes to two families never conflict)

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cache

from sglang_kvq.sglang.types import ModelConfig


class Answer(str, Enum):
    """Answer to the question whether a family is served."""

    SERVED = "served"
    IN_PART = "in part"
    REFUSED = "refused"


class Evidence(str, Enum):
    """Evidence that a family is served, in the words of docs/results/models.md."""

    GPU = "compared with plain SGLang on an H200"
    BUILT = "built without weights, each attention layer checked"
    READ = "code read only"


@dataclass(frozen=True)
class Reason:
    """Why a family is refused.

    Attributes:
        what: completes "the model has ...".
        lift: what would have to exist to serve it.
    """

    what: str
    lift: str


RECURRENT = Reason(
    "recurrent state (Mamba or linear attention)",
    "a comparison with plain SGLang, as Qwen3-Next had: its layers that have a KV cache can be in our pool",
)
NO_CACHE = Reason("recurrent state (Mamba or linear attention) in all layers", "nothing: there is no KV cache")
SLIDING = Reason(
    "sliding windows in some layers",
    "a pool of their own for the windows, which SGLang does not make for this architecture; the others' could be ours",
)
UNTRIED = Reason(
    "sliding windows that it was not compared with",
    "a comparison with plain SGLang, as gpt-oss and Mellum had: SGLang keeps these windows in a pool of their own",
)
ASYMMETRIC = Reason("key and value heads of different sizes", "records with two head sizes; and sliding windows")
CHUNKED = Reason("attention in chunks", "a history that begins at the chunk; then our pool for the full layers alone")
SOFT_CAPPING = Reason("logit soft-capping", "the cap in each attention kernel, FlashInfer's included")
MLA = Reason(
    "MLA attention",
    "a record of the latent row that all heads share, a tenth of the bytes to begin with, and kernels for it",
)
SPARSE = Reason(
    "sparse attention, for which SGLang builds another pool and backend",
    "records that the selection of pages or tokens reads as well as attention does",
)
CROSS = Reason("an encoder with cross attention", "a second cache, for the encoder's tokens")
BOTH_WAYS = Reason("attention that looks at later tokens", "nothing planned: tokens change after they are quantized")
SHARED = Reason("layers that share the cache of one layer", "reads of a layer's cache without writes")
NO_TEXT = Reason("no text generation", "nothing: its KV cache is gone with the request")
DRAFT = Reason("no answers of its own: it is a draft model of speculative decoding", "--speculative-algorithm")
HIDDEN = Reason(
    "an implementation by transformers, whose attention layers cannot be checked once loaded",
    "layers that SGLang registers as modules, or checks before they are made",
)
NPU = Reason("an implementation for NPUs", "nothing planned: --kv-quant runs on NVIDIA GPUs")


@dataclass(frozen=True)
class Family:
    """Architectures that are served or refused together.

    Attributes:
        name: common name.
        architectures: class names, as in ``architectures`` of config.json.
        evidence: how it is known that the family is served; None if it is refused.
        reason: why the family, or a part of it, is refused; None if all of it is served.
        note: which part is served, what it needs, or what SGLang itself leaves out.
    """

    name: str
    architectures: tuple[str, ...]
    answer: Answer
    evidence: Evidence | None = None
    reason: Reason | None = None
    note: str = ""


def _served(evidence: Evidence, name: str, architectures: str, note: str = "") -> Family:
    return Family(name, tuple(architectures.split()), Answer.SERVED, evidence, None, note)


def _in_part(evidence: Evidence, reason: Reason, name: str, architectures: str, note: str) -> Family:
    return Family(name, tuple(architectures.split()), Answer.IN_PART, evidence, reason, note)


def _refused(reason: Reason, name: str, architectures: str, note: str = "") -> Family:
    return Family(name, tuple(architectures.split()), Answer.REFUSED, None, reason, note)


_GPU, _BUILT, _READ = Evidence.GPU, Evidence.BUILT, Evidence.READ
_BF16 = "add `--dtype bfloat16`"

# fmt: off
FAMILIES: tuple[Family, ...] = (
    # Text, attention in every layer over all tokens
    _served(_GPU, "Llama", "LlamaForCausalLM"),
    _served(_GPU, "Mistral", "MistralForCausalLM", "SGLang attends to all tokens, whatever `sliding_window` says"),
    _served(_GPU, "Qwen 2 and 2.5", "Qwen2ForCausalLM", "without `use_sliding_window`, which SGLang does not serve either"),
    _served(_GPU, "Qwen 3", "Qwen3ForCausalLM"),
    _served(_GPU, "Qwen 3 MoE", "Qwen3MoeForCausalLM"),
    _served(_GPU, "GLM-4.5 to 4.7", "Glm4MoeForCausalLM"),
    _served(_GPU, "MiniMax M2", "MiniMaxM2ForCausalLM"),
    _served(_BUILT, "Phi-3 and Phi-4, InternLM 3, IQuest Coder", "Phi3ForCausalLM InternLM3ForCausalLM IQuestCoderForCausalLM", "Llama's class, and so all tokens, whatever `sliding_window` says"),
    _served(_BUILT, "Ministral 3", "Ministral3ForCausalLM"),
    _served(_BUILT, "Mixtral", "MixtralForCausalLM QuantMixtralForCausalLM", "all tokens, whatever `sliding_window` says"),
    _served(_BUILT, "Qwen, Qwen 1.5 and 2 MoE", "QWenLMHeadModel Qwen2MoeForCausalLM"),
    _served(_BUILT, "GLM-4", "Glm4ForCausalLM"),
    _served(_BUILT, "ChatGLM", "ChatGLMModel"),
    _served(_BUILT, "Gemma", "GemmaForCausalLM"),
    _served(_BUILT, "Command R", "CohereForCausalLM"),
    _served(_BUILT, "OLMo, OLMo 2, OLMoE", "OlmoForCausalLM Olmo2ForCausalLM OlmoeForCausalLM"),
    _served(_BUILT, "Granite 3", "GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM"),
    _served(_BUILT, "Apertus", "ApertusForCausalLM"),
    _served(_BUILT, "Arcee", "ArceeForCausalLM"),
    _served(_BUILT, "Ernie 4.5", "Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM"),
    _served(_BUILT, "EXAONE 3", "ExaoneForCausalLM"),
    _served(_BUILT, "Hunyuan", "HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM", "with `use_cla` its layers share keys and values, each in its own cache"),
    _served(_BUILT, "Hunyuan 3", "HYV3ForCausalLM"),
    _served(_BUILT, "InternLM 2", "InternLM2ForCausalLM"),
    _served(_BUILT, "Ling and Ring 1 and 2, Sarvam MoE", "BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM SarvamMoEForCausalLM"),
    _served(_BUILT, "MiMo", "MiMoForCausalLM"),
    _served(_BUILT, "MiniCPM", "MiniCPMForCausalLM"),
    _served(_BUILT, "DeepSeek MoE", "DeepseekForCausalLM"),
    _served(_READ, "Nemotron NAS", "DeciLMForCausalLM", "checkpoints of which each layer attends"),
    _served(_BUILT, "Phi-1 and Phi-2, Phi-3.5 MoE", "PhiForCausalLM PhiMoEForCausalLM", "Phi-2's heads of 80 are refused"),
    _served(_BUILT, "StableLM", "StableLmForCausalLM", "the 3B model's heads of 80 are refused"),
    _served(_BUILT, "StarCoder 2", "Starcoder2ForCausalLM", "all tokens, whatever `sliding_window` says"),
    _served(_BUILT, "Xverse", "XverseForCausalLM XverseMoeForCausalLM"),
    _served(_BUILT, "Orion, Persimmon, TeleFLM", "OrionForCausalLM PersimmonForCausalLM TeleFLMForCausalLM"),
    _served(_BUILT, "GPT-2, GPT-J, OPT", "GPT2LMHeadModel GPTJForCausalLM OPTForCausalLM"),
    _served(_BUILT, "GPT-BigCode", "GPTBigCodeForCausalLM", "one KV head: with as many workers as leave at most 16 query heads to each"),
    _served(_BUILT, "Llama and Phi-3 in plain torch", "TorchNativeLlamaForCausalLM TorchNativePhi3ForCausalLM"),
    _served(_READ, "Baichuan, DBRX", "BaichuanForCausalLM DbrxForCausalLM", "built on a GPU only"),
    _served(_READ, "Phi-3 Small, SOLAR Pro", "Phi3SmallForCausalLM SolarForCausalLM"),
    _served(_READ, "XLLM, K2 Horizon", "XllmForCausalLM K2HorizonForCausalLM"),
    # Images, video and audio in, text out, over such a model
    _served(_BUILT, "Qwen 2.5-VL, 3-VL, 3-Omni, 2-Audio", "Qwen2_5_VLForConditionalGeneration Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen2AudioForConditionalGeneration"),
    _served(_BUILT, "GLM-4V, GLM-OCR, GLM-ASR", "Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmOcrForConditionalGeneration GlmAsrForConditionalGeneration"),
    _served(_BUILT, "PaddleOCR-VL, dots.ocr, LocateAnything, Sarashina 2 Vision", "Sarashina2VisionForCausalLM PaddleOCRVLForConditionalGeneration DotsOCRForCausalLM LocateAnythingForConditionalGeneration"),
    _served(_READ, "Qwen 2-VL, 3-ASR", "Qwen2VLForConditionalGeneration Qwen3ASRForConditionalGeneration"),
    _served(_READ, "GLM-Image, Ernie 4.5-VL", "GlmImageForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration"),
    _served(_READ, "InternVL, Intern-S1", "InternVLChatModel InternS1ForConditionalGeneration InternS1ProForConditionalGeneration"),
    _served(_READ, "Mistral Small 3, Voxtral, LightOnOCR", "Mistral3ForConditionalGeneration VoxtralForConditionalGeneration LightOnOCRForConditionalGeneration"),
    _in_part(_READ, MLA, "Pixtral", "PixtralForConditionalGeneration", "Pixtral 12B is served; Mistral Large 3 under this name has MLA"),
    _served(_READ, "MiniCPM-V up to 4.5, MiniCPM-o", "MiniCPMV MiniCPMO"),
    _served(_READ, "Llava (transformers' form), Janus Pro", "LlavaForConditionalGeneration MultiModalityCausalLM"),
    _served(_READ, "Llava (its own form), Yi-VL", "LlavaLlamaForCausalLM LlavaQwenForCausalLM LlavaMistralForCausalLM LlavaVidForCausalLM YiVLForCausalLM", _BF16),
    _served(_READ, "DeepSeek OCR", "DeepseekOCRForCausalLM"),
    _served(_READ, "NVILA, POINTS 1.5, Phi-4 multimodal", "NVILAForConditionalGeneration NVILALiteForConditionalGeneration POINTSV15ChatModel Phi4MMForCausalLM"),
    _served(_READ, "Step 3 VL 10B", "StepVLForConditionalGeneration"),
    _served(_READ, "Step 3", "Step3VLForConditionalGeneration", "64 query heads over one KV head: `--tp 4` or more"),
    _served(_READ, "MiMo V2 ASR, MiDashengLM", "MiMoV2ASRForCausalLM MiDashengLMModel"),
    _served(_READ, "Ming (Bailing multimodal), Cosmos 3", "BailingMMNativeForConditionalGeneration BailingMM2NativeForConditionalGeneration Cosmos3ForConditionalGeneration Cosmos3EdgeForConditionalGeneration"),
    # Served or not by the checkpoint
    _in_part(_BUILT, SLIDING, "EXAONE 4, K-EXAONE", "Exaone4ForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM", "checkpoints without sliding windows, as EXAONE 4 1.2B"),
    _in_part(_BUILT, RECURRENT, "Granite 4", "GraniteMoeHybridForCausalLM", "checkpoints without Mamba layers"),
    _in_part(_BUILT, SHARED, "Nanbeige", "NanbeigeForCausalLM", "checkpoints that run through their layers once (`num_loops` 1)"),
    # Recurrent state beside attention
    _served(_GPU, "Qwen 3-Next", "Qwen3NextForCausalLM", "the layers of full attention are quantized"),
    _served(_BUILT, "Qwen 3.5 and 3.6", "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM", "the layers of full attention are quantized"),
    _refused(RECURRENT, "Qwen 4 Exp", "Qwen4ExpForConditionalGeneration", "its full layers are sparse as well"),
    _refused(RECURRENT, "Intern-S2, MiniCPM-V 4.6 and 4.7", "InternS2PreviewForConditionalGeneration InternS2MobiusForConditionalGeneration MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration"),
    _refused(RECURRENT, "Nemotron-H and Nano", "NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_VL_V2 NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Omni_Reasoning_V3"),
    _refused(RECURRENT, "Falcon H1, LFM 2, Jet-Nemotron, Zaya", "FalconH1ForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration JetNemotronForCausalLM JetVLMForConditionalGeneration ZayaForCausalLM"),
    _refused(RECURRENT, "MiniCPM-SALA", "MiniCPMSALAForCausalLM", "its full layers are sparse as well"),
    _refused(MLA, "Ling and Ring 2.5 and 3", "BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM", "and recurrent state"),
    _refused(MLA, "Ling 3 VL", "BailingMoeV3VLForConditionalGeneration", "and recurrent state"),
    _refused(MLA, "Kimi Linear, Kimi K3, GLM-5 Next, GigaChat 3.5", "KimiLinearForCausalLM KimiK3ForConditionalGeneration KimiK3LinearForCausalLM Glm5NextForConditionalGeneration GigaChat35ForCausalLM", "and recurrent state"),
    _refused(RECURRENT, "Inkling", "InklingForConditionalGeneration", "and sliding windows"),
    _refused(NO_CACHE, "Mamba, Falcon Mamba", "MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM"),
    # Windows, sinks, caps
    _served(_GPU, "gpt-oss", "GptOssForCausalLM", "the layers of full attention are quantized"),
    _refused(UNTRIED, "Granite SWA, IQuest Q1", "GraniteSWAForCausalLM GraniteMoeSWAForCausalLM IQuestQ1ForCausalLM", "learned sinks, as gpt-oss"),
    _refused(SLIDING, "Gemma 3 and 3n", "Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma3nForConditionalGeneration"),
    _refused(SLIDING, "Gemma 4", "Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration", "its full layers have heads of 512"),
    _refused(SLIDING, "Command A (Cohere 2)", "Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration"),
    _refused(SLIDING, "AFMoE", "AfmoeForCausalLM"),
    _served(_BUILT, "Laguna, Beam, Spark 2.5", "LagunaForCausalLM BeamForCausalLM Spark2_5ForCausalLM", "the layers of full attention are quantized"),
    _served(_GPU, "Mellum", "MellumForCausalLM", "the layers of full attention are quantized"),
    _refused(UNTRIED, "Muse Glimmer", "MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration"),
    _refused(SLIDING, "Muse Spark", "MuseSparkForConditionalGeneration"),
    _refused(UNTRIED, "Step 3.5 and 3.7", "Step3p5ForCausalLM Step3p7ForConditionalGeneration", "more query heads in layers with windows"),
    _refused(SLIDING, "Unlimited OCR", "UnlimitedOCRForCausalLM"),
    _refused(SHARED, "IQuest LoopCoder", "IQuestLoopCoderForCausalLM", "and sliding windows"),
    _refused(ASYMMETRIC, "MiMo V2", "MiMoV2ForCausalLM MiMoV2FlashForCausalLM"),
    _refused(CHUNKED, "Llama 4", "Llama4ForCausalLM Llama4ForConditionalGeneration"),
    _refused(SLIDING, "Gemma 2", "Gemma2ForCausalLM", "and logit soft-capping"),
    _refused(SOFT_CAPPING, "Grok", "Grok1ForCausalLM Grok1ModelForCausalLM", "and a temperature that depends on the position"),
    # MLA and sparse attention
    _refused(MLA, "DeepSeek V2, V3, V3.2, R1", "DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM"),
    _refused(MLA, "DeepSeek VL2, dots.vlm, Kimi-VL, Kimi K2.5", "DeepseekVL2ForCausalLM DotsVLMForCausalLM KimiVLForConditionalGeneration KimiK25ForConditionalGeneration"),
    _refused(MLA, "GLM-4.7 Flash, GLM-5", "Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM"),
    _refused(MLA, "LongCat Flash, MiniCPM 3, Mistral Large 3, Sarvam, Hunyuan 4, dots 3", "LongcatFlashForCausalLM MiniCPM3ForCausalLM MistralLarge3ForCausalLM SarvamMLAForCausalLM HYV4ForCausalLM Dots3NoteForCausalLM"),
    _refused(SPARSE, "DeepSeek V4", "DeepseekV4ForCausalLM"),
    _refused(SPARSE, "MiniMax M3", "MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration"),
    # Other attention
    _refused(CROSS, "Llama 3.2 Vision, Moss-VL, Whisper", "MllamaForConditionalGeneration MossVLForConditionalGeneration WhisperForConditionalGeneration"),
    _refused(BOTH_WAYS, "LLaDA 2, SDAR, Diffusion Gemma, HRM", "LLaDA2MoeModelLM SDARForCausalLM SDARMoeForCausalLM DiffusionGemmaForBlockDiffusion HrmTextForCausalLM"),
    _refused(HIDDEN, "Whatever SGLang runs through transformers", "TransformersForCausalLM TransformersMoEForCausalLM TransformersMultiModalForCausalLM TransformersMultiModalMoEForCausalLM", "architectures that no SGLang class has, and `--model-impl transformers`"),
    _refused(NPU, "MindSpore", "MindSporeForCausalLM"),
    # No text of their own
    _refused(NO_TEXT, "Embedding models", "BertModel Contriever CLIPModel XLMRobertaModel LlamaEmbeddingModel MistralModel Qwen3Model EmbeddingGemmaModel EmbeddingGemma2Model Lfm2BidirectionalModel TransformersEmbeddingModel TransformersMoEEmbeddingModel TransformersMultiModalEmbeddingModel TransformersMultiModalMoEEmbeddingModel PixtralVisionModel"),
    _refused(NO_TEXT, "Reward models and classifiers", "BertForSequenceClassification XLMRobertaForSequenceClassification Gemma2ForSequenceClassification InternLM2ForRewardModel LlamaForClassification LlamaForSequenceClassification LlamaForSequenceClassificationWithNormal_Weights NanbeigeForSequenceClassification Qwen2ForRewardModel Qwen2ForSequenceClassification Qwen3ForRewardModel Qwen3ForSequenceClassification TransformersForSequenceClassification TransformersMoEForSequenceClassification TransformersMultiModalForSequenceClassification TransformersMultiModalMoEForSequenceClassification"),
    _refused(DRAFT, "EAGLE", "LlamaForCausalLMEagle LlamaForCausalLMEagle3 Qwen2ForCausalLMEagle MistralForCausalLMEagle MistralLarge3ForCausalLMEagle Eagle3DeepseekV2ForCausalLM"),
    _refused(DRAFT, "MTP and NextN layers", "BailingMoeForCausalLMNextN DeepseekV3ForCausalLMNextN DeepseekV4ForCausalLMNextN Dots3NoteForCausalLMNextN Ernie4_5_MoeForCausalLMMTP ExaoneMoEForCausalLMMTP GigaChat35ForCausalLMNextN Glm4MoeForCausalLMNextN Glm4MoeLiteForCausalLMNextN Glm5NextForConditionalGenerationNextN GlmMoeDsaForCausalLMNextN GlmOcrForConditionalGenerationNextN HYV3ForCausalLMNextN HYV4ForCausalLMNextN InklingForConditionalGenerationMTP IQuestQ1MTP LongcatFlashForCausalLMNextN MiMoMTP MiMoV2MTP NemotronHForCausalLMMTP Qwen3MoeForCausalLMMTP Qwen3NextForCausalLMMTP Qwen3_5ForCausalLMMTP Qwen4ExpForCausalLMMTP Step3p5MTP"),
    _refused(DRAFT, "DFlash, DSpark and assistants", "DFlashDraftModel DFlashLagunaForCausalLM DFlash2DraftModel DFlash2BeamDraftModel MiniMaxDFlash2DraftModel MuseGlimmerAssistantModel DSparkDraftModel DSparkMiniMaxDraftModel LingDSparkModel Qwen3DSparkModel Lfm2DSparkDraftModel DeepseekV4ForCausalLMDSpark LiLiCorrDraftModel Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM"),
)
# fmt: on


@cache
def by_architecture() -> dict[str, Family]:
    """Returns the family of each architecture.

    Raises:
        ValueError: two families list the same architecture, a mistake in this file.
    """
    found: dict[str, Family] = {}
    for family in FAMILIES:
        for name in family.architectures:
            if name in found:
                raise ValueError(f"{name} is in {found[name].name} and in {family.name}")
            found[name] = family
    return found


def family_of(architectures: list[str] | None) -> Family | None:
    """Returns the family of a config's ``architectures``; None if the table has none of them."""
    return next((by_architecture()[name] for name in architectures or () if name in by_architecture()), None)


def refusal_of(architectures: list[str] | None) -> str | None:
    """Returns the property for which a whole family is refused; None if some or all of its models are served."""
    family = family_of(architectures)
    if family is None or family.answer is not Answer.REFUSED or family.reason is None:
        return None
    return family.reason.what


def unsupported_windows(model: ModelConfig, layer_types: Collection[str]) -> str | None:
    """Returns a completion of "this model has ..." if its windows are not served; None if they are, or if it has none.

    Args:
        layer_types: kinds of the model's layers, by its config.
    """
    if not model.is_hybrid_swa:
        if "sliding_attention" not in layer_types:
            return None
        why = "--disable-hybrid-swa-memory is set" if model.disable_hybrid_swa_memory else "of this architecture"
        return (
            "sliding windows in some layers, whose keys and values SGLang keeps of all tokens as those of the others "
            f"({why}), so that quantizing the others would save little"
        )
    full = getattr(model, "full_attention_layer_ids", None)
    if full is None:  # DeepSeek V4, and schedules that SGLang does not know
        return "sliding windows beside keys that SGLang compresses, or in layers that it does not name"
    if not full:
        return "a sliding window in every layer, so that no layer's keys and values grow with the context"
    if model.is_hybrid_swa_compress and (model.head_dim, model.v_head_dim) != (
        model.swa_head_dim,
        model.swa_v_head_dim,
    ):
        return (
            f"heads of {model.swa_head_dim} and {model.swa_v_head_dim} elements in the layers with sliding windows and "
            f"of {model.head_dim} and {model.v_head_dim} in the others"
        )
    return None
