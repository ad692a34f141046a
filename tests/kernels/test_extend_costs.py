"""The cost model of extends picks the faster way wherever both were measured, and extrapolates sensibly."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvq.attention.planning.extend_costs import H200, Geometry, dequantized_terms, direct_terms, fit
from sglang_kvq.attention.planning.short_extend import ShortExtends
from sglang_kvq.kernels.extend.extend_attention import NARROW

QWEN = Geometry(32, 8, 128, 132)
CAPACITY = 65536
#: Requests, new tokens of each, stored prefix, and microseconds on an H200: reading pages directly, and with a
#: workspace of 66K tokens.
MEASURED = [
    (1, 16, 32768, 44.5, 410.8), (1, 64, 32768, 115.8, 406.1), (1, 128, 8192, 67.8, 116.1),
    (1, 256, 32768, 403.1, 413.3), (1, 512, 8192, 243.8, 132.0), (1, 128, 131072, 775.8, 1557.3),
    (4, 16, 8192, 44.4, 155.9), (4, 64, 32768, 403.0, 581.9), (4, 128, 32768, 805.7, 619.7),
    (4, 512, 8192, 910.7, 512.6), (8, 16, 2048, 32.6, 96.3), (8, 64, 8192, 228.1, 309.6),
    (8, 128, 8192, 460.2, 323.1), (8, 256, 8192, 893.5, 624.2), (16, 32, 8192, 227.4, 695.6),
    (16, 128, 32768, 3188.4, 2802.1), (32, 32, 8192, 440.1, 1502.5), (32, 64, 2048, 228.7, 355.1),
    (64, 16, 8192, 440.5, 2719.7), (64, 128, 2048, 1153.6, 774.9),
]  # fmt: skip
GEOMETRIES = [
    QWEN,
    Geometry(8, 8, 64, 132),
    Geometry(16, 1, 128, 132),
    Geometry(12, 1, 96, 132),
    Geometry(64, 8, 64, 114),
    Geometry(16, 4, 256, 132),
]


def modelled(requests: int, new: int, prefix: int, geometry: Geometry = QWEN) -> tuple[float, float]:
    lens = [prefix] * requests, [new] * requests
    return H200.direct_us(*lens, geometry), H200.dequantized_us(*lens, geometry, CAPACITY)


#: Rows of the grid in kernels_h200.json: requests, new tokens, prefix, the way that was taken, and its microseconds.
GRID = [
    (1, 16, 2048, "pages", 18.1), (1, 16, 8192, "pages", 25.6), (1, 16, 32768, "pages", 44.5),
    (1, 64, 2048, "pages", 25.4), (1, 64, 8192, "pages", 43.7), (1, 64, 32768, "pages", 115.8),
    (1, 128, 2048, "workspace", 45.3), (1, 128, 8192, "pages", 67.8), (1, 128, 32768, "pages", 210.7),
    (1, 512, 2048, "workspace", 51.1), (1, 512, 8192, "workspace", 132.0), (1, 512, 32768, "workspace", 472.3),
    (4, 16, 2048, "pages", 25.7), (4, 16, 8192, "pages", 44.4), (4, 16, 32768, "pages", 115.4),
    (4, 64, 2048, "workspace", 57.7), (4, 64, 8192, "pages", 119.5), (4, 64, 32768, "pages", 403.0),
    (4, 128, 2048, "workspace", 58.9), (4, 128, 8192, "workspace", 167.5), (4, 128, 32768, "workspace", 619.7),
    (4, 512, 2048, "workspace", 168.0), (4, 512, 8192, "workspace", 512.6), (4, 512, 32768, "workspace", 1922.9),
    (16, 16, 2048, "pages", 47.9), (16, 16, 8192, "pages", 119.7), (16, 16, 32768, "pages", 403.1),
    (16, 64, 2048, "workspace", 184.3), (16, 64, 8192, "pages", 439.4), (16, 64, 32768, "pages", 1560.1),
    (16, 128, 2048, "workspace", 193.8), (16, 128, 8192, "workspace", 742.0), (16, 128, 32768, "workspace", 2802.1),
    (16, 512, 2048, "workspace", 633.3), (16, 512, 8192, "workspace", 2039.2), (16, 512, 32768, "workspace", 7596.6),
    (64, 16, 2048, "pages", 158.8), (64, 16, 8192, "pages", 440.5), (64, 16, 32768, "pages", 1581.0),
    (64, 64, 2048, "pages", 443.0), (64, 64, 8192, "pages", 1573.2), (64, 64, 32768, "pages", 6107.7),
    (64, 128, 2048, "workspace", 774.9), (64, 128, 8192, "workspace", 2970.4), (64, 128, 32768, "workspace", 11136.6),
    (64, 512, 2048, "workspace", 2537.9), (64, 512, 8192, "workspace", 8614.4), (64, 512, 32768, "workspace", 32591.4),
]  # fmt: skip


@pytest.mark.parametrize("requests,new,prefix,direct,dequantized", MEASURED)
def test_the_way_it_chooses_is_within_three_percent_of_the_better(requests, new, prefix, direct, dequantized):
    chosen = (
        direct if ShortExtends().suits([prefix] * requests, [new] * requests, QWEN, True, CAPACITY) else dequantized
    )
    assert chosen <= 1.03 * min(direct, dequantized), modelled(requests, new, prefix)


@pytest.mark.parametrize("requests,new,prefix,way,measured", GRID)
def test_it_predicts_what_was_measured(requests, new, prefix, way, measured):
    got = dict(zip(("pages", "workspace"), modelled(requests, new, prefix)))[way]
    assert 0.82 * measured < got < 1.2 * measured


def test_constants_are_found_again():
    lens = [([prefix] * requests, [new] * requests) for requests, new, prefix, *_ in MEASURED]
    direct = np.array([direct_terms(*x, QWEN, NARROW) for x in lens])
    dequantized = np.array([dequantized_terms(*x, QWEN, CAPACITY) for x in lens])
    for terms, constants in ((direct, (3.0, 2.0, 20.0)), (dequantized, (10.0, 0.4, 0.01, 0.0, 5.0, 0.5))):
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
    """A few tokens after a long prefix are read from the pages; a long chunk after one goes through the workspace."""
    few, chunk = modelled(1, 4, 131072, geometry), modelled(1, 8192, 32768, geometry)
    assert few[0] < few[1] and chunk[0] > chunk[1]


def test_requests_of_unequal_length():
    """One long conversation with many short ones costs at least as much as alone, and far less than 16 long ones."""
    prefix, new = [131072, *[2048] * 15], [128, *[16] * 15]
    for us in (H200.direct_us, lambda *x: H200.dequantized_us(*x, CAPACITY)):
        both, alone = us(prefix, new, QWEN), us(prefix[:1], new[:1], QWEN)
        assert alone < both < 0.3 * us(prefix[:1] * 16, new[:1] * 16, QWEN)
    assert H200.direct_us([0], [0], QWEN) < 20


def test_other_records_and_our_own_kernel_take_longer():
    lens = [8192] * 4, [16] * 4
    assert H200.direct_us(*lens, QWEN, False) > 1.5 * H200.direct_us(*lens, QWEN)
    assert H200.dequantized_us(*lens, QWEN, CAPACITY, False) > 1.2 * H200.dequantized_us(*lens, QWEN, CAPACITY)
