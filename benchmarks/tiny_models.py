"""Writes tiny random models of every family as checkpoints; their answers depend strongly on the KV cache.

Ordinary random weights give nearly uniform logits, which a wrong cache would not change. Here logits have a standard
deviation of ``LOGITS``. At a context of ``CONTEXT`` tokens, attention adds about as much to the residual stream as the
token itself: attention scores have a standard deviation of ``SCORES``, so about CONTEXT / exp(SCORES^2) values are
averaged, and W_o compensates for that. The same seed gives the same files, so that two servers have the same weights.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from packaging.version import Version
from safetensors.torch import save_file

from benchmarks import tiny_hybrids
from sglang_kvq.releases import WITHOUT_STATES, WITHOUT_WINDOWS

VOCABULARY = 512
CONTEXT = 1500
SCORES = 1.0
LOGITS = 2.5
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
WINDOW = 128


@dataclass(frozen=True)
class TinyModel:
    """One checkpoint.

    Attributes:
        family: ``model_type`` of its config.json.
        experts: size of what a mixture of experts adds to the residual stream, relative to a token. It is small,
            because the last bit of BF16 may decide which experts a router chooses, and that is not to be measured.
        since: the first SGLang release that knows the family; "" for all supported releases.
        drafts: whether it has one more layer of full attention, which drafts (MTP).
    """

    name: str
    family: str
    head_dim: int = 128
    layers: int = 3
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    positions: int = 32768
    experts: float = 0.1
    more: dict = field(default_factory=dict)
    since: str = ""
    drafts: bool = False

    @property
    def is_moe(self) -> bool:
        return self.family in ("qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss", "qwen3_next")

    @property
    def has_windows(self) -> bool:
        """True if every other layer, starting with the first, has a sliding window."""
        return self.family in ("gpt_oss", "mellum")

    @property
    def is_hybrid(self) -> bool:
        """True if most layers use linear attention."""
        return self.family in tiny_hybrids.HYBRIDS

    def is_served(self, release: Version) -> bool:
        """Returns True if the plugin serves it with this SGLang release."""
        refused = (*(WITHOUT_WINDOWS if self.has_windows else ()), *(WITHOUT_STATES if self.is_hybrid else ()))
        return release >= Version(self.since or "0") and release.base_version not in refused

    def config(self) -> dict:
        """Returns the content of config.json."""
        return {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "use_cache": True,
            **(self._windows() if self.has_windows else {}),
            **EXTRA.get(self.family, {}),
            **({"layer_types": tiny_hybrids.layer_types(self.layers)} if self.is_hybrid else {}),
            **self.more,
        }

    def _windows(self) -> dict:
        kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(self.layers)]
        return {"sliding_window": WINDOW, "layer_types": kinds, "mlp_layer_types": ["dense"] * self.layers}

    def tensors(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Returns the weights by their checkpoint names, BF16."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, std: float) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * std

        q_rows, kv_rows, width = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden**-0.5
        averaged = CONTEXT / math.exp(SCORES**2)
        # If q and k are normalized per head or over all heads, the weights of these norms set the scores' size.
        normed = self.family in ("qwen3", "qwen3_moe", "minimax_m2", "mellum") or self.config().get("use_qk_norm")
        kinds = self.config().get("layer_types") or ["full_attention"] * self.layers
        attending = kinds.count("full_attention") if self.is_hybrid else self.layers
        one, gates = 1.0, 1
        if self.is_hybrid:  # their norms multiply by 1 + weight, and a gate of about one half follows attention
            normed, one, gates, averaged = True, 0.0, 2, 4 * averaged
        found = {
            "model.embed_tokens.weight": normal(VOCABULARY, self.hidden, std=1),
            "model.norm.weight": one + normal(self.hidden, std=0.05),
            "lm_head.weight": normal(VOCABULARY, self.hidden, std=LOGITS * width),
        }
        places = [(layer, f"model.layers.{layer}") for layer in range(self.layers)]
        if self.drafts:
            places.append((kinds.index("full_attention"), "mtp.layers.0"))
        for layer, at in places:
            found |= {
                f"{at}.input_layernorm.weight": one + normal(self.hidden, std=0.05),
                f"{at}.post_attention_layernorm.weight": one + normal(self.hidden, std=0.05),
            }
            if kinds[layer] == "linear_attention":
                found |= tiny_hybrids.linear_attention(self.family, at, self.hidden, normal)
                found |= self._mlp(layer, at, normal)
                continue
            found |= {
                f"{at}.self_attn.q_proj.weight": normal(
                    gates * q_rows, self.hidden, std=width * (1 if normed else SCORES)
                ),
                f"{at}.self_attn.k_proj.weight": normal(kv_rows, self.hidden, std=width),
                f"{at}.self_attn.v_proj.weight": normal(kv_rows, self.hidden, std=width),
                f"{at}.self_attn.o_proj.weight": normal(
                    self.hidden, q_rows, std=(averaged / q_rows / attending) ** 0.5
                ),
            }
            if normed:
                q_size, k_size = (q_rows, kv_rows) if self.family == "minimax_m2" else (self.head_dim, self.head_dim)
                found[f"{at}.self_attn.q_norm.weight"] = one - 1 + SCORES + normal(q_size, std=0.05)
                found[f"{at}.self_attn.k_norm.weight"] = one + normal(k_size, std=0.05)
            if self.family == "gpt_oss":
                found[f"{at}.self_attn.q_proj.weight"] /= YARN_SCORES
                found[f"{at}.self_attn.o_proj.bias"] = normal(self.hidden, std=0.02)
                # Near the log-sum-exp of some hundred scores, so that sinks take a good part of the softmax.
                found[f"{at}.self_attn.sinks"] = 5 + normal(self.heads, std=1)
            if self.config().get("attention_bias") or self.family == "qwen2":
                # A value's bias is in every average; a large one would hide the context's effect.
                for name, rows, std in (("q", q_rows, 0.3), ("k", kv_rows, 1.0), ("v", kv_rows, 0.02)):
                    found[f"{at}.self_attn.{name}_proj.bias"] = normal(rows, std=std)
            found |= self._mlp(layer, at, normal)
        if self.drafts:
            found |= tiny_hybrids.next_token_head(self.hidden, normal)
        return {name: tensor.to(KEPT.get(name.rpartition(".")[2], torch.bfloat16)) for name, tensor in found.items()}

    def _mlp(self, layer: int, at: str, normal) -> dict[str, torch.Tensor]:
        dense = not self.is_moe or layer < self.config().get("first_k_dense_replace", 0)
        if dense:
            return self._gated(f"{at}.mlp", self.hidden, 0.3, ("gate_proj", "up_proj", "down_proj"), normal)
        if self.family == "gpt_oss":
            return self._fused_experts(f"{at}.mlp", normal)
        minimax = self.family == "minimax_m2"
        block = f"{at}.block_sparse_moe" if minimax else f"{at}.mlp"
        names = ("w1", "w3", "w2") if minimax else ("gate_proj", "up_proj", "down_proj")
        size = self.config().get("moe_intermediate_size", self.config()["intermediate_size"])
        found = {f"{block}.gate.weight": normal(EXPERTS, self.hidden, std=self.hidden**-0.5)}
        for expert in range(EXPERTS):
            found |= self._gated(f"{block}.experts.{expert}", size, self.experts, names, normal)
        if self.family == "glm4_moe":
            found[f"{block}.gate.e_score_correction_bias"] = normal(EXPERTS, std=0.01)
            found |= self._gated(f"{block}.shared_experts", size, 0.3, names, normal)
        if self.family == "qwen3_next":
            found |= self._gated(f"{block}.shared_expert", size, 0.3, names, normal)
            found[f"{block}.shared_expert_gate.weight"] = normal(1, self.hidden, std=self.hidden**-0.5)
        if minimax:
            found[f"{block}.e_score_correction_bias"] = normal(EXPERTS, std=0.01)
        return found

    def _fused_experts(self, at: str, normal) -> dict[str, torch.Tensor]:
        """Returns all experts in one tensor, inputs first; gates and values alternate."""
        size = self.config()["intermediate_size"]
        return {
            f"{at}.router.weight": normal(EXPERTS, self.hidden, std=self.hidden**-0.5),
            f"{at}.router.bias": normal(EXPERTS, std=0.1),
            f"{at}.experts.gate_up_proj": normal(EXPERTS, self.hidden, 2 * size, std=self.hidden**-0.5),
            f"{at}.experts.gate_up_proj_bias": normal(EXPERTS, 2 * size, std=0.1),
            f"{at}.experts.down_proj": normal(EXPERTS, size, self.hidden, std=self.experts * size**-0.5),
            f"{at}.experts.down_proj_bias": normal(EXPERTS, self.hidden, std=0.02),
        }

    def _gated(self, at: str, size: int, out: float, names: tuple[str, str, str], normal) -> dict[str, torch.Tensor]:
        gate, up, down = names
        return {
            f"{at}.{gate}.weight": normal(size, self.hidden, std=self.hidden**-0.5),
            f"{at}.{up}.weight": normal(size, self.hidden, std=self.hidden**-0.5),
            f"{at}.{down}.weight": normal(self.hidden, size, std=2 * out * size**-0.5),  # silu(x) y is about a half
        }

    def write(self, folder: Path, seed: int = 0) -> Path:
        """Writes the checkpoint to ``folder/name`` unless it exists. Returns that folder."""
        target = folder / self.name
        if not (target / "config.json").exists():
            target.mkdir(parents=True, exist_ok=True)
            save_file(self.tensors(seed), target / "model.safetensors", metadata={"format": "pt"})
            (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
            (target / "config.json").write_text(json.dumps(self.config(), indent=1))
        return target


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mellum": "MellumForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
#: Factor by which YaRN raises scores at a factor of 32: (0.1 log 32 + 1)^2.
YARN_SCORES = 1.813
EXTRA = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
    "qwen3": {"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
    "qwen3_moe": {
        "attention_bias": False,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "glm4_moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": 128,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 0,
    },
    "minimax_m2": {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "rotary_dim": 64,
        "intermediate_size": 128,
        "num_mtp_modules": 0,
    },
    "gpt_oss": {
        "attention_bias": True,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "swiglu_limit": 7.0,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
    },
    "mellum": {
        "attention_bias": False,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))
        },
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
}
EXTRA["qwen3_next"] = EXTRA["qwen3_moe"] | {"shared_expert_intermediate_size": 128} | tiny_hybrids.CONFIG
EXTRA["qwen3_5_text"] = tiny_hybrids.CONFIG | {
    "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
#: Tensors that checkpoints store in another dtype.
KEPT = {"e_score_correction_bias": torch.float32}

#: Every supported family; heads of 128 unless the name says otherwise, and of 64 for gpt-oss.
MODELS = {
    model.name: model
    for model in (
        TinyModel("llama", "llama"),
        TinyModel("qwen2", "qwen2", hidden=1024),  # its heads are hidden / heads, whatever head_dim says
        TinyModel("qwen3", "qwen3"),
        TinyModel("qwen3_moe", "qwen3_moe"),
        TinyModel("glm4_moe", "glm4_moe"),
        TinyModel("minimax_m2", "minimax_m2"),
        TinyModel("mistral", "mistral"),
        TinyModel("llama_64", "llama", head_dim=64),
        TinyModel("llama_96", "llama", head_dim=96),
        TinyModel("qwen3_256", "qwen3", head_dim=256),
        TinyModel("gpt_oss", "gpt_oss", head_dim=64, heads=16, layers=4),
        TinyModel("mellum", "mellum", layers=4),
        TinyModel("qwen3_next", "qwen3_next", head_dim=256, layers=6),
        TinyModel("qwen3_5", "qwen3_5_text", head_dim=256, layers=6, since="0.5.22"),
    )
}
