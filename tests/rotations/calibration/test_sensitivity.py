"""Sensitivities agree with the divergence that they approximate."""

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations import find_rotations, load_rotations
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
from sglang_kvq.rotations.calibration.run import calibrate
from sglang_kvq.rotations.calibration.sensitivity import VARIANTS, LayerQuantizer, fisher_sums, sensitivity_table
from sglang_kvq.rotations.calibration.settings import CalibrationSettings
from tests.rotations.helpers import exact_sums, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


def sharper_llama(layers=3):
    """Returns a random model whose attention affects its logits strongly."""
    model = tiny_llama(layers=layers)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 6
        layer.self_attn.v_proj.weight.data *= 6
        layer.self_attn.q_proj.weight.data *= 4
    model.lm_head.weight.data *= 4
    return model.requires_grad_(False)


def test_second_order_is_close_to_the_divergence():
    model, ids = sharper_llama(), torch.randint(97, (1024,), generator=torch.Generator().manual_seed(0))
    settings = CalibrationSettings(
        tokens=512, context=512, clip_grid=(0.86, 1.0), clip_contexts=1, sensitivity_contexts=0
    )
    rotations = calibrate(model, ids, settings)
    quantizer = LayerQuantizer(rotations, settings.sink, settings.recent)
    exact = exact_sums(model, ids[:768], range(3), quantizer, first=320)
    found = fisher_sums(model, ids[:768], 3, quantizer, first=320, draws=8, seed=0)
    assert (exact > 0).all() and exact.max() > 100 * exact.min()  # the values differ enough to compare
    assert (found / exact).log2().abs().mean() < 0.6, found / exact
    order = exact.flatten().argsort()
    assert (found.flatten()[order].log().diff() > -0.7).all(), found.flatten()[order]


def test_calibration_stores_a_table_and_leaves_gradients_as_they_were():
    model, ids = tiny_llama(), torch.randint(97, (600,), generator=torch.Generator().manual_seed(0))
    model.model.embed_tokens.weight.requires_grad_(False)
    settings = CalibrationSettings(
        tokens=512, context=512, clip_grid=(0.86, 1.0), clip_contexts=1, sensitivity_contexts=1, sensitivity_draws=1
    )
    table = calibrate(model, ids, settings).meta.sensitivity
    assert set(table) == {"k", "v"} and all(set(widths) == {"2", "4"} for widths in table.values())
    for widths in table.values():
        assert all(0 < four < two for two, four in zip(widths["2"], widths["4"]))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "model.embed_tokens.weight" not in trainable and "lm_head.weight" in trainable


def test_a_model_that_overflows_is_told():
    """NaN sensitivities would be written to a config.json that cannot be read."""
    with pytest.raises(KVQuantError, match="layer 1: its sensitivity is not finite.*--no-sensitivity"):
        sensitivity_table(torch.tensor([[1.0] * 4, [1.0, 2.0, float("nan"), 1.0]]), VARIANTS)
    model = tiny_llama()
    model.lm_head.weight.data[5] = float("inf")
    settings = CalibrationSettings(tokens=512, context=512, clip_grid=(1.0,), clip_contexts=1, sensitivity_contexts=1)
    with pytest.raises(KVQuantError, match="probabilities hold NaN.*--dtype float32"):
        calibrate(model, torch.arange(600) % 97, settings)


@pytest.mark.slow
def test_ranks_of_a_trained_model(model):
    from pydoc_data.topics import topics

    network, tokenizer = load_model(str(model), device="cpu")
    network.requires_grad_(False)
    ids = tokenize(tokenizer, "\n\n".join(topics[name] for name in sorted(topics)), embedding_rows(network))[:448]
    rotations = load_rotations(find_rotations(str(model), network.config), layers=30, kv_heads=3, head_dim=64)
    quantizer = LayerQuantizer(rotations, 64, 256)
    found = fisher_sums(network, ids, 30, quantizer, first=320, draws=2, seed=0)
    chosen = found[:, VARIANTS.index(("k", 2))].argsort()[[0, 10, 20, 29]].tolist()
    quantizer.variants = (("k", 2),)
    exact = exact_sums(network, ids, chosen, quantizer, first=320)[:, 0]
    assert (exact.diff() > 0).all(), (found[chosen], exact)
