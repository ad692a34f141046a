"""QJL's claims hold: inner products without bias, and a variance within the paper's bound."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.qjl import inner_products, projection, sketch_keys
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.quantize import dequantize_rows, quantize_rows

DRAWS = 400


def scene(d: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns queries and keys; queries lean towards their keys, so that shrinking by a quantizer shows in the mean."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(24, d, generator=g).bfloat16()
    return (0.5 * k[:8].float() + torch.randn(8, d, generator=g)), k


def errors(d: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns errors ``[DRAWS, 8, 24]`` over draws of S, the bound of their variance, and the exact products."""
    q, k = scene(d)
    code, exact = CodeFormat(bits, "sphere", "norm"), q @ k.float().T
    estimates = []
    for seed in range(DRAWS):
        s = projection(d, seed)
        estimates.append(inner_products(q, sketch_keys(k, code, s), s))
    residual = k.float() - sketch_keys(k, code, s).values
    bound = math.pi / (2 * d) * q.square().sum(-1)[:, None] * residual.square().sum(-1)[None]
    return torch.stack(estimates) - exact, bound, exact


@pytest.mark.parametrize("d,bits", [(64, 3), (128, 3), (128, 4)])
def test_inner_products_are_unbiased(d, bits):
    error, bound, _ = errors(d, bits)
    mean, standard_error = error.mean(0), error.std(0) / DRAWS**0.5
    z = mean / standard_error
    assert z.abs().max() < 4.5, "one product of 192 is biased"
    assert abs(z.square().mean() - 1) < 0.4, "means scatter as their standard errors say"
    assert (error.var(0) < bound * (1 + 4 * (2 / DRAWS) ** 0.5)).all(), "QJL, lemma 3.5"
    assert (error.var(0) > 0.2 * bound).all(), "the bound would be loose"


def test_the_plain_code_is_biased_where_the_sketch_is_not():
    """The code of least squared error shrinks keys, and thus their products with queries that point to them."""
    q, k = scene(128)
    code = CodeFormat(2, "sphere", "norm")
    values = dequantize_rows(*quantize_rows(k, 128, 0, code), code)
    own = torch.arange(8)
    exact = (q @ k.float().T)[own, own]
    plain = (q @ values.T)[own, own]
    error, _, _ = errors(128, 3)
    assert ((plain - exact) / exact).mean() < -0.08
    assert abs((error[:, own, own].mean(0) / exact).mean()) < 0.01


def test_projection_is_the_same_in_every_process():
    assert torch.equal(projection(64, 7), projection(64, 7)) and not torch.equal(projection(64, 7), projection(64, 8))
