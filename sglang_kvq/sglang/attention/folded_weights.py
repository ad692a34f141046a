"""Folds the value rotation into W_v and W_o if they are plain matrices; refuses to export or update folded weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import compat, runtime
from sglang_kvq.sglang.runtime import logger
from sglang_kvq.sglang.types import Original, ServerArgs

#: Architectures whose attention is qkv_proj -> (norm, rope on q and k) -> attention -> o_proj. They apply nothing else
#: to V, nor to the output before o_proj. (A learned sink scales a head's output as a whole.)
FOLDABLE = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "MellumForCausalLM",
        "MixtralForCausalLM",
    }
)


def attention_layers(model: torch.nn.Module) -> dict[int, Any]:
    """Returns each module with qkv_proj, o_proj and a RadixAttention named ``attn``, by layer id."""
    modules: Iterable[Any] = model.modules()
    return {
        module.attn.layer_id: module
        for module in modules
        if hasattr(module, "attn")
        and hasattr(module, "qkv_proj")
        and hasattr(module, "o_proj")
        and hasattr(module.attn, "layer_id")
    }


def why_not_foldable(
    model: torch.nn.Module, layers: Iterable[int], server_args: ServerArgs, device: str | torch.device
) -> str | None:
    """Returns why the value rotation must be applied at run time; None if ``fold`` may change this model's weights.

    The architecture must be in ``FOLDABLE``. Every layer's W_v and W_o must be plain dense matrices on ``device`` that
    SGLang multiplies unchanged. The attention must not gate its output element by element.
    """
    found = attention_layers(model)
    for layer in layers:
        if getattr(found.get(layer), "attn_output_gate", False):  # an attribute of SGLang's attention classes
            return f"layer {layer} gates its output between attention and o_proj, in the model's own basis"
    if type(model).__name__ not in FOLDABLE:
        return f"{type(model).__name__} is not known to attend to V as its projection gives it"
    for field, harmless, why in _SETTINGS:
        value = compat.resolved(server_args, field, harmless[0])
        if value not in harmless:
            return f"--{field.replace('_', '-')}: {why}"
    for layer in layers:
        if layer not in found:
            return f"layer {layer} has no qkv_proj and o_proj around its attention"
        attention = found[layer]
        attn, d = attention.attn, attention.attn.head_dim
        rows = (attn.tp_q_head_num + attn.tp_k_head_num + attn.tp_v_head_num) * d
        for name, projection, axis, size in (
            ("qkv_proj", attention.qkv_proj, 0, rows),
            ("o_proj", attention.o_proj, 1, attn.tp_q_head_num * d),
        ):
            if what := _why_not_plain(projection, axis, size, torch.device(device)):
                return f"{name} of layer {layer} {what}"
    return None


#: Settings with which folding would be wrong or would not last: field, harmless values, and why.
_SETTINGS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("enable_lora", (None, False), "an adapter's own V and output matrices would miss it"),
    ("lora_paths", (None, [], {}), "an adapter's own V and output matrices would miss it"),
    ("cpu_offload_gb", (None, 0), "weights that are offloaded are not where they can be changed"),
    ("offload_group_size", (None, -1, 0), "weights that are offloaded are not where they can be changed"),
    ("torchao_config", (None, ""), "quantized weights cannot take it up"),
)


def _why_not_plain(projection: Any, axis: int, size: int, device: torch.device) -> str | None:
    """Returns a completion of "qkv_proj of layer 3 ..." unless its weight is dense, with ``size`` along ``axis``."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    method: object = getattr(projection, "quant_method", None)
    weight: Any = getattr(projection, "weight", None)
    if type(method) is not UnquantizedLinearMethod:
        return f"multiplies by {type(method).__name__}"
    if getattr(projection, "use_intel_amx_backend", False):
        return "is packed for AMX"
    bias = getattr(projection, "bias", None)
    for tensor in (weight,) if bias is None else (weight, bias):
        # A subclass may report any dtype and shape but hold other data: torchao's subclasses report bfloat16.
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or type(tensor.data) is not torch.Tensor:
            return f"has a {type(tensor).__name__}"
        if tensor.layout != torch.strided or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"has a tensor of {tensor.dtype}, {tensor.layout}"
        if (tensor.device.type, tensor.device.index or 0) != (device.type, device.index or 0):
            return f"has a tensor on {tensor.device}"
    if weight.dim() != 2 or weight.shape[axis] != size:
        return f"has a weight of {list(weight.shape)}, expected {size} along dimension {axis}"
    return None


@torch.no_grad()
def fold(
    model: torch.nn.Module, layers: Iterable[int], rotations: torch.Tensor, outputs: torch.Tensor | None = None
) -> None:
    """Folds rotations in float32: W_v <- R_v^T W_v (and its bias) per KV head, W_o <- W_o R_o per query head.

    Args:
        layers: ids of this worker's layers.
        rotations: R_v of these layers, float32 ``[layers, kv_heads or 1, D, D]``.
        outputs: R_o, same shape and dtype, with R_o R_v^T = 1; None if R_v is orthogonal and serves as both.
    """
    found = attention_layers(model)
    for layer, r, back in zip(layers, rotations, rotations if outputs is None else outputs, strict=True):
        attention = found[layer]
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
        back = back.expand(kv_heads, d, d).repeat_interleave(heads // kv_heads, dim=0)
        w = out.weight.float().unflatten(1, (heads, d))
        out.weight.copy_(torch.einsum("ohd,hde->ohe", w, back).flatten(1))


def folded() -> bool:
    """Returns True if this worker's weights contain the value rotation."""
    state = runtime.current()
    return state is not None and bool(state.status.get("v_rotation_folded"))


_FOLDED = "--kv-quant folded the value rotation into W_v and W_o when the model was loaded, so "
_NO_UPDATE = _FOLDED + "weights cannot be updated in place. Restart the server with the new weights."
_NO_EXPORT = _FOLDED + "they are not the checkpoint's and are not given away. Use a server without --kv-quant."


def refuse_update(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``WeightUpdater.update_weights_*``: refuses new weights, which would lack the folded rotation."""
    return (False, _NO_UPDATE) if folded() else original(self, *args, **kwargs)


def refuse_update_session(original: Original, self: Any, recv_req: Any) -> Any:
    """AROUND ``SchedulerWeightUpdaterManager.begin_weight_update``: refuses; later steps may bypass our hooks."""
    if not folded():
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    return BeginWeightUpdateReqOutput(success=False, message=_NO_UPDATE)


def refuse_sending(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``WeightExporter.*_remote_instance``: refuses to send folded weights, which are not the checkpoint's."""
    return (False, _NO_EXPORT) if folded() else original(self, *args, **kwargs)


def refuse_saving(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``WeightExporter.save_*`` and ``WeightChecker.handle``: refuses folded weights.

    Raises:
        KVQuantError: the value rotation is folded; SGLang sends the message to the caller.
    """
    if folded():
        raise KVQuantError(_NO_EXPORT)
    return original(self, *args, **kwargs)


def is_folded_weight(name: str) -> bool:
    """Returns True if folding changes the parameter of this name; accepts names of checkpoints and of SGLang."""
    return not {"v_proj", "qkv_proj", "o_proj"}.isdisjoint(name.split("."))


#: Answer of a worker that refuses to give a weight. No weight has such a value; SGLang's None means no such weight.
NOT_GIVEN: list[list[float]] = [[]]


def refuse_reading(original: Original, self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``WeightExporter.get_weights_by_name``: refuses folded weights with a log line.

    Returns:
        ``NOT_GIVEN``, which ``explain_refusal`` turns into an error with the reason. SGLang loads no plugins in the
        processes of ``--tokenizer-worker-num``: with several of them None, which SGLang answers with its own error.
    """
    from sglang.srt.runtime_context import get_server_args

    found = original(self, name, *args, **kwargs)
    if found is None or not folded() or not is_folded_weight(name):
        return found
    logger.error("get_weights_by_name %s: %s", name, _NO_EXPORT)
    return None if (compat.resolved(get_server_args(), "tokenizer_worker_num") or 1) > 1 else NOT_GIVEN


async def explain_refusal(original: Original, self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``TokenizerControlMixin.get_weights_by_name``: says why a worker refused.

    Raises:
        KVQuantError: a worker answered ``NOT_GIVEN``.
    """
    found = await original(self, obj, *args, **kwargs)
    if found is not None and (found == NOT_GIVEN or NOT_GIVEN in found):  # data-parallel ranks each have an answer
        raise KVQuantError(f"{obj.name} is not available: {_NO_EXPORT}")
    return found
