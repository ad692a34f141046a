"""Codes have exact statistics, do not depend on order and size, and have errors close to theory."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from sglang_kvq.formats.code import BITS, INT2, CodeFormat
from sglang_kvq.formats.levels import level_table
from sglang_kvq.formats.quantize import _sqrt, channel_means, clip_rank, dequantize_rows, quantize_rows

CODES = [
    CodeFormat(bits, levels, statistic)
    for bits in BITS
    for levels, statistic in (
        ("uniform", "minmax"),
        ("lloyd-max", "moments"),
        ("sphere", "norm"),
        ("lloyd-max", "minmax"),
    )
]


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def there_and_back(x: torch.Tensor, code: CodeFormat, rank: int = 0, group: int | None = None) -> torch.Tensor:
    return dequantize_rows(*quantize_rows(x, group or x.shape[-1], rank, code), code)


def relative_error(x: torch.Tensor, code: CodeFormat, rank: int = 0) -> float:
    return ((there_and_back(x, code, rank) - x.float()).square().mean() / x.float().square().mean()).item()


@pytest.mark.parametrize("code", CODES, ids=CodeFormat.describe)
def test_every_value_takes_its_nearest_level(code):
    x = rows(50, 128)
    codes, scale, offset = quantize_rows(x, 128, 0, code)
    levels = torch.tensor(code.table(128).levels) - (0 if code.has_offset else code.table(128).middle)
    places = levels.double() * scale.double() + (offset.double() if code.has_offset else 0)  # [50, levels]
    distance = (places[:, None, :] - x.double()[:, :, None]).abs()
    chosen = distance.gather(-1, codes[..., None].long())[..., 0]
    assert (chosen - distance.amin(-1) <= 1e-6).all()
    assert codes.unique().numel() == 2**code.bits


@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("spread,offset", [(1.0, 0.0), (1.0, 30.0), (1e-3, 0.0), (1e3, -1e4)], ids=str)
def test_moments_are_the_rows_own(d, spread, offset):
    """Mean and standard deviation agree with exact rational arithmetic on the same integers, to an FP16 bit or two."""
    code, x = CodeFormat(2, "lloyd-max", "moments"), (rows(20, d).float() * spread + offset).bfloat16()
    table = code.table(d)
    _, scale, offset = quantize_rows(x, d, 0, code)
    for row, s, z in zip(x.double().tolist(), scale[:, 0].tolist(), offset[:, 0].tolist()):
        power = 10 - math.floor(math.log2(max(map(abs, row))))
        q = [round(Fraction(v) * Fraction(2) ** power) for v in row]  # Python rounds to even, too
        mean = Fraction(sum(q), d)
        std = math.sqrt(Fraction(sum(v * v for v in q), d) - mean * mean) * 2.0**-power
        assert s == pytest.approx(std * table.unit, rel=1e-3, abs=1e-7)
        assert z == pytest.approx(float(mean) * 2.0**-power - table.middle * s, rel=2e-3, abs=2e-3 * spread)


@pytest.mark.parametrize("spread,offset", [(1.0, 0.0), (1.0, 200.0), (1e-3, 0.0), (1e3, -1e4)], ids=str)
def test_means_of_channels_are_the_exact_ones_rounded_once(spread, offset):
    """Means agree with rational arithmetic on the same integers and do not depend on the order of tokens."""
    x = (rows(64, 40).float() * spread + offset).bfloat16()
    means = channel_means(x)
    assert means.dtype == torch.float16 and means.shape == (40,)
    for channel, got in zip(x.double().T.tolist(), means.tolist()):
        power = 10 - math.floor(math.log2(max(map(abs, channel))))
        mean = Fraction(sum(round(Fraction(v) * Fraction(2) ** power) for v in channel), 64) / Fraction(2) ** power
        assert got == np.float16(float(mean))  # at most 17 bits, so exact in float64
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(means, channel_means(x[order]))


@pytest.mark.parametrize("code", CODES, ids=CodeFormat.describe)
def test_order_of_elements_does_not_matter(code):
    x = (rows(40, 96).float() * torch.logspace(-3, 3, 96)).bfloat16()
    order = torch.randperm(96, generator=torch.Generator().manual_seed(5))
    codes, scale, offset = quantize_rows(x, 96, 5, code)
    codes2, scale2, zero2 = quantize_rows(x[:, order], 96, 5, code)
    assert torch.equal(codes[:, order], codes2) and torch.equal(scale, scale2)
    assert offset is None or torch.equal(offset, zero2)


@pytest.mark.parametrize("code", [c for c in CODES if c.statistic != "minmax"], ids=CodeFormat.describe)
def test_powers_of_two_change_no_code(code):
    x = rows(40, 64)
    codes, scale, _ = quantize_rows(x, 64, 0, code)
    codes2, scale2, _ = quantize_rows((x.float() * 16).bfloat16(), 64, 0, code)
    assert torch.equal(codes, codes2) and torch.equal(scale.float() * 16, scale2.float())


@given(
    st.integers(0, 999),
    st.sampled_from([0.0, 1e-38, 1e-30, 1e-6, 1.0, 1e4, 1e38]),
    st.booleans(),
    st.sampled_from(CODES),
)
@settings(max_examples=80, deadline=None)
def test_any_finite_row_gives_finite_values(seed, size, constant, code):
    x = (rows(4, 64, seed=seed).float() * size).clamp(-3.3e38, 3.3e38).bfloat16()
    if constant:
        x = x[:, :1].expand(-1, 64).contiguous()
    codes, scale, offset = quantize_rows(x, 64, 0, code)
    back = dequantize_rows(codes, scale, offset, code)
    assert codes.max() < 2**code.bits and torch.isfinite(back).all()
    if constant and code.has_offset and size <= 1e4:  # one level holds the value, up to FP16 rounding
        assert torch.allclose(back, x.float(), rtol=1e-3, atol=1e-6 + 1e-3 * size)


def test_moments_of_groups_are_their_own():
    """A group with large values does not reduce the precision of a group with small ones."""
    x = rows(10, 128).float()
    x[:, :32] *= 1e4
    code = CodeFormat(2, "lloyd-max", "moments")
    whole = quantize_rows(x.bfloat16(), 32, 0, code)
    part = quantize_rows(x[:, 32:64].bfloat16(), 32, 0, code)
    assert torch.equal(whole[0][:, 32:64], part[0]) and torch.equal(whole[1][:, 1:2], part[1])


@pytest.mark.parametrize("bits,expected", [(2, 0.1175), (3, 0.03455), (4, 0.00950)])
def test_lloyd_max_error_on_gaussian_rows_is_the_literatures(bits, expected):
    """Rows lose a little less than an infinite source, because their own mean and deviation are removed."""
    error = relative_error(rows(20000, 256), CodeFormat(bits, "lloyd-max", "moments"))
    assert 0.96 * expected < error < 1.01 * expected


@pytest.mark.parametrize("ratio", [0.98, 0.96, 0.92])
def test_clipping_before_the_moments_gains_nothing(ratio):
    """oscar-lloyd-max does not clip, because its outer levels already lie where clipping would put them."""
    code, x = CodeFormat(2, "lloyd-max", "moments"), rows(5000, 128)
    assert relative_error(x, code) < relative_error(x, code, clip_rank(128, ratio))


@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("bits", BITS)
def test_turboquant_distortion_is_within_its_bound(bits, d):
    """arXiv 2504.19874, theorem 1: MSE <= sqrt(3) pi / 2 4^-b = 2.72 4^-b for any unit vector, randomly rotated.

    The lower bound for any quantizer is 4^-b (theorem 3). Sources: the sphere, a Gaussian, and vectors along an axis.
    """
    code = CodeFormat(bits, "sphere", "norm")
    gauss = rows(4000, d).float()
    spikes = 3 * torch.linalg.qr(rows(4000 // d, d, d, seed=9).float())[0].flatten(0, 1)  # e_i R for many rotations R
    for name, x in {"sphere": gauss / gauss.norm(dim=-1, keepdim=True), "gauss": gauss, "spike": spikes}.items():
        x = x.bfloat16()
        # Each vector's error is relative to its norm, as in the theorem; our error includes BF16 input and FP16 norms.
        error = (there_and_back(x, code) - x.float()).square().sum(-1) / x.float().square().sum(-1)
        mean = error.mean().item()
        assert 4.0**-bits < mean <= 2.7 * 4.0**-bits, f"{name}: {mean * 4**bits:.3f} 4^-{bits}"
        assert mean == pytest.approx(level_table("sphere", bits, d).distortion, rel=0.05)


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_error_per_channel_is_within_its_bound(bits):
    """arXiv 2402.02750: rounding over a channel's range errs by half a step, whatever other channels hold."""
    x = rows(64, 128).float()
    x[:, 7] = x[:, 7] * 0.5 + 40  # an outlier channel, as keys have
    x = x.bfloat16()
    code = CodeFormat(bits, axis="channel")
    codes, scale, offset = quantize_rows(x.T, 64, 0, code, 128)
    back = dequantize_rows(codes, scale, offset, code, 128).T
    half_step = (x.float().amax(0) - x.float().amin(0)) / (2**bits - 1) / 2
    assert ((back - x.float()).abs() <= half_step * 1.002 + 0.02 * (x.float().abs().amax(0) > 10)).all()
    per_token = dequantize_rows(*quantize_rows(x, 128, 0, CodeFormat(bits)), CodeFormat(bits))
    others = torch.arange(128) != 7
    ratio = (back - x.float())[:, others].square().mean() / (per_token - x.float())[:, others].square().mean()
    assert ratio < 0.05, "an outlier channel must not cost the others"


def test_the_square_root_is_correctly_rounded():
    """MKL's float32 root, which torch uses on many CPUs, is off by its last bit for a quarter of these numbers."""
    x = torch.arange(250_000_000, 260_000_000, 9973)
    assert np.array_equal(_sqrt(x).numpy(), np.sqrt(x.float().numpy()))


def test_default_code_is_todays_int2():
    x = rows(100, 128)
    codes, scale, offset = quantize_rows(x, 128, 6)
    again = quantize_rows(x, 128, 6, INT2)
    assert all(torch.equal(a, b) for a, b in zip((codes, scale, offset), again))
    f = x.float()
    limit = f.abs().sort(-1).values[:, -6:-5]
    f = f.clamp(-limit, limit).numpy()
    step = ((f.max(-1) - f.min(-1)) * np.float32(1 / 3)).astype(np.float16).astype(np.float32)
    low = f.min(-1).astype(np.float16).astype(np.float32)
    want = sum((f - low[:, None] > n * step[:, None]).astype(np.uint8) for n in (0.5, 1.5, 2.5))
    assert np.array_equal(codes.numpy(), want)
