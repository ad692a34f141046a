"""What the rotations are for, on a trained model: a learned rotation beats a fixed one beats none."""

import pytest
import torch

from sglang_kvq.formats.page import PageFormat
from sglang_kvq.rotations import find_rotations, hadamard_rotations, load_rotations
from sglang_kvq.rotations.evaluate import FakeQuantAttention, mean_kl
from sglang_kvq.rotations.models import load_model, tokenize


@pytest.mark.slow
def test_kl_of_oscar_hadamard_and_int2(model):
    from pydoc_data.topics import topics  # English text that every Python has and no calibration here has seen

    network, tokenizer = load_model(str(model), device="cpu")
    ids = tokenize(tokenizer, "\n\n".join(topics[name] for name in sorted(topics)))[:1024]
    geometry = dict(layers=30, kv_heads=3, head_dim=64)
    oscar = load_rotations(find_rotations(str(model), network.config), **geometry)
    worker = range(30), 3, 0, 3
    kl = mean_kl(
        network,
        [ids],
        {
            "int2": FakeQuantAttention(PageFormat(64, 64)),
            "hadamard": FakeQuantAttention(
                PageFormat(64, 64, 0.96, 0.92), hadamard_rotations(30, 64).for_worker(*worker)
            ),
            "oscar": FakeQuantAttention(
                PageFormat(64, 64, oscar.meta.clip_k, oscar.meta.clip_v), oscar.for_worker(*worker)
            ),
        },
    )
    print({name: round(value, 4) for name, value in kl.items()})
    assert 0 < 2 * kl["oscar"] < kl["hadamard"] < kl["int2"] / 2
    assert torch.tensor(list(kl.values())).isfinite().all()
