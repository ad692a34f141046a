"""Level tables hold integers that kernels support, close to the exact Lloyd-Max levels."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_kvq.constants import HEAD_DIMS
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import BITS, CodeFormat
from sglang_kvq.formats.levels import LEVELS, TOLERANCE, level_table

#: Max (1960), table I: mean squared error of the best quantizer of a unit Gaussian, and its positive levels.
MAX_1960 = {
    2: (0.1175, [0.4528, 1.510]),
    3: (0.03454, [0.2451, 0.7560, 1.344, 2.152]),
    4: (0.009497, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
}
ALL = [(name, bits, d) for name in LEVELS for bits in BITS for d in (HEAD_DIMS if name == "sphere" else (128,))]


@pytest.mark.parametrize("name,bits,d", ALL, ids=str)
def test_levels_are_symmetric_integers_within_int8_of_their_middle(name, bits, d):
    table = level_table(name, bits, d)
    levels = np.array(table.levels)
    assert len(levels) == 2**bits and levels[0] == 0 and (np.diff(levels) > 0).all()
    assert (levels + levels[::-1] == table.top).all() and table.top / 2 <= 127
    if name != "uniform":
        assert table.middle == int(table.middle)
    assert all(2 * t == int(2 * t) for t in table.thresholds), "products with FP16 would round"


def test_two_bit_levels_are_the_documented_ones():
    assert level_table("lloyd-max", 2, 128).levels == (0, 7, 13, 20)
    assert level_table("uniform", 2, 128).levels == (0, 1, 2, 3)


@pytest.mark.parametrize("bits", BITS)
def test_lloyd_max_levels_are_those_of_the_literature(bits):
    error, positive = MAX_1960[bits]
    table = level_table("lloyd-max", bits, 128)
    assert error * 0.999 <= table.distortion <= error * (1 + TOLERANCE + 1e-3)
    ours = (np.array(table.levels[2 ** (bits - 1) :]) - table.middle) * table.unit
    assert ours == pytest.approx(positive, rel=0.03)


@pytest.mark.parametrize("bits", BITS)
def test_sphere_levels_beat_gaussian_ones_on_the_sphere_and_approach_them(bits):
    """A coordinate on the sphere is bounded, so its best levels lie further in and err less, most of all at small D."""
    tables = [level_table("sphere", bits, d) for d in HEAD_DIMS]
    gaussian = level_table("lloyd-max", bits, 128)
    assert sorted(t.distortion for t in tables) == [t.distortion for t in tables]
    assert tables[-1].distortion < gaussian.distortion < 1.02 * tables[-1].distortion
    reach = [t.unit * t.middle for t in (*tables, gaussian)]
    assert reach == sorted(reach)


def test_tables_do_not_depend_on_the_process():
    """Units have 12 significant bits, so another machine's exp() cannot change them."""
    for args in ALL:
        mantissa, _ = np.frexp(level_table(*args).unit)
        assert mantissa * 4096 == int(mantissa * 4096)


@pytest.mark.parametrize("bits", BITS)
def test_gain_scales_the_unit_and_costs_little(bits):
    plain, more = (CodeFormat(bits, "lloyd-max", "moments", gain=gain).table(128) for gain in (1.0, 1.1))
    assert more.levels == plain.levels and more.unit == pytest.approx(1.1 * plain.unit, rel=2**-11)
    assert plain.distortion < more.distortion < 1.05 * plain.distortion


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"bits": 5}, "bits=5 does not exist. Choose one of 2, 3, 4"),
        ({"levels": "nf4"}, "levels='nf4' does not exist"),
        ({"statistic": "mean"}, "statistic='mean' does not exist"),
        ({"axis": "head"}, "axis='head' does not exist"),
        ({"gain": 1.1}, "gain=1.1: .*1 for statistic 'minmax'"),
        (
            {"axis": "channel", "centred": True},
            "centred=True: codes per channel already store an offset. Use axis='token'",
        ),
        ({"gain": 3.0, "statistic": "moments"}, "gain=3.0: must be 0.5 to 2"),
        ({"axis": "channel", "statistic": "norm"}, "norm.*Use axis='token'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_codes_that_do_not_exist_are_named(fields, message):
    with pytest.raises(KVQuantError, match=message):
        CodeFormat(**fields)
