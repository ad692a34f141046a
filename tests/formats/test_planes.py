"""Codes with one width per plane agree with exact arithmetic, and records use every bit once."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.planes import BELOW, PLANES, PlaneCode, PlaneFormat, cells_of, gain_bytes, gains_of
from tests.pairs import few

WIDTHS = [
    (6, 4, 2, 0),
    (5, 3, 3, 1),
    (4, 4, 4, 4),
    (4, 3, 1, 0),
    (3, 2, 2, 1),
    (2, 2, 2, 2),
    (4, 0, 0, 0),
    (1, 1, 1, 1),
    (3, 2, 1, 0),
    (4, 3, 2, 1),
]
#: Bits of each cell, by the bits of a column.
SIZES = {
    **{2: [2], 4: [4], 6: [4, 2], 8: [8]},
    **{8 + n: [8, *small] for n, small in ((2, [2]), (4, [4]), (6, [4, 2]), (8, [8]))},
}
GAINS = [Fraction(8 + m, 8) * Fraction(2) ** e for e in range(-16, 16) for m in range(8)]


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Returns BF16 rows whose energies fall from plane to plane, with some heavy tails."""
    torch.manual_seed(seed)
    x = torch.randn(shape) * torch.logspace(1, -1, shape[-1])
    return (x * torch.exp(torch.randn(*shape[:-1], 1))).bfloat16()


def test_gains_are_those_of_the_formula():
    found = [Fraction(g) for g in gains_of(torch.arange(256, dtype=torch.uint8)).tolist()]
    assert found == GAINS
    assert gain_bytes(gains_of(torch.arange(256, dtype=torch.uint8))).tolist() == list(range(256))


@given(st.floats(2.0**-20, 2.0**18, width=32))
@settings(max_examples=300, deadline=None)
def test_a_gain_is_the_least_that_is_enough(x):
    byte = int(gain_bytes(torch.tensor([x]))[0])
    enough = [n for n, gain in enumerate(GAINS) if gain >= Fraction(x)]
    assert byte == (enough[0] if enough else 255)


def fp16(x: Fraction) -> Fraction:
    """Rounds to FP16 as NumPy does from float64, which holds all these numbers exactly."""
    assert Fraction(float(x)) == x
    return Fraction(float(np.float16(float(x))))


def exact(row: list[Fraction], code: PlaneCode) -> tuple[list[int], Fraction]:
    """Computes codes and gain of one row by the module's formulas, in rational arithmetic."""
    quarter = len(row) // PLANES
    widths = [code.widths[i // quarter] for i in range(len(row))]
    reach = max(abs(x) * Fraction(2) ** (1 - w) for x, w in zip(row, widths) if w)
    first = next((n for n, g in enumerate(GAINS) if g >= reach), 255)
    unit = max(Fraction(2) ** (math.frexp(reach)[1] - 1), Fraction(1, 2**16)) if reach else Fraction(1, 2**16)
    if reach > unit * 15 / 8:
        unit *= 2
    if unit >= 2**19:
        return exact([Fraction(0)] * len(row), code)
    whole = [Fraction(round(16 * x / unit * 2**21), 2**21) for x in row]

    def tried(byte: int) -> tuple[list[int], Fraction]:
        """Returns the row's codes, and their squared error, if ``byte`` names the gain."""
        gain = 16 * GAINS[byte] / unit
        codes, columns = [], [Fraction(0)] * quarter
        for i, (x, w) in enumerate(zip(whole, widths)):
            n = 2**w - 1
            if w == 0:
                codes.append(0)
                continue
            inverse = Fraction(float(np.float16(np.float64(1) / np.float64(float(gain)))))
            place = fp16(x * fp16(inverse * Fraction(float(np.float16(1 / n)))) + Fraction(1, 2))
            inside = min(max(place, Fraction(0)), Fraction(1))
            codes.append(round(n * inside))
            found = codes[-1] if byte != first else fp16(n * place + 1536) - 1536
            error = fp16((n * place - found) / Fraction(code.cap))
            columns[i % quarter] = fp16(columns[i % quarter] + error**2)
        return codes, gain**2 * sum(round(1024 * min(e, Fraction(1))) for e in columns)

    second = max(first - BELOW, 0)
    (codes, error), (others, other) = tried(first), tried(second)
    return (others, GAINS[second]) if other < error else (codes, GAINS[first])


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_codes_and_values_are_exact(widths):
    code, x = PlaneCode(widths), rows(8, 64)
    x[1] *= 0
    x[2] *= 2.0**-20
    x[3] *= 2.0**20
    x[4] *= 2.0**12
    codes, stored = code.quantize(x)
    values = code.dequantize(codes, stored)
    for i, row in enumerate(x.tolist()):
        want, gain = exact([Fraction(v) for v in row], code)
        assert codes[i].tolist() == want and Fraction(float(gains_of(stored)[i])) == gain
        per = [widths[n // 16] for n in range(64)]
        back = [(Fraction(c) - Fraction(2**w - 1, 2)) * gain if w else Fraction(0) for c, w in zip(want, per)]
        assert [Fraction(v) for v in values[i].tolist()] == back


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_the_gain_is_worth_its_bits(widths):
    """Each row has the gain of least error among those tried."""
    code, x = PlaneCode(widths), rows(4000, 128)
    codes, stored = code.quantize(x)
    coded = (torch.tensor(widths) > 0)[:, None]

    def error(values: torch.Tensor) -> torch.Tensor:
        return ((values - x.float()).unflatten(-1, (PLANES, -1)) * coded).square().sum((-1, -2))

    reach = [x.float().unflatten(-1, (PLANES, -1))[:, p].abs().amax(-1) * 2.0 ** (1 - w) for p, w in enumerate(widths)]
    largest = gain_bytes(torch.stack([r for r, w in zip(reach, widths) if w]).amax(0)).int()
    chosen = set((largest - stored.int()).tolist())
    assert chosen == {0, BELOW} if widths[0] > 4 else chosen <= {0, BELOW}
    found = error(code.dequantize(codes, stored))
    half = 2.0 ** (torch.tensor(widths)[:, None] - 1)
    for below in (0, BELOW):
        gain = gains_of(largest - below)[:, None, None]
        k = (x.float().unflatten(-1, (PLANES, -1)) / gain - 0.5).round()
        values = ((torch.minimum(torch.maximum(k, -half), half - 1) + 0.5) * gain * coded).flatten(1)
        best = error(values)
        assert (found <= 1.05 * best + 1e-12).all(), below  # errors of columns have ten bits
        assert found.sum() <= 1.001 * best.sum(), below


def test_rows_above_all_gains():
    """Rows slightly above the largest gain use it; a row far above is stored as zeros."""
    code, x = PlaneCode((6, 4, 4, 2)), rows(64, 256)
    ranges = torch.tensor([32, 8, 8, 2])
    reach = (x.float().unflatten(-1, (PLANES, -1)).abs().amax(-1) / ranges).amax(-1)
    x = (x.float() / reach[:, None] * 2.0**16.5).bfloat16()
    codes, stored = code.quantize(x)
    assert (stored >= 255 - BELOW).all()
    top, large = torch.tensor([63, 15, 15, 3]).repeat_interleave(64), x.abs() > 2.0**16 * 32
    assert torch.equal(codes[large], (top * (x > 0)).to(torch.uint8)[large])
    zero, least = code.quantize(torch.zeros(64, 256))
    codes, stored = code.quantize(x.float() * 2.0**4)
    assert torch.equal(codes, zero) and torch.equal(stored, least) and (least == 0).all()


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_that_no_gain_reaches_are_stored_as_zeros(widths):
    """Rows from a gain of 2^19 on, or with an infinity or NaN in a coded plane, are stored as zeros."""
    code, x = PlaneCode(widths), torch.randn(10, 64)  # enough rows for vector code, whose amax makes other NaNs
    largest = 2.0 ** (widths[0] - 1) * 2.0**19
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    x[:, 3] = torch.tensor([largest, -largest, 3e38, math.inf, -math.inf, *nan, largest * 0.9])
    codes, stored = code.quantize(x)
    zero, least = code.quantize(torch.zeros(9, 64))
    zero[3:, 3] = 0
    assert torch.equal(codes[:9], zero) and torch.equal(stored[:9], least)
    values = code.dequantize(codes, stored)[:9]
    assert (values[:3].abs() <= 2.0**-17).all() and (values.abs() < 2.0**-11).all()
    assert stored[9] >= 255 - BELOW, "the largest gain"
    if 0 in widths:
        x = torch.randn(3, 64)
        elsewhere = 16 * widths.index(0) + 5
        x[:, elsewhere] = torch.tensor([0.0, math.inf, math.nan])
        codes, stored = code.quantize(x)
        want, gains = code.quantize(torch.where(x.isfinite(), x, 0.0))
        assert torch.equal(codes, want) and torch.equal(stored, gains)


def test_cells_are_filled_by_whole_planes():
    for widths in itertools.product(range(7), repeat=4):
        cells = cells_of(widths)
        if sum(widths) not in SIZES:
            assert cells is None
            continue
        fits = any(
            all(sum(w for w, c in zip(widths, places) if c == n) == size for n, size in enumerate(SIZES[sum(widths)]))
            for places in itertools.product(range(len(SIZES[sum(widths)])), repeat=4)
        )
        assert (cells is not None) == fits
        for cell in cells or ():
            assert [f.shift for f in cell.fields] == [
                sum(f.width for f in cell.fields[:n]) for n in range(len(cell.fields))
            ]
            assert sum(f.width for f in cell.fields) == cell.bits
        if cells:
            assert sorted((f.plane, f.width) for c in cells for f in c.fields) == [
                (p, w) for p, w in enumerate(widths) if w
            ]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "k,v",
    [
        ((6, 3, 2, 1), (3, 2, 2, 1)),
        ((3, 1, 0, 0), (2, 1, 1, 0)),
        ((4, 4, 4, 4), (4, 0, 0, 0)),
        ((3, 2, 1, 0), (6, 4, 2, 2)),
        ((4, 3, 2, 1), (2, 0, 0, 0)),
    ],
)
def test_records_hold_codes_and_gains(head_dim, k, v):
    fmt = PlaneFormat(head_dim, PlaneCode(k), PlaneCode(v))
    keys, values = rows(3, 2, PAGE_SIZE, head_dim), rows(3, 2, PAGE_SIZE, head_dim, seed=1)
    records = fmt.quantize_pages(keys, values)
    assert records.shape == (3, 2, fmt.record_bytes) and records.dtype == torch.uint8
    assert fmt.bits_per_element == (sum(k) + sum(v)) / 8 + 8 / head_dim
    assert all(start % 64 == 0 for start in fmt.parts)
    for code, x, got in zip((fmt.k, fmt.v), (keys, values), fmt.dequantize_pages(records)):
        assert torch.equal(got, code.dequantize(*code.quantize(x)))


@pytest.mark.parametrize("k,v", few([((4, 3, 1, 0), (3, 2, 2, 1)), ((3, 2, 1, 0), (4, 3, 2, 1))], 1))
def test_every_bit_of_a_record_is_one_codes_or_one_gains(k, v):
    """Flipping a bit changes one element, or one token's row."""
    fmt = PlaneFormat(64, PlaneCode(k), PlaneCode(v))
    record = fmt.quantize_pages(rows(PAGE_SIZE, 64), rows(PAGE_SIZE, 64, seed=1))
    coded = sum(w > 0 for w in (*k, *v))
    k, v = fmt.dequantize_pages(record)
    seen: dict[tuple, int] = {}
    flips = 1 << torch.arange(8, dtype=torch.uint8)
    for byte in range(fmt.parts[2]):
        others = record.repeat(8, 1)
        others[:, byte] ^= flips
        changed: list[list[tuple]] = [[] for _ in range(8)]
        for part, (a, b) in enumerate(zip((k, v), fmt.dequantize_pages(others))):
            for bit, *at in (a != b).nonzero().tolist():
                changed[bit].append((part, *at))
        for element in changed:
            assert len(element) == 1
            seen[element[0]] = seen.get(element[0], 0) + 1
    for (part, _, element), count in seen.items():
        assert count == (fmt.k, fmt.v)[part].widths[element // 16]
    assert len(seen) == PAGE_SIZE * 16 * coded


@pytest.mark.parametrize(
    "widths", [(4, 4, 0), (7, 1, 0, 0), (5, 3, 2, 1), (5, 1, 0, 0), (0, 0, 0, 0), (3, 3, 3, 3), (6, 6, 4, 4)]
)
def test_codes_that_do_not_exist_are_named(widths):
    with pytest.raises(KVQuantError, match=re.escape(f"widths {widths}: must be four numbers from 0 to 6")):
        PlaneCode(widths)


def test_other_head_dims_are_refused():
    with pytest.raises(KVQuantError, match="head_dim 80"):
        PlaneFormat(80, PlaneCode((1, 1, 1, 1)), PlaneCode((1, 1, 1, 1)))
