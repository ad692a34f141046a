"""Folding the value rotation into W_v and W_o, where the weights are plain matrices."""

from __future__ import annotations

import torch

from sglang_kvq.sglang import runtime

#: Architectures whose attention is qkv_proj -> (norm, rope on q and k) -> attention -> o_proj, with
#: nothing applied to V in between nor to the output before o_proj.
FOLDABLE = frozenset(
    {
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "MixtralForCausalLM",
    }
)


def attention_layers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Each module that owns a RadixAttention named ``attn`` with qkv_proj and o_proj, by layer id."""
    return {
        module.attn.layer_id: module
        for module in model.modules()
        if hasattr(module, "attn") and hasattr(module, "qkv_proj") and hasattr(module, "o_proj")
        and hasattr(module.attn, "layer_id")
    }


def can_fold(model: torch.nn.Module, layers: range) -> bool:
    """Whether every layer's W_v and W_o are plain floating-point matrices of a known architecture."""
    if type(model).__name__ not in FOLDABLE:
        return False
    found = attention_layers(model)
    weights = [
        getattr(projection, "weight", None)
        for layer in layers
        if layer in found
        for projection in (found[layer].qkv_proj, found[layer].o_proj)
    ]
    plain = (torch.bfloat16, torch.float16, torch.float32)
    return len(weights) == 2 * len(layers) and all(
        w is not None and w.dim() == 2 and w.dtype in plain for w in weights
    )


@torch.no_grad()
def fold(model: torch.nn.Module, first_layer: int, rotations: torch.Tensor) -> None:
    """W_v <- R_v^T W_v (and its bias) per KV head, W_o <- W_o R_v per query head, in float32.

    Args:
        rotations: float32 ``[layers, kv_heads or 1, D, D]`` of this worker, ``first_layer`` first.
    """
    found = attention_layers(model)
    for index, r in enumerate(rotations):
        attention = found[first_layer + index]
        d = r.shape[-1]
        kv_heads = attention.attn.tp_k_head_num
        r = r.expand(kv_heads, d, d)
        qkv, out = attention.qkv_proj, attention.o_proj
        v_rows = qkv.weight[-kv_heads * d :]
        v_rows.copy_((r.transpose(1, 2) @ v_rows.float().unflatten(0, (kv_heads, d))).flatten(0, 1))
        if getattr(qkv, "bias", None) is not None:
            bias = qkv.bias[-kv_heads * d :]
            bias.copy_((r.transpose(1, 2) @ bias.float().unflatten(0, (kv_heads, d)).unsqueeze(-1)).flatten())
        heads = out.weight.shape[1] // d
        r = r.repeat_interleave(heads // kv_heads, dim=0)
        w = out.weight.float().unflatten(1, (heads, d))
        out.weight.copy_(torch.einsum("ohd,hde->ohe", w, r).flatten(1))


def refuse_update(original, self, *args, **kwargs):
    """AROUND ``WeightUpdater.update_weights_*``: new weights would lack the folded rotation."""
    state = runtime.current()
    if state is None or not state.status.get("v_rotation_folded"):
        return original(self, *args, **kwargs)
    return False, (
        "--kv-quant folded the value rotation into W_v and W_o when the model was loaded, so weights cannot be "
        "updated in place. Restart the server with the new weights."
    )
