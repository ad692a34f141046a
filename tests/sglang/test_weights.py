"""The value rotation folded into the weights gives what rotating at run time gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.sglang import runtime, weights

HIDDEN, Q_HEADS, KV_HEADS, D = 96, 6, 2, 64


class Linear(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Attention(torch.nn.Module):
    def __init__(self, layer_id: int, bias: bool) -> None:
        super().__init__()
        self.qkv_proj = Linear(HIDDEN, (Q_HEADS + 2 * KV_HEADS) * D, bias)
        self.o_proj = Linear(Q_HEADS * D, HIDDEN, False)
        self.attn = SimpleNamespace(layer_id=layer_id, tp_k_head_num=KV_HEADS)


class LlamaForCausalLM(torch.nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention(i + 5, bias) for i in range(2))


class SomethingElse(LlamaForCausalLM):
    pass


def output(attention: Attention, x: torch.Tensor, rotate=None, back=None) -> torch.Tensor:
    """Self-attention of x ``[tokens, hidden]``; ``rotate`` acts on V and ``back`` on the output before o_proj."""
    q, k, v = attention.qkv_proj(x).split([Q_HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
    q, k, v = (y.unflatten(-1, (-1, D)) for y in (q, k, v))
    v = v if rotate is None else rotate(v)
    o = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], enable_gqa=True, is_causal=True
    )[0].transpose(0, 1)
    return attention.o_proj((o if back is None else back(o)).flatten(1))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("heads", [1, KV_HEADS], ids=["per-layer", "per-head"])
def test_folding_equals_rotating_at_run_time(bias, heads):
    torch.manual_seed(0)
    model, x = LlamaForCausalLM(bias), torch.randn(20, HIDDEN)
    rotations = torch.linalg.qr(torch.randn(2, heads, D, D))[0]
    with torch.no_grad():
        plain = [output(layer, x) for layer in model.layers]
        per_head = rotations.expand(-1, KV_HEADS, -1, -1)
        ops = ReferenceOps(None, LayerRotations(None, per_head))
        empty = torch.empty(0, KV_HEADS, D)
        at_run_time = [
            output(layer, x, lambda v, i=i: ops.rotate(i, empty, empty, v)[2], lambda o, i=i: ops.rotate_output(i, o))
            for i, layer in enumerate(model.layers)
        ]
        weights.fold(model, 5, rotations)
        folded = [output(layer, x) for layer in model.layers]
    for a, b, c in zip(plain, at_run_time, folded):
        assert torch.allclose(b, c, atol=1e-4) and torch.allclose(a, c, atol=1e-4)
    assert not torch.allclose(model.layers[0].qkv_proj.weight, LlamaForCausalLM(bias).layers[0].qkv_proj.weight)


def test_only_known_architectures_with_plain_weights_are_folded():
    model = LlamaForCausalLM(False)
    assert weights.can_fold(model, range(5, 7))
    assert not weights.can_fold(model, range(5, 8)), "a layer is missing"
    assert not weights.can_fold(SomethingElse(False), range(5, 7))
    model.layers[1].o_proj.weight.data = model.layers[1].o_proj.weight.data.to(torch.float8_e4m3fn)
    assert not weights.can_fold(model, range(5, 7))


def test_weight_updates_are_refused_only_while_folded(monkeypatch):
    state = SimpleNamespace(status={"v_rotation_folded": True})
    monkeypatch.setattr(runtime, "_current", state)
    done, message = weights.refuse_update(lambda self: (True, "updated"), None)
    assert not done and "Restart the server" in message
    state.status["v_rotation_folded"] = False
    assert weights.refuse_update(lambda self: (True, "updated"), None) == (True, "updated")
