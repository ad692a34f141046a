"""Errors by layer and head agree with their definition."""

import pytest
import torch

from sglang_kvq.rotations.inspection.candidates import candidate_of
from sglang_kvq.rotations.inspection.layer_errors import layer_errors
from tests.rotations.helpers import tiny_llama


def attend(rows, keys, values):
    """Attends with the page of queries that begins at token 448."""
    mask = torch.ones(64, 512, dtype=torch.bool).tril(448)
    scores = (rows @ keys.T * 0.125).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ values


def mixed(exact, old):
    """Returns one head's keys or values with the history read as ``old`` ``[pages, 64, D]``."""
    return torch.cat([exact[:64], old.flatten(0, 1)[64:192].bfloat16().float(), exact[192:]])


def test_errors_follow_their_definition():
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 512, 64), torch.randn(2, 512, 64), torch.randn(2, 512, 64)
    k[1] *= 2  # a head with sharper attention errs more
    candidate = candidate_of("int2", None, tiny_llama().config)
    error, size = layer_errors(candidate, 0, q, k, v, 0.125, [448])
    k, v = k.bfloat16().float(), v.bfloat16().float()
    old_k, old_v = candidate.formats[0].dequantize_pages(
        candidate.formats[0].quantize_pages(k.view(2, 8, 64, 64), v.view(2, 8, 64, 64))
    )
    for head in range(2):
        rows = q[2 * head : 2 * head + 2, 448:]
        exact = attend(rows, k[head], v[head])
        assert float(size[head]) == pytest.approx(float(exact.square().sum()), rel=1e-4)
        of_keys = attend(rows, mixed(k[head], old_k[head]), v[head])
        of_values = attend(rows, k[head], mixed(v[head], old_v[head]))
        for part, out in enumerate((of_keys, of_values)):
            assert float(error[part, head]) == pytest.approx(float((out - exact).square().sum()), rel=1e-3)
    assert error[0, 1] / size[1] > error[0, 0] / size[0]
