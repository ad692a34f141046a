"""The model of what extends take: it finds the better way wherever both were measured, and goes on sensibly from there."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvq.attention.extend_costs import H200, Geometry, dequantised_terms, direct_terms, fit
from sglang_kvq.attention.short_extend import ShortExtends
from sglang_kvq.kernels.extend import NARROW

QWEN = Geometry(32, 8, 128, 132)
CAPACITY = 65536
#: Requests, new tokens of each, stored prefix; microseconds on an H200 of reading pages and of a workspace of 66K tokens.
MEASURED = [
    (1, 16, 32768, 52.4, 410.8), (1, 64, 32768, 122.2, 406.1), (1, 128, 8192, 73.7, 116.1), (1, 256, 32768, 412.9, 413.3),
    (1, 512, 8192, 243.8, 130.1), (1, 128, 131072, 786.7, 1557.3), (4, 16, 8192, 53.4, 155.9), (4, 64, 32768, 413.7, 581.9),
    (4, 128, 32768, 805.7, 599.2), (4, 512, 8192, 910.7, 505.0), (8, 16, 2048, 41.0, 96.3), (8, 64, 8192, 243.9, 309.6),
    (8, 128, 8192, 460.2, 314.4), (8, 256, 8192, 893.5, 548.3), (16, 32, 8192, 244.9, 695.6), (16, 128, 32768, 3188.4, 2770.9),
    (32, 32, 8192, 465.8, 1502.5), (32, 64, 2048, 306.6, 355.1), (64, 16, 8192, 474.0, 2719.7), (64, 128, 2048, 1153.6, 774.6),
]  # fmt: skip
GEOMETRIES = [QWEN, Geometry(8, 8, 64, 132), Geometry(16, 1, 128, 132), Geometry(12, 1, 96, 132), Geometry(64, 8, 64, 114), Geometry(16, 4, 256, 132)]


def modelled(requests: int, new: int, prefix: int, geometry: Geometry = QWEN) -> tuple[float, float]:
    lens = [prefix] * requests, [new] * requests
    return H200.direct_us(*lens, geometry), H200.dequantised_us(*lens, geometry, CAPACITY)


@pytest.mark.parametrize("requests,new,prefix,direct,dequantised", MEASURED)
def test_the_way_it_chooses_is_within_three_percent_of_the_better(requests, new, prefix, direct, dequantised):
    chosen = direct if ShortExtends().suits([prefix] * requests, [new] * requests, QWEN, True, CAPACITY) else dequantised
    assert chosen <= 1.03 * min(direct, dequantised), modelled(requests, new, prefix)


@pytest.mark.parametrize("requests,new,prefix,direct,dequantised", MEASURED)
def test_it_predicts_what_was_measured(requests, new, prefix, direct, dequantised):
    for got, want in zip(modelled(requests, new, prefix), (direct, dequantised)):
        assert 0.85 * want < got < 1.15 * want


def test_constants_are_found_again():
    lens = [([prefix] * requests, [new] * requests) for requests, new, prefix, *_ in MEASURED]
    direct = np.array([direct_terms(*x, QWEN, NARROW) for x in lens])
    dequantised = np.array([dequantised_terms(*x, QWEN, CAPACITY) for x in lens])
    for terms, constants in ((direct, (3.0, 2.0, 20.0)), (dequantised, (10.0, 0.4, 0.01, 0.0, 5.0, 0.5))):
        assert np.allclose(fit(terms, terms @ constants), constants, rtol=1e-3, atol=1e-6)
    assert min(fit(direct, direct @ (3.0, 2.0, -1.0))) == 0.0


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"{g.q_heads}q{g.kv_heads}kv-d{g.head_dim}")
def test_more_of_anything_takes_longer(geometry):
    for way in range(2):
        for lens in ((1, 64, 8192), (8, 64, 8192), (64, 16, 2048)):
            base = modelled(*lens, geometry)[way]
            for larger in ((lens[0] * 4, *lens[1:]), (lens[0], lens[1] * 16, lens[2]), (*lens[:2], lens[2] * 4)):
                assert modelled(*larger, geometry)[way] > base, (way, lens, larger)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"{g.q_heads}q{g.kv_heads}kv-d{g.head_dim}")
def test_what_is_plain_at_any_geometry(geometry):
    """A few tokens after a long prefix are read from the pages, a long chunk over one goes through the workspace."""
    few, chunk = modelled(1, 4, 131072, geometry), modelled(1, 8192, 32768, geometry)
    assert few[0] < few[1] and chunk[0] > chunk[1]


def test_requests_of_unequal_length():
    """One long conversation beside many short ones costs at least what it costs alone, and hardly as much as sixteen of them."""
    prefix, new = [131072, *[2048] * 15], [128, *[16] * 15]
    for us in (H200.direct_us, lambda *x: H200.dequantised_us(*x, CAPACITY)):
        both, alone = us(prefix, new, QWEN), us(prefix[:1], new[:1], QWEN)
        assert alone < both < 0.3 * us(prefix[:1] * 16, new[:1] * 16, QWEN)
    assert H200.direct_us([0], [0], QWEN) < 20


def test_other_records_and_our_own_kernel_take_longer():
    lens = [8192] * 4, [16] * 4
    assert H200.direct_us(*lens, QWEN, False) > 1.5 * H200.direct_us(*lens, QWEN)
    assert H200.dequantised_us(*lens, QWEN, CAPACITY, False) > 1.2 * H200.dequantised_us(*lens, QWEN, CAPACITY)
