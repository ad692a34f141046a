"""The round trip through records is the page format's own, in the rotated basis."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.capacity import random_transform
from benchmarks.research.episodes import quant
from benchmarks.research.episodes.quant import bits_per_element, method_of, round_trip_of
from benchmarks.research.tests import helpers
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.errors import KVQuantError
from sglang_kvq.rotations.identity import geometry_of
from sglang_kvq.rotations.maths.fake_quant import RotatedContext, page_round_trip
from sglang_kvq.rotations.resolve import resolve_rotations
from sglang_kvq.rotations.storage.files import load_rotations

CPU = torch.device("cpu")
K, V = torch.randn(2, 3, helpers.KV_HEADS, 200, 64, generator=torch.Generator().manual_seed(0))


def config() -> object:
    return helpers.tiny_llama(head_dim=64).config


@pytest.mark.parametrize("method", ["int2", "int4"])
def test_pages_go_through_the_methods_records(method: str) -> None:
    hf_config = config()
    found = round_trip_of(method, "tiny", hf_config, CPU)(1, 64, K, V)
    format, rotations = (
        method_of(method, "tiny", hf_config).formats[1],
        resolve_rotations(KVQuantConfig(method), "tiny", hf_config),
    )
    for row in range(3):
        k, v = K[row], V[row]
        if rotations is not None:
            k, v = k @ rotations.k[1], v @ rotations.v[1]
        read = page_round_trip(format, k[:, :192].bfloat16().float(), v[:, :192].bfloat16().float())
        if rotations is not None:
            read = (read[0] @ rotations.k[1].mT, read[1] @ rotations.v[1].mT)
        for ours, exact, source in zip(found, read, (K, V)):
            torch.testing.assert_close(ours[row][:, :192], exact, atol=1e-5, rtol=1e-5)
            assert torch.equal(ours[row][:, 192:], source[row][:, 192:])
            assert (ours[row][:, :192] - source[row][:, :192]).square().mean() > 1e-4


def test_sinks_stay_as_they_are() -> None:
    round_trip = round_trip_of("int2", "tiny", config(), CPU)
    k, v = round_trip(0, 0, K, V)
    assert torch.equal(k[:, :, :64], K[:, :, :64]) and torch.equal(v[:, :, :64], V[:, :, :64])
    assert not torch.isclose(k[:, :, 64:192], K[:, :, 64:192]).all(-1).any()
    for first, length in ((0, 64), (0, 30), (640, 63)):
        assert torch.equal(round_trip(0, first, K[:, :, :length], V[:, :, :length])[0], K[:, :, :length])


def test_each_token_is_coded_alone() -> None:
    """Codes do not depend on other tokens, so that a quantized token may move to another page."""
    round_trip, order = round_trip_of("int2", "tiny", config(), CPU), torch.randperm(192)
    k, v = round_trip(0, 64, K[:, :, :192], V[:, :, :192])
    moved_k, moved_v = round_trip(0, 64, K[:, :, order], V[:, :, order])
    assert torch.equal(moved_k, k[:, :, order]) and torch.equal(moved_v, v[:, :, order])


def test_methods_that_share_scales_are_refused() -> None:
    with pytest.raises(KVQuantError, match="--kv-quant kivi: its codes are not of single tokens"):
        round_trip_of("kivi", "tiny", config(), CPU)


def test_bits() -> None:
    assert round_trip_of("none", "tiny", config(), CPU) is None
    assert bits_per_element("none", "tiny", config()) == 16
    assert (
        bits_per_element("int2", "tiny", config())
        == method_of("int2", "tiny", config()).formats[0].bits_per_element
        < 3
    )


@pytest.mark.parametrize("bits", ["1.5", "4"])
def test_transform_coding_is_what_attention_sees(bits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores agree except for the mean's part, which is the same number in all of a query's scores; outputs agree."""
    hf_config, spec, tokens = config(), f"transform:{bits}", 192
    geometry = geometry_of(hf_config)
    learned = load_rotations(random_transform(tmp_path / "rotations", *geometry), **geometry._asdict())
    learned = replace(learned, k_mean=torch.randn_like(learned.k_mean))
    monkeypatch.setattr(quant, "resolve_rotations", lambda *args: learned)
    k, v = (x[0, :, :tokens] for x in round_trip_of(spec, "tiny", hf_config, CPU)(1, 64, K, V))
    q = torch.randn(helpers.HEADS, tokens, 64, generator=torch.Generator().manual_seed(1))
    method = method_of(spec, "tiny", hf_config)
    stored = (K[0, :, :tokens], V[0, :, :tokens])
    context = RotatedContext.of(method.rotations, 1, q, *stored, 0.1, sink=0, recent=0)
    read_k, read_v = page_round_trip(method.formats[1], context.k, context.v)
    group = helpers.HEADS // helpers.KV_HEADS
    less = q @ k.repeat_interleave(group, 0).mT - context.q @ read_k.repeat_interleave(group, 0).mT
    assert less.std(-1).max() < 0.1 < less.abs().max()  # rounding to BF16 is left, and the mean's part
    outputs = context.to_model_basis(read_v.repeat_interleave(group, 0))
    torch.testing.assert_close(v.repeat_interleave(group, 0), outputs, atol=0.03, rtol=0.02)
    assert bits_per_element(spec, "tiny", hf_config) <= float(bits)
