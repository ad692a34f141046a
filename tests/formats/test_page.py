"""Page records have exact round trips, the documented allocated bits, correct clipping and correct edge values."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import BITS, CodeFormat
from sglang_kvq.formats.pack import pack_codes, packed_bytes, unpack_codes
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.quantize import channel_means, clip_rank, clip_rows, dequantize_rows, quantize_rows

FORMATS = [(64, 64), (96, 96), (96, 32), (128, 128), (128, 32), (256, 128), (256, 64)]
LLOYD, SPHERE = CodeFormat(2, "lloyd-max", "moments"), CodeFormat(3, "sphere", "norm")
#: Pairs of key and value codes: one of each kind, and mixtures.
PAIRS = {
    "lloyd-max": (LLOYD, LLOYD),
    "sphere-3-2": (SPHERE, CodeFormat(2, "sphere", "norm")),
    "sphere-4-3": (CodeFormat(4, "sphere", "norm"), SPHERE),
    "channel": (CodeFormat(axis="channel"), CodeFormat()),
    "channel-4": (CodeFormat(4, axis="channel"), CodeFormat(3)),
    "mixed-4-2": (CodeFormat(4, "lloyd-max", "moments"), LLOYD),
    "uniform-4": (CodeFormat(4), CodeFormat(4)),
    "int4": (CodeFormat(4, centred=True), CodeFormat(4)),
    "centred-lloyd-max": (CodeFormat(2, "lloyd-max", "moments", centred=True), LLOYD),
    "centred-sphere": (CodeFormat(2, "sphere", "norm", centred=True), CodeFormat(2, "sphere", "norm")),
}


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("head_dim,group", FORMATS, ids=str)
def test_records_hold_exactly_the_codes_scales_and_offsets(head_dim, group):
    fmt = PageFormat(head_dim, group, 0.96, 0.92)
    k, v = rows(3, 2, PAGE_SIZE, head_dim), rows(3, 2, PAGE_SIZE, head_dim, seed=1)
    records = fmt.quantize_pages(k, v)
    assert records.shape == (3, 2, fmt.record_bytes) and records.dtype == torch.uint8
    k_back, v_back = fmt.dequantize_pages(records)
    assert torch.equal(k_back, dequantize_rows(*quantize_rows(k, group, fmt.rank_k)))
    assert torch.equal(v_back, dequantize_rows(*quantize_rows(v, group, fmt.rank_v)))


def counted(*shape: int, seed: int) -> torch.Tensor:
    """Returns values that do not depend on the version of any random generator."""
    i = torch.arange(torch.Size(shape).numel())
    return (((i * 2654435761 + seed * 40503) % 65521 - 32760).float() / 8192).reshape(shape).bfloat16()


@pytest.mark.parametrize(
    "head_dim,group,clip_k,clip_v,digest",
    [
        (64, 64, 1.0, 1.0, "93f1285643a78a9b"),
        (64, 64, 0.96, 0.92, "6199e54d7e7bb9aa"),
        (96, 32, 0.96, 0.92, "40a557e39bac8c4c"),
        (128, 128, 0.96, 0.92, "be86e59e665d857e"),
        (256, 128, 0.96, 0.92, "70590e7f0145c7a4"),
    ],
)
def test_int2_records_keep_their_bytes(head_dim, group, clip_k, clip_v, digest):
    """The first release's records keep their bytes: kernels read them, and caches on disk may hold them."""
    fmt = PageFormat(head_dim, group, clip_k, clip_v)
    records = fmt.quantize_pages(counted(2, PAGE_SIZE, head_dim, seed=1), counted(2, PAGE_SIZE, head_dim, seed=2))
    assert hashlib.sha256(records.numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(64, 128), (96, 64), (256, 64)], ids=str)
def test_packing_is_exact_and_lies_as_documented(bits, shape):
    r, n = shape
    codes = torch.randint(0, 2**bits, (3, r, n), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, sum(packed_bytes(r, n, bits))) and packed.shape[-1] * 8 == r * n * bits
    assert torch.equal(unpack_codes(packed, r, n, bits), codes)
    low = packed[0, : r * n // 4].view(r, n // 4)
    high = packed[0, r * n // 4 :].view(-1, n // 4)
    for row, column in ((0, 0), (1, n - 1), (r // 2, n // 4), (r - 1, n // 2 + 3)):
        plane, i = divmod(column, n // 4)
        value = low[row, i] >> 2 * plane & 3
        if bits == 4:
            value = value | (high[row, i] >> 2 * plane & 3) << 2
        if bits == 3:
            value = value | (high[row % (r // 2), i] >> 4 * (row // (r // 2)) + plane & 1) << 2
        assert value == codes[0, row, column]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("head_dim,group,run", [(64, 64, 64), (96, 32, 32), (128, 128, 64), (256, 128, 32)], ids=str)
def test_records_of_every_code_hold_exactly_its_codes_scales_and_offsets(pair, head_dim, group, run):
    fmt = PageFormat(head_dim, group, k=PAIRS[pair][0], v=PAIRS[pair][1], run=run)
    x = [rows(3, 2, PAGE_SIZE, head_dim, seed=seed) for seed in (0, 1)]
    records = fmt.quantize_pages(*x)
    assert records.shape == (3, 2, fmt.record_bytes) and records.dtype == torch.uint8
    for code, values, back in zip((fmt.k, fmt.v), x, fmt.dequantize_pages(records)):
        mean = channel_means(values).float()[..., None, :] if code.centred else torch.zeros(())
        values = values.float() - mean
        if code.axis == "channel":
            codes, scale, offset = quantize_rows(values.transpose(-1, -2), run, 0, code, head_dim)
            want = dequantize_rows(codes, scale, offset, code, head_dim).transpose(-1, -2)
        else:
            per = head_dim if code.statistic == "norm" else group
            want = dequantize_rows(*quantize_rows(values, per, 0, code), code) + mean
        assert torch.equal(back, want)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("head_dim,group", FORMATS, ids=str)
def test_parts_lie_without_gaps_and_aligned(pair, head_dim, group):
    fmt = PageFormat(head_dim, group, k=PAIRS[pair][0], v=PAIRS[pair][1])
    assert list(fmt.parts) == sorted(fmt.parts) and fmt.parts[0] == 0
    assert all(start % 64 == 0 for start in fmt.parts), "16-byte loads, and as many records one behind the other"


def test_a_channels_scale_is_of_its_run_of_tokens():
    """Tokens of one run do not affect another run's records."""
    fmt = PageFormat(128, 32, k=CodeFormat(axis="channel"), v=CodeFormat(), run=32)
    k, v = rows(PAGE_SIZE, 128), rows(PAGE_SIZE, 128, seed=1)
    before = fmt.dequantize_pages(fmt.quantize_pages(k, v))[0]
    k[:32] *= 3
    after = fmt.dequantize_pages(fmt.quantize_pages(k, v))[0]
    assert torch.equal(before[32:], after[32:]) and not torch.equal(before[:32], after[:32])


@pytest.mark.parametrize("pair", ["int4", "centred-lloyd-max", "centred-sphere"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_centred_keys_have_in_common_costs_no_precision(pair, head_dim):
    """Large offsets per channel add no more error than the rounding of such keys to BF16 does."""
    fmt = PageFormat(head_dim, head_dim, k=PAIRS[pair][0], v=PAIRS[pair][1])
    plain = rows(20, PAGE_SIZE, head_dim).float()
    offset = torch.zeros(head_dim)
    offset[[3, 17, 40]] = torch.tensor([200.0, -90.0, 17.0])
    errors = []
    for k in (plain.bfloat16(), (plain + offset).bfloat16()):
        back = fmt.dequantize_pages(fmt.quantize_pages(k, k))[0]
        errors.append((back - k.float()).square().mean((0, 1)))
    others = offset == 0
    assert errors[1][others].mean() < 1.15 * errors[0][others].mean()
    assert (errors[1] < 2 * errors[0].mean() + 2.0**-16 * offset.square()).all()
    without = PageFormat(head_dim, head_dim, k=replace(fmt.k, centred=False), v=fmt.v)
    back = without.dequantize_pages(without.quantize_pages(k, k))[0]
    assert (back - k.float()).square().mean((0, 1))[others].mean() > 30 * errors[1][others].mean()


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e38])
def test_any_finite_page_is_centred(size):
    """Tiny keys vanish in FP16 and huge means are clamped, but all stored values are finite."""
    fmt = PageFormat(64, 64, k=CodeFormat(4, centred=True), v=CodeFormat(4))
    k = (rows(3, PAGE_SIZE, 64).float() + 2.0) * size
    k[1] = 0.5 * size  # a constant page: its mean holds everything
    back = fmt.dequantize_pages(fmt.quantize_pages(k.bfloat16(), k.bfloat16()))[0]
    assert torch.isfinite(back).all()
    if size <= 1e4:
        assert (back - k.bfloat16().float()).abs().max() <= 0.5 * size + 1e-7  # rows span about 5, in 15 steps
        assert (back[1] - k[1].bfloat16()).abs().max() <= 2.0**-11 * size + 1e-7


def test_only_keys_are_centred():
    with pytest.raises(
        KVQuantError, match="values in 4 bits uniform minmax per token, centred: only keys can be centred"
    ):
        PageFormat(64, 64, v=CodeFormat(4, centred=True))


def test_tokens_of_a_page_are_independent():
    """Quantizing a page whole or token by token gives the same codes, so chunking cannot change them."""
    x = rows(PAGE_SIZE, 128)
    whole = quantize_rows(x, 128, 6)
    for i, parts in enumerate(zip(*(quantize_rows(x[t : t + 1], 128, 6) for t in range(PAGE_SIZE)))):
        assert torch.equal(whole[i], torch.cat(parts))


@pytest.mark.parametrize("head_dim,group,bits", [(128, 128, 2.25), (64, 64, 2.5), (256, 128, 2.25), (128, 32, 3.0)])
def test_allocated_bits_count_scales_and_zeros(head_dim, group, bits):
    assert PageFormat(head_dim, group).bits_per_element == bits


@pytest.mark.parametrize(
    "head_dim,group,run,pair,bits",
    [
        (128, 128, 64, "lloyd-max", 2.25),
        (128, 128, 64, "sphere-3-2", 2.625),  # 2.5 and one FP16 norm per vector
        (64, 64, 64, "sphere-4-3", 3.75),
        (128, 128, 64, "channel", (2.5 + 2.25) / 2),
        (128, 32, 32, "channel", 3.0),  # KIVI's group of 32
        (128, 128, 64, "mixed-4-2", 3.25),
        (64, 64, 64, "uniform-4", 4.5),
        (64, 64, 64, "int4", 4.625),  # 16 bits per channel and page: 0.25 of keys
        (128, 128, 64, "int4", 4.375),
        (256, 128, 64, "int4", 4.375),
        (64, 64, 64, "centred-sphere", 2.375),
    ],
)
def test_allocated_bits_of_other_codes(head_dim, group, run, pair, bits):
    assert PageFormat(head_dim, group, k=PAIRS[pair][0], v=PAIRS[pair][1], run=run).bits_per_element == bits


def test_gaussian_error_is_the_published_one():
    """OSCAR: uniform levels clipped at 0.96 / 0.92 / 0.88 leave 0.156 / 0.127 / 0.118 of a Gaussian's power."""
    x = rows(20000, 128)
    for ratio, expected in ((0.96, 0.156), (0.92, 0.127), (0.88, 0.118)):
        back = dequantize_rows(*quantize_rows(x, 128, clip_rank(128, ratio)))
        assert (back - x.float()).square().mean().item() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("ratio,rank", [(1.0, 0), (0.96, 6), (0.92, 11), (0.5, 64)])
def test_clip_keeps_all_but_the_largest_magnitudes(ratio, rank):
    assert clip_rank(128, ratio) == rank
    x = rows(50, 128).float()
    clipped = clip_rows(x, rank)
    if rank == 0:
        assert torch.equal(clipped, x)
        return
    threshold = x.abs().sort(dim=-1).values[:, int(ratio * 128)]
    assert torch.equal(clipped.abs().amax(-1), threshold)
    inside = x.abs() <= threshold[:, None]
    assert torch.equal(clipped[inside], x[inside])


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-6, 1.0, 1e4, 1e37]), st.booleans())
@settings(max_examples=50, deadline=None)
def test_any_finite_row_gives_finite_values_within_half_a_step(seed, size, constant):
    x = rows(4, 64, seed=seed % 1000) * size
    if constant:
        x = x[:, :1].expand(-1, 64)
    x = x.bfloat16()
    codes, scale, offset = quantize_rows(x, 64, 0)
    assert codes.max() <= 3 and torch.isfinite(scale).all() and torch.isfinite(offset).all()
    back = dequantize_rows(codes, scale, offset)
    if size <= 1e4:  # above this, FP16 scales saturate
        # Half a step, plus the shift of levels by rounding scale and offset to FP16.
        slack = 2.0**-10 * (x.float().abs().amax(-1, keepdim=True)) * 4 + 1e-7
        assert ((back - x.float()).abs() <= 0.5 * scale.float() + slack).all()


def test_group_must_divide_head_dim():
    with pytest.raises(KVQuantError, match="group-size 96 does not divide this model's head_dim 128"):
        PageFormat(128, 96)


def test_runs_must_divide_the_page():
    with pytest.raises(KVQuantError, match="runs of 96 tokens.*Use 32 or 64"):
        PageFormat(128, 128, k=CodeFormat(axis="channel"), run=96)


@pytest.mark.parametrize("code", [CodeFormat(axis="channel"), SPHERE, PAIRS["int4"][0]], ids=CodeFormat.describe)
def test_clipping_where_there_is_none_is_refused(code):
    with pytest.raises(
        KVQuantError, match="--kv-quant-clip-k 0.9: codes per channel, centred or scaled by a norm are not clipped"
    ):
        PageFormat(128, 128, 0.9, k=code)


def test_layout_is_blind_to_clipping_only():
    assert PageFormat(64, 64, 0.9, 0.8).layout == PageFormat(64, 64, 0.96).layout
    assert PageFormat(64, 64, k=LLOYD).layout != PageFormat(64, 64).layout


def test_head_dim_must_be_supported():
    with pytest.raises(KVQuantError, match="head_dim 80 is not supported.*64, 96, 128, 256"):
        PageFormat(80, 80)
