"""Folding the value rotation into the weights gives the results of rotating at run time."""

from __future__ import annotations

import ast
import asyncio
import inspect
import pkgutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang.srt
import torch
from sglang.srt import runtime_context
from sglang.srt.entrypoints import http_server
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import compat, hooks, runtime
from sglang_kvq.sglang.attention import folded_weights

HIDDEN, Q_HEADS, KV_HEADS, D = 96, 6, 2, 64


class Linear(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.randn(outputs)) if bias else None
        self.quant_method = UnquantizedLinearMethod()

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Attention(torch.nn.Module):
    def __init__(self, layer_id: int, bias: bool) -> None:
        super().__init__()
        self.qkv_proj = Linear(HIDDEN, (Q_HEADS + 2 * KV_HEADS) * D, bias)
        self.o_proj = Linear(Q_HEADS * D, HIDDEN, False)
        self.attn = RadixAttention(Q_HEADS, D, 1.0, num_kv_heads=KV_HEADS, layer_id=layer_id)


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
        folded_weights.fold(model, (5, 6), rotations)
        folded = [output(layer, x) for layer in model.layers]
    for a, b, c in zip(plain, at_run_time, folded):
        assert torch.allclose(b, c, atol=1e-4) and torch.allclose(a, c, atol=1e-4)
    assert not torch.allclose(model.layers[0].qkv_proj.weight, LlamaForCausalLM(bias).layers[0].qkv_proj.weight)


@pytest.mark.parametrize("heads", [1, KV_HEADS], ids=["per-layer", "per-head"])
def test_folding_takes_outputs_matrices_that_undo_the_values(heads):
    """``fold`` gives o_proj the matrices that undo R_v, because transform coding's pairs are not orthogonal."""
    torch.manual_seed(0)
    model, x = LlamaForCausalLM(True), torch.randn(20, HIDDEN)
    u, scale = torch.linalg.qr(torch.randn(2, heads, D, D)).Q, torch.logspace(-1, 1, D)
    v, o = u * scale, u / scale
    with torch.no_grad():
        plain = [output(layer, x) for layer in model.layers]
        ops = ReferenceOps(
            None, LayerRotations(None, v.expand(-1, KV_HEADS, -1, -1), None, o.expand(2, KV_HEADS, D, D))
        )
        empty = torch.empty(0, KV_HEADS, D)
        at_run_time = [
            output(layer, x, lambda v, i=i: ops.rotate(i, empty, empty, v)[2], lambda o, i=i: ops.rotate_output(i, o))
            for i, layer in enumerate(model.layers)
        ]
        folded_weights.fold(model, (5, 6), v, o)
        folded = [output(layer, x) for layer in model.layers]
        for a, b, c in zip(plain, at_run_time, folded):
            torch.testing.assert_close(b, a, atol=1e-3, rtol=0)
            torch.testing.assert_close(c, a, atol=1e-3, rtol=0)
        folded_weights.fold(model, (5, 6), v)  # folded again, as if R_v were orthogonal
        assert not torch.allclose(output(model.layers[0], x), plain[0], atol=0.1)


class GptOssForCausalLM(torch.nn.Module):
    """A model whose layer 5 has a window and whose layer 6 is cached, with biases and a learned sink per query head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention(i, True) for i in (5, 6))
        for layer in self.layers:
            layer.o_proj.bias = torch.nn.Parameter(torch.randn(HIDDEN))
            layer.sinks = torch.nn.Parameter(torch.randn(Q_HEADS) * 2)


def output_with_sinks(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    q, k, v = attention.qkv_proj(x).split([Q_HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
    q, k, v = (y.unflatten(-1, (-1, D)).transpose(0, 1) for y in (q, k, v))
    k, v = (y.repeat_interleave(Q_HEADS // KV_HEADS, 0) for y in (k, v))
    scores = (q @ k.transpose(1, 2)).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    shares = torch.cat([scores, attention.sinks[:, None, None].expand(-1, len(x), 1)], -1).softmax(-1)[..., :-1]
    return attention.o_proj((shares @ v).transpose(0, 1).flatten(1))


def test_folding_with_sinks_and_biases_leaves_layers_with_windows_alone(why):
    torch.manual_seed(0)
    model, x = GptOssForCausalLM(), torch.randn(20, HIDDEN)
    assert why(model, layers=(6,)) is None
    before = [{name: p.clone() for name, p in layer.named_parameters()} for layer in model.layers]
    with torch.no_grad():
        plain = [output_with_sinks(layer, x) for layer in model.layers]
        folded_weights.fold(model, (6,), torch.linalg.qr(torch.randn(1, KV_HEADS, D, D))[0])
        for layer, wanted in zip(model.layers, plain):
            torch.testing.assert_close(output_with_sinks(layer, x), wanted, atol=1e-3, rtol=0)
    assert all(torch.equal(p, before[0][name]) for name, p in model.layers[0].named_parameters())
    changed = {name for name, p in model.layers[1].named_parameters() if not torch.equal(p, before[1][name])}
    assert changed == {"qkv_proj.weight", "qkv_proj.bias", "o_proj.weight"}


@pytest.fixture
def why(command_line):
    """``why(model, *flags)`` returns the reason that a CPU server logs for not folding, or None if it folds."""

    def ask(model, *flags: str, device: str = "cpu", layers: range = range(5, 7)) -> str | None:
        server_args = command_line("--kv-quant", "hadamard", *flags)
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
        return folded_weights.why_not_foldable(model, layers, server_args, device)

    return ask


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_plain_weights_are_folded(why, bias):
    model = LlamaForCausalLM(bias).bfloat16()
    assert why(model) is None
    assert why(model.float()) is None


@pytest.mark.parametrize(
    ("flags", "why_not"),
    [
        (["--cpu-offload-gb", "1"], "--cpu-offload-gb: weights that are offloaded"),
        (["--offload-group-size", "2"], "--offload-group-size: weights that are offloaded"),
        (["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"], "--enable-lora: an adapter's"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_weights_that_a_setting_moves_or_adds_to_are_not_folded(why, flags, why_not):
    assert why(LlamaForCausalLM(False), *flags).startswith(why_not)


class Packed(torch.Tensor):
    """A weight that claims to be a bfloat16 matrix, as torchao's quantized weights do."""


def packed(projection):
    projection.weight = torch.nn.Parameter(projection.weight.detach().bfloat16().as_subclass(Packed))


def replace_weight(change):
    def put(projection):
        projection.weight = torch.nn.Parameter(change(projection.weight.detach()), requires_grad=False)

    return put


NOT_PLAIN = {
    "a tensor subclass": (packed, "has a Packed"),
    "AMX's layout": (lambda p: setattr(p, "use_intel_amx_backend", True), "is packed for AMX"),
    "a quantized method": (lambda p: setattr(p, "quant_method", SimpleNamespace()), "multiplies by SimpleNamespace"),
    "an adapter's wrapper": (lambda p: delattr(p, "quant_method"), "multiplies by NoneType"),
    "float8": (replace_weight(lambda w: w.to(torch.float8_e4m3fn)), "has a tensor of torch.float8_e4m3fn"),
    "sparse": (replace_weight(lambda w: w.to_sparse()), "torch.sparse_coo"),
    "no data": (replace_weight(lambda w: w.to("meta")), "has a tensor on meta"),
    "transposed": (replace_weight(lambda w: w.t().contiguous()), "expected"),
    "padded": (replace_weight(lambda w: torch.nn.functional.pad(w, (0, 8, 0, 8))), "expected"),
    "flat": (replace_weight(lambda w: w.flatten()), "expected"),
}


@pytest.mark.parametrize("name", ["qkv_proj", "o_proj"])
@pytest.mark.parametrize(("change", "what"), NOT_PLAIN.values(), ids=NOT_PLAIN.keys())
def test_weights_that_only_look_foldable(why, change, what, name):
    model = LlamaForCausalLM(False)
    change(getattr(model.layers[1], name))
    found = why(model)
    assert found is not None and found.startswith(f"{name} of layer 6 ") and what in found


def test_biases_too_must_be_plain(why):
    model = LlamaForCausalLM(True)
    model.layers[0].qkv_proj.bias = torch.nn.Parameter(model.layers[0].qkv_proj.bias.detach().to("meta"))
    assert why(model) == "qkv_proj of layer 5 has a tensor on meta"


def test_weights_elsewhere_are_not_folded(why):
    """``--cpu-offload-gb`` leaves some parameters of a CUDA worker on the CPU; such a model is not folded."""
    assert why(LlamaForCausalLM(False), device="cuda:0") == "qkv_proj of layer 5 has a tensor on cpu"


def test_only_known_architectures_with_all_layers_are_folded(why):
    assert why(SomethingElse(False)).startswith("SomethingElse is not known")
    assert why(LlamaForCausalLM(False), layers=range(5, 8)).startswith("layer 7 has no qkv_proj")


@pytest.mark.parametrize("gate", [True, False])
def test_a_gated_output_is_not_folded(why, gate):
    """A gate behind attention prevents folding in any architecture: it multiplies elements, and R_v mixes them."""
    model = LlamaForCausalLM(False)
    model.layers[1].attn_output_gate = gate
    assert why(model) == (
        "layer 6 gates its output between attention and o_proj, in the model's own basis" * gate or None
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [("qwen3_next", "Qwen3HybridAttentionDecoderLayer"), ("qwen3_5", "Qwen3_5AttentionDecoderLayer")],
)
def test_attention_classes_of_hybrids_say_that_they_gate(module, name):
    """The hybrids' attention classes still have the attributes that ``why_not_foldable`` reads, and use the gate."""
    source = (Path(next(iter(sglang.srt.__path__))) / "models" / f"{module}.py").read_text()
    kind = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    text = ast.get_source_segment(source, kind)
    assert all(f"self.{part} = " in text for part in ("attn", "qkv_proj", "o_proj", "attn_output_gate"))
    assert "if self.attn_output_gate:" in text


# -- folded weights can be neither read nor changed --------------------------------------------------------------------

RELEASE = compat.sglang_version()
REFUSING = [h for h in hooks.for_release(RELEASE) if (h.handler or "").startswith("attention.folded_weights:refuse")]
COMPONENTS = "model_executor.model_runner_components"
#: Methods of these classes that neither show nor change a weight by themselves.
HARMLESS = {
    f"{COMPONENTS}.weight_updater.WeightUpdater": {
        "init_weights_update_group",
        "destroy_weights_update_group",  # both only connect
        "receive_weights_from_distributed",  # fills new tensors; ``load_weights_from_distributed`` puts them in place
        "begin_weight_update",
        "end_weight_update",  # both follow ``SchedulerWeightUpdaterManager.begin_weight_update``, which refuses
    },
    f"{COMPONENTS}.weight_exporter.WeightExporter": set(),
    "utils.weight_checker.WeightChecker": set(),
}


@pytest.mark.parametrize("owner", HARMLESS)
def test_every_way_in_or_out_is_hooked(owner):
    public = {
        name
        for name, f in vars(pkgutil.resolve_name(f"sglang.srt.{owner}")).items()
        if callable(f) and not name.startswith("_")
    }
    hooked = {h.target.rpartition(".")[2] for h in REFUSING if h.target.startswith(f"{owner}.")}
    assert public - hooked <= HARMLESS[owner]


@pytest.fixture
def folded(applied, monkeypatch):
    """Returns the state of a worker with folded value rotations, in a process that serves with ``--kv-quant``."""
    state = SimpleNamespace(status={"v_rotation_folded": True}, args=SimpleNamespace(tokenizer_worker_num=1))
    monkeypatch.setattr(runtime, "_current", state)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: state.args)
    monkeypatch.setattr(compat, "resolved", lambda args, field, default=None: getattr(args, field, default))
    monkeypatch.setattr(applied, "_config", KVQuantConfig("hadamard"))
    return state


@pytest.mark.parametrize("hook", REFUSING, ids=lambda h: h.target.rpartition("components.")[2])
def test_refused_while_folded(applied, folded, hook):
    """Each refusal has the form that SGLang's caller expects, and names the reason and the way out."""
    handler, words = applied._installed[hook], ["model.layers.0.self_attn.v_proj.weight"] * len(hook.params)
    if hook.handler == "attention.folded_weights:refuse_saving":
        with pytest.raises(KVQuantError, match="folded.*without --kv-quant"):
            handler(lambda *a: pytest.fail("ran"), None, *words)
    elif hook.handler == "attention.folded_weights:refuse_reading":
        assert handler(lambda *a: [0.5], None, *words) == folded_weights.NOT_GIVEN
    else:
        answer = handler(lambda *a: pytest.fail("ran"), None, *words)
        done, message = answer if isinstance(answer, tuple) else (answer.success, answer.message)
        assert not done and "folded" in message and ("Restart" in message or "without --kv-quant" in message)
    folded.status["v_rotation_folded"] = False
    assert handler(lambda *a: a, "self", *words) == ("self", *words)


@pytest.mark.parametrize(
    ("name", "is_folded"),
    [
        ("model.layers.3.self_attn.v_proj.weight", True),
        ("model.layers.3.self_attn.qkv_proj.weight", True),
        ("model.layers.3.self_attn.o_proj.weight", True),
        ("model.layers.3.self_attn.q_proj.weight", False),
        ("model.layers.3.mlp.down_proj.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_only_what_is_folded_cannot_be_read(folded, caplog, name, is_folded):
    with caplog.at_level("ERROR", logger="sglang_kvq"):
        found = folded_weights.refuse_reading(lambda self, name, size: [1.0], None, name, 100)
    assert found == (folded_weights.NOT_GIVEN if is_folded else [1.0])
    assert (name in caplog.text) == is_folded
    missing = folded_weights.refuse_reading(lambda self, name, size: None, None, name, 100)
    assert missing is None, "a parameter that the model does not have was said to be folded"


def test_processes_without_the_plugin_get_no_value_to_pass_on(folded):
    """With ``--tokenizer-worker-num``, nothing turns ``NOT_GIVEN`` into an error; SGLang makes an error of None."""
    folded.args.tokenizer_worker_num = 2
    read = partial(folded_weights.refuse_reading, lambda self, name, size: [1.0], None)
    assert read("model.layers.0.self_attn.v_proj.weight", 100) is None
    assert read("model.layers.0.self_attn.q_proj.weight", 100) == [1.0]
    source = inspect.getsource(http_server.get_weights_by_name)
    assert "if ret is None:\n            return _create_error_response(" in source


@pytest.mark.parametrize("found", [[[]], [[[]], [[]]], [[1.0], [[]]]], ids=["one", "ranks", "some ranks"])
def test_a_client_is_told_why(found):
    """The client gets the reason as an exception, which SGLang turns into an error response."""
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(KVQuantError, match=f"{name} is not available: --kv-quant folded"):
        _explained(found, name)


@pytest.mark.parametrize("found", [None, [None, None], [], [0.5], [[0.5, 1.0]], [[0.5], None]])
def test_a_parameter_that_is_missing_or_given_is_not_called_folded(found):
    assert _explained(found, "model.layers.99.self_attn.v_proj.weight") == found


def _explained(found, name):
    async def original(self, obj, request=None):
        return found

    return asyncio.run(folded_weights.explain_refusal(original, None, SimpleNamespace(name=name), None))
