"""Calibration of transform coding: bases from the model's text, output weights of values, and importances."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.planes import PLANES, PlaneCode
from sglang_kvq.rotations.base import RotationMeta, Rotations
from sglang_kvq.rotations.calibration import checkpoint as checkpoint_module
from sglang_kvq.rotations.calibration.checkpoint import Checkpoint, fingerprint
from sglang_kvq.rotations.calibration.hf_attention import attention_hook
from sglang_kvq.rotations.calibration.run import calibrate
from sglang_kvq.rotations.calibration.sensitivity import fisher_sums
from sglang_kvq.rotations.calibration.settings import CalibrationSettings, draw_contexts
from sglang_kvq.rotations.calibration.transform import (
    MEASURED,
    UNIT,
    UNMEASURED,
    PlaneQuantizer,
    importance_of,
    output_weights,
    transform_rotations,
    with_importance,
)
from sglang_kvq.rotations.maths.fake_quant import RotatedContext, causal_attention
from sglang_kvq.rotations.maths.moments import Moments, MomentSums, attended_moments, context_moments
from sglang_kvq.rotations.maths.transform import PATTERNS, coded_error, fold_steps, pattern_costs
from tests.rotations.helpers import exact_sums, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = CalibrationSettings(
    tokens=1024, context=512, positions=512, composition="transform", sensitivity_contexts=0, sensitivity_draws=1
)
D = 64


@pytest.fixture(scope="module")
def calibrated(llama, ids) -> Rotations:
    return calibrate(llama, ids, SETTINGS)


def activations(model, ids, settings=SETTINGS) -> dict[int, list[torch.Tensor]]:
    """Returns q, k, v of all contexts after the sink, per layer, float64 ``[heads, tokens, D]``."""
    held: dict[int, list[list[torch.Tensor]]] = {}

    def keep(layer, q, k, v, scale):
        held.setdefault(layer, []).append([x[:, settings.sink :].double() for x in (q, k, v)])

    with torch.inference_mode(), attention_hook(model, keep):
        for context in draw_contexts(ids, settings):
            model.base_model(context[None])
    return {layer: [torch.cat(x, 1) for x in zip(*contexts)] for layer, contexts in held.items()}


def attended(model, ids, settings=SETTINGS) -> Moments:
    """Returns moments of the tokens that attention reads in all contexts, layers first."""
    sums = MomentSums(settings.sink)

    def add(layer, q, k, v, scale):
        moments = attended_moments(q, k, v, scale, sink=settings.sink, recent=settings.recent)
        sums.add_moments(layer, moments)

    contexts = draw_contexts(ids, settings)
    with torch.inference_mode(), attention_hook(model, add):
        for context in contexts:
            model.base_model(context[None])
    return sums.mean(2, len(contexts), shared=False)


def random_moments(kv_heads=2, tokens=6000, seed=0) -> tuple[Moments, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns one layer's moments of Gaussian activations with a mean and a few strong directions, then q, k and v."""
    generator = torch.Generator().manual_seed(seed)

    def rows(heads):
        mixing = torch.randn(heads, D, D, generator=generator) * torch.logspace(0, -1.5, D)
        return torch.randn(heads, tokens, D, generator=generator) @ mixing.mT

    q, k, v = rows(2 * kv_heads), rows(kv_heads) + 3 * torch.randn(kv_heads, 1, D, generator=generator), rows(kv_heads)
    return Moments(*(x[None] for x in context_moments(q, k, v, 0))), q.double(), k, v


@pytest.mark.parametrize("granularity", ["per-head", "per-layer"])
def test_scores_and_outputs_stay(llama, ids, granularity):
    found = calibrate(llama, ids, replace(SETTINGS, granularity=granularity))
    heads = {"per-head": 2, "per-layer": 1}[granularity]
    one = torch.eye(D).expand(2, heads, D, D)
    torch.testing.assert_close(found.q @ found.k.mT, one, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.o @ found.v.mT, one, rtol=0, atol=1e-3)
    for matrices in (found.k, found.q, found.v, found.o):
        assert matrices.dtype == torch.float32 and matrices.shape == (2, heads, D, D)
    for rows in (found.k_mean, found.k_energies, found.v_energies):
        assert rows.dtype == torch.float32 and rows.shape == (2, heads, D)
    assert found.granularity == granularity and found.meta.objective == "attended_transform"
    assert found.meta.clip_k is None and found.meta.clip_v is None and found.meta.errors is None


@pytest.mark.parametrize("granularity", ["per-head", "per-layer"])
def test_channels_of_what_is_attended_to_are_independent_and_alike(llama, ids, granularity):
    found, moments = calibrate(llama, ids, replace(SETTINGS, granularity=granularity)), attended(llama, ids)
    if granularity == "per-layer":
        moments = Moments(*(x.mean(1, keepdim=True) for x in moments))
    torch.testing.assert_close(found.k_mean.double(), moments.k_mean, rtol=1e-5, atol=1e-6)
    spread = moments.kk - moments.k_mean[..., :, None] * moments.k_mean[..., None, :]
    for matrices, moment in ((found.k.double(), spread), (found.v.double(), moments.vv)):
        rotated = matrices.mT @ moment @ matrices
        # The tolerance covers a float32 basis, and a covariance that is a small difference of moment and mean.
        torch.testing.assert_close(rotated, torch.eye(D, dtype=torch.float64).expand_as(rotated), rtol=0, atol=0.02)


def test_energies_are_those_of_weighted_errors(calibrated, llama, ids):
    """An error of one in a channel costs its energy; for keys, the weighted mean square change of scores."""
    weights, moments = output_weights(llama, ids), attended(llama, ids)
    for reader, moment, energies in (
        (calibrated.q, moments.qq, calibrated.k_energies),
        (calibrated.o, weights, calibrated.v_energies),  # an error e in the basis is e o^T in the model's basis
    ):
        cost = (reader.double().mT @ moment @ reader.double()).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(cost, energies.double(), rtol=1e-2, atol=1e-9)
    for energies in (calibrated.k_energies, calibrated.v_energies):
        assert (energies > 0).all() and (energies.diff(dim=-1) <= 0).all()


def test_the_weight_of_values_is_what_the_projection_makes_of_an_error(llama, ids):
    found, generator = output_weights(llama, ids), torch.Generator().manual_seed(0)
    assert found.shape == (2, 2, D, D) and found.dtype == torch.float64
    for layer, module in enumerate(llama.model.layers):
        for head in range(2):
            error = torch.randn(D, generator=generator)
            expected = 0.0
            for query_head in (2 * head, 2 * head + 1):
                output = torch.zeros(4, D)
                output[query_head] = error
                with torch.no_grad():
                    expected += float(module.self_attn.o_proj(output.flatten()).square().sum())
            e = error.double()
            assert float(e @ found[layer, head] @ e) == pytest.approx(expected, rel=1e-4)


def test_far_positions_change_keys_only(llama, ids, calibrated):
    far = calibrate(llama, ids, replace(SETTINGS, positions=1024))
    assert torch.equal(far.v, calibrated.v) and torch.equal(far.o, calibrated.o)
    # Rotation by RoPE averages means to less, and a head's mean is most of these keys: the lost mean adds to their
    # energies.
    assert (far.k_mean.norm(dim=-1) < calibrated.k_mean.norm(dim=-1)).all()
    assert (far.k_energies.sum(-1) > calibrated.k_energies.sum(-1)).all()


@pytest.mark.parametrize("widths", [(4, 2, 1, 1), (4, 4, 3, 1), (6, 4, 4, 2)], ids=str)
def test_the_error_of_scores_is_foreseen(widths):
    """Energies and the table predict the error of the served codes, whose BF16 rows have a gain each."""
    moments, q, k, v = random_moments()
    found = transform_rotations(moments, torch.eye(D).double().expand(1, 2, D, D), RotationMeta())
    every = torch.tensor([widths])
    folded = fold_steps(found.for_worker(range(1), 2, 0, 2), every, every)
    code = PlaneCode(widths)

    rows = (k @ folded.k[0] - folded.k_mean[0][:, None]).bfloat16()
    read = code.dequantize(*code.quantize(rows)).double()
    exact = (k.double() - found.k_mean[0].double()[:, None]) @ folded.k[0].double()
    error = read - exact
    queries = q.unflatten(0, (2, -1)).flatten(1, 2) @ folded.queries[0].double()
    moment = queries.mT @ queries / queries.shape[1]
    of_scores = float((error @ moment * error).sum(-1).mean(-1).sum())
    foreseen = float(coded_error(found.k_energies, torch.tensor(widths)))
    assert 0.5 * foreseen < of_scores < 2 * foreseen

    rows = (v @ folded.v[0]).bfloat16()
    back = code.dequantize(*code.quantize(rows)).double() @ folded.outputs[0].double().mT
    of_values = float((back - v).square().sum(-1).mean(-1).sum())
    foreseen = float(coded_error(found.v_energies, torch.tensor(widths)))
    assert 0.5 * foreseen < of_values < 2 * foreseen


def test_foreseen_errors_are_those_that_widths_are_chosen_by(calibrated):
    energies = calibrated.k_energies.double()
    costs = pattern_costs(energies, torch.ones(2))
    for widths in MEASURED.values():
        torch.testing.assert_close(coded_error(energies, torch.tensor(widths)), costs[:, PATTERNS.index(widths)])
    assert [sum(widths) for widths in MEASURED.values()] == list(MEASURED)


def planted(scales):
    """Returns a model in which one layer's attention affects the output more than another's."""
    model = tiny_llama(layers=len(scales))
    for layer, scale in zip(model.model.layers, scales):
        layer.self_attn.o_proj.weight.data *= scale
        layer.self_attn.v_proj.weight.data *= 4
    model.lm_head.weight.data *= 4
    return model.requires_grad_(False)


@pytest.mark.parametrize("most", range(3))
def test_importance_finds_the_layer_that_matters(ids, most):
    model = planted([10.0 if layer == most else 0.5 for layer in range(3)])
    meta = calibrate(model, ids, replace(SETTINGS, sensitivity_contexts=2)).meta
    keys = meta.importance["k"]
    assert all(keys[most] > 10 * x for layer, x in enumerate(keys) if layer != most)
    assert all(x > 0 for part in "kv" for x in meta.importance[part])
    assert meta.sensitivity_unit == UNIT and set(meta.sensitivity) == {"k", "v"}
    for table in meta.sensitivity.values():
        assert list(table) == ["4", "8", "12"]
        assert all(four > 2 * twelve > 0 for four, twelve in zip(table["4"], table["12"]))
        assert max(table["4"]) == table["4"][most]


def test_sensitivities_are_close_to_the_divergence(ids):
    model = planted((6.0, 6.0, 6.0))
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 4
    rotations = calibrate(model, ids, replace(SETTINGS, tokens=512))
    quantizer = PlaneQuantizer(rotations, SETTINGS.sink, SETTINGS.recent)
    exact = exact_sums(model, ids[:768], range(3), quantizer, first=320)
    found = fisher_sums(model, ids[:768], 3, quantizer, first=320, draws=8, seed=0)
    assert (exact > 0).all() and (found / exact).log2().abs().mean() < 0.6, found / exact


def test_a_quantizer_gives_the_variants_asked_for(calibrated, llama, ids):
    q, k, v = (x.float() for x in activations(llama, ids)[1])
    quantizer = PlaneQuantizer(calibrated, SETTINGS.sink, SETTINGS.recent)
    every = quantizer.delta(1, q, k, v, D**-0.5, quantizer.variants)
    assert len(every) == len(quantizer.variants) == 6
    asked = [("v", 12), ("k", 4)]
    for variant, change in zip(asked, quantizer.delta(1, q, k, v, D**-0.5, asked), strict=True):
        assert torch.equal(change, every[quantizer.variants.index(variant)])
        before, after = change[:, : SETTINGS.sink + SETTINGS.recent], change[:, -1]
        assert before.abs().max() < 1e-4 * after.abs().max()  # these tokens read no history


def test_exact_attention_is_the_models_own(calibrated, llama, ids):
    """Removing the keys' mean and applying all matrices changes nothing; quantizers are compared with this."""
    q, k, v = (x.float() for x in activations(llama, ids)[0])
    every = torch.tensor(MEASURED[8]).expand(2, PLANES)
    folded = fold_steps(calibrated.for_worker(range(2), 2, 0, 2), every, every)
    context = RotatedContext.of(folded, 0, q, k, v, D**-0.5, sink=64, recent=256)
    exact = causal_attention(q, k, v, D**-0.5)
    assert (context.to_model_basis(context.exact()) - exact).norm() < 0.02 * exact.norm()
    torch.testing.assert_close(context.k, k @ folded.k[0] - folded.k_mean[0][:, None], rtol=2**-8, atol=1e-3)


def test_importance_is_cost_by_foreseen_error(calibrated):
    """Importance is the geometric mean over three patterns; a part that costs nothing counts a little, not zero."""
    wanted = torch.tensor([3.0, 0.02], dtype=torch.float64)
    foreseen = torch.stack(
        [coded_error(calibrated.k_energies, torch.tensor(widths)) for widths in MEASURED.values()], 1
    )
    noise = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(importance_of(wanted[:, None] * foreseen * noise, foreseen), wanted)
    nothing = importance_of(wanted[:, None] * foreseen * torch.tensor([[1.0], [0.0]]), foreseen)
    assert float(nothing[0]) == pytest.approx(3.0) and 0 < float(nothing[1]) < 1e-6
    assert (importance_of(torch.zeros(2, 3).double(), foreseen) > 0).all()

    of_v = torch.stack([coded_error(calibrated.v_energies, torch.tensor(widths)) for widths in MEASURED.values()], 1)
    rotations = with_importance(calibrated, torch.stack([wanted[:, None] * foreseen, 5 * of_v], -1).flatten(1))
    assert rotations.meta.importance["k"] == pytest.approx([3.0, 0.02])
    assert rotations.meta.importance["v"] == pytest.approx([5.0, 5.0])


def test_sensitivities_that_are_not_finite_are_told(calibrated):
    nats = torch.ones(2, 6, dtype=torch.float64)
    nats[1, 4] = float("nan")
    with pytest.raises(KVQuantError, match="layer 1: its sensitivity is not finite.*--no-sensitivity"):
        with_importance(calibrated, nats)


def test_without_sensitivities_errors_count_relative_to_a_layers_energy(calibrated):
    assert calibrated.meta.sensitivity is None and calibrated.meta.sensitivity_unit == UNMEASURED
    for part, energies in (("k", calibrated.k_energies), ("v", calibrated.v_energies)):
        total = torch.tensor(calibrated.meta.importance[part]) * energies.sum((1, 2))
        torch.testing.assert_close(total, torch.ones(2), rtol=1e-4, atol=0)


@pytest.mark.parametrize("stop", [("moments", 1), ("sensitivity", 1)], ids=str)
def test_it_goes_on_where_it_stopped(ids, tmp_path, monkeypatch, stop):
    monkeypatch.setattr(checkpoint_module, "INTERVAL", 0.0)
    settings = replace(SETTINGS, sensitivity_contexts=2)
    whole, seen = calibrate(tiny_llama(), ids, settings), []

    def interrupt(name, done, total):
        if (name, done) == stop:
            raise KeyboardInterrupt

    def keep(*run):
        return Checkpoint(tmp_path / "p", fingerprint(*run))

    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_llama(), ids, settings, interrupt, checkpoint=keep)
    model = tiny_llama()
    model.base_model.register_forward_pre_hook(lambda *_: seen.append("body"))
    again = calibrate(model, ids, settings, lambda name, done, total: seen.append(name), checkpoint=keep)
    for name in ("k", "v", "q", "o", "k_mean", "k_energies", "v_energies"):
        assert torch.equal(getattr(again, name), getattr(whole, name)), name
    assert again.meta == whole.meta
    looked = 1  # a few tokens, to see which modules attend
    assert seen.count("body") == looked + {"moments": 1 + 2, "sensitivity": 0 + 1}[stop[0]]
    assert "clips" not in seen


def test_an_older_versions_checkpoint_is_refused(llama, ids, tmp_path):
    run = fingerprint(llama, ids, SETTINGS)
    older = {name: value for name, value in run.items() if name != "version"}
    Checkpoint(tmp_path, older).save("moments", 1, {"qq.0": torch.ones(1)}, last=True)
    with pytest.raises(KVQuantError, match="another version left.*--restart"):
        Checkpoint(tmp_path, run)


def renamed(model, name):
    for layer in model.model.layers:
        attention = layer.self_attn
        projection = attention.o_proj
        del attention.o_proj
        setattr(attention, name, projection)
        attention.forward = lambda *args, _a=attention, **kwargs: _forward(_a, name, *args, **kwargs)
    return model


def _forward(attention, name, *args, **kwargs):
    """Runs the attention's own forward pass, with its projection under the name that the class expects."""
    attention.o_proj = getattr(attention, name)
    try:
        return type(attention).forward(attention, *args, **kwargs)
    finally:
        del attention.o_proj


@pytest.mark.parametrize("name", ["out_proj", "dense", "wo"])
def test_projections_of_other_names(llama, ids, name):
    torch.testing.assert_close(output_weights(renamed(tiny_llama(), name), ids), output_weights(llama, ids))


def test_projections_that_are_none_are_told(ids):
    with pytest.raises(KVQuantError, match=r"layer 0: model.layers.0.self_attn \(LlamaAttention\) has no output"):
        output_weights(renamed(tiny_llama(), "mix"), ids)

    broken = tiny_llama()
    attention = broken.model.layers[1].self_attn
    attention.o_proj = torch.nn.Sequential(attention.o_proj)
    with pytest.raises(KVQuantError, match="layer 1: model.layers.1.self_attn.o_proj is a Sequential.*--composition"):
        output_weights(broken, ids)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.zeros(64, 256, dtype=torch.float8_e4m3fn), r"float8_e4m3fn \[64, 256\], expected \[hidden_size, 256\]"),
        (torch.zeros(8192, 1, dtype=torch.uint8), r"uint8 \[8192, 1\], expected"),
        (torch.zeros(64, 128), r"float32 \[64, 128\], expected \[hidden_size, 256\]"),
        (torch.zeros(64, 256, device="meta"), "not in memory.*--device"),
    ],
    ids=["8 bits", "packed", "too narrow", "offloaded"],
)
def test_weights_that_cannot_be_read_are_told(ids, weight, said):
    model, layer = tiny_llama(), 1
    projection = model.model.layers[layer].self_attn.o_proj
    projection.weight = torch.nn.Parameter(weight, requires_grad=False)
    projection.forward = lambda x: x[..., :64]
    with pytest.raises(KVQuantError, match=f"layer 1: .*model.layers.1.self_attn.o_proj.*{said}"):
        output_weights(model, ids)


def test_clips_mean_nothing_to_it():
    with pytest.raises(KVQuantError, match="--clips global: --composition transform clips nothing"):
        replace(SETTINGS, clips="global")


def test_an_engine_does_not_have_what_it_needs(llama, ids):
    from sglang_kvq.sglang.calibration.calibrate_engine import calibrate_on_engine

    with pytest.raises(KVQuantError, match="--composition transform needs.*--engine out"):
        calibrate_on_engine("none", llama.config, ids, SETTINGS, lambda *done: None)
    windowed = SimpleNamespace(layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(KVQuantError, match="sliding windows.*Use --kv-quant oscar"):  # transformers refuses it, too
        calibrate_on_engine("none", windowed, ids, SETTINGS, lambda *done: None)
