"""Page records: exact round trips, allocated bits, clipping, and edge values."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sglang_kvq.config import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.quantise import clip_rank, clip_rows, dequantise_rows, quantise_rows

FORMATS = [(64, 64), (96, 96), (96, 32), (128, 128), (128, 32), (256, 128), (256, 64)]


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("head_dim,group", FORMATS, ids=lambda x: str(x))
def test_records_hold_exactly_the_codes_scales_and_zeros(head_dim, group):
    fmt = PageFormat(head_dim, group, 0.96, 0.92)
    k, v = rows(3, 2, PAGE_SIZE, head_dim), rows(3, 2, PAGE_SIZE, head_dim, seed=1)
    records = fmt.quantise_pages(k, v)
    assert records.shape == (3, 2, fmt.record_bytes) and records.dtype == torch.uint8
    k_back, v_back = fmt.dequantise_pages(records)
    assert torch.equal(k_back, dequantise_rows(*quantise_rows(k, group, fmt.rank_k)))
    assert torch.equal(v_back, dequantise_rows(*quantise_rows(v, group, fmt.rank_v)))


def test_tokens_of_a_page_are_independent():
    """Quantising a page whole or token by token gives the same codes: chunking cannot change them."""
    x = rows(PAGE_SIZE, 128)
    whole = quantise_rows(x, 128, 6)
    for i, parts in enumerate(zip(*(quantise_rows(x[t : t + 1], 128, 6) for t in range(PAGE_SIZE)))):
        assert torch.equal(whole[i], torch.cat(parts))


@pytest.mark.parametrize("head_dim,group,bits", [(128, 128, 2.25), (64, 64, 2.5), (256, 128, 2.25), (128, 32, 3.0)])
def test_allocated_bits_count_scales_and_zeros(head_dim, group, bits):
    assert PageFormat(head_dim, group).bits_per_element == bits


def test_gaussian_error_is_the_published_one():
    """OSCAR: uniform levels clipped at 0.96 / 0.92 / 0.88 leave 0.156 / 0.127 / 0.118 of a Gaussian's power."""
    x = rows(20000, 128)
    for ratio, expected in ((0.96, 0.156), (0.92, 0.127), (0.88, 0.118)):
        back = dequantise_rows(*quantise_rows(x, 128, clip_rank(128, ratio)))
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
    codes, scale, zero = quantise_rows(x, 64, 0)
    assert codes.max() <= 3 and torch.isfinite(scale).all() and torch.isfinite(zero).all()
    back = dequantise_rows(codes, scale, zero)
    if size <= 1e4:  # beyond, FP16 scales saturate
        # Half a step, plus what rounding scale and zero to FP16 moves the levels.
        slack = 2.0**-10 * (x.float().abs().amax(-1, keepdim=True)) * 4 + 1e-7
        assert ((back - x.float()).abs() <= 0.5 * scale.float() + slack).all()


def test_group_must_divide_head_dim():
    with pytest.raises(KVQuantError, match="group-size 96 does not divide this model's head_dim 128"):
        PageFormat(128, 96)


def test_head_dim_must_be_supported():
    with pytest.raises(KVQuantError, match="head_dim 80 is not supported.*64, 96, 128, 256"):
        PageFormat(80, 80)
