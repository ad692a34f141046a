"""KL divergence of a fake-quantized model: which tokens count, and that rotations reduce it."""

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.rotations import find_rotations, load_rotations
from sglang_kvq.rotations.calibration.hf_model import embedding_rows, load_model, tokenize
from sglang_kvq.rotations.inspection.candidates import candidate_of
from sglang_kvq.rotations.inspection.divergence import FakeQuantAttention
from sglang_kvq.rotations.maths.fixed import hadamard_matrix
from tests.rotations.helpers import mean_kl


@pytest.mark.usefixtures("one_thread")
def test_kl_counts_the_quantized_history_only(llama, ids):
    h = hadamard_matrix(64).float().expand(2, 2, 64, 64)
    format = PageFormat(64, 64, 0.9, 0.92)
    kl = mean_kl(
        llama,
        [ids[:600]],
        {
            "exact": FakeQuantAttention(None),
            "window only": FakeQuantAttention(format, LayerRotations(h, h), recent=640),
            "rotated": FakeQuantAttention(format, LayerRotations(h, h)),
        },
    )
    assert abs(kl["exact"]) < 1e-7 and abs(kl["window only"]) < 1e-6 < kl["rotated"]


@pytest.mark.slow
def test_kl_of_oscar_hadamard_and_int2(model):
    """On a trained model, a learned rotation beats a fixed one, which beats none."""
    from pydoc_data.topics import topics  # English text that every Python has and no calibration here has seen

    network, tokenizer = load_model(str(model), device="cpu")
    ids = tokenize(tokenizer, "\n\n".join(topics[name] for name in sorted(topics)), embedding_rows(network))[:576]
    geometry = dict(layers=30, kv_heads=3, head_dim=64)
    oscar = load_rotations(find_rotations(str(model), network.config), **geometry)
    candidates = [candidate_of(name, oscar, network.config) for name in ("int2", "hadamard", "oscar")]
    kl = mean_kl(network, [ids], {c.name: FakeQuantAttention(c.formats, c.rotations) for c in candidates})
    print({name: round(value, 4) for name, value in kl.items()})
    assert 0 < 2 * kl["oscar"] < kl["hadamard"] < kl["int2"] / 2
    assert torch.tensor(list(kl.values())).isfinite().all()
