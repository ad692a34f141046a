"""Codes of a width per plane against exact arithmetic; records that hold every bit once."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvq.config import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.planes import PLANES, PlaneCode, PlaneFormat, gain_bytes, gains_of

WIDTHS = [
    (4, 3, 2, 1),
    (4, 4, 2, 2),
    (3, 2, 1, 0),
    (2, 2, 2, 2),
    (4, 0, 0, 0),
    (1, 1, 1, 1),
    (3, 3, 3, 3),
    (4, 4, 4, 4),
]
GAINS = [Fraction(8 + m, 8) * Fraction(2) ** e for e in range(-16, 16) for m in range(8)]


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """BF16, of energies that fall from plane to plane, with some heavy tails."""
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


def exact(row: list[Fraction], code: PlaneCode) -> tuple[list[int], Fraction]:
    """Codes and gain of one row by the module's formulas, in rational arithmetic."""
    quarter = len(row) // PLANES
    widths = [code.widths[i // quarter] for i in range(len(row))]
    reach = sorted((abs(x) * Fraction(2) ** (1 - w) for x, w in zip(row, widths) if w), reverse=True)
    least = reach[min(code.rank, len(reach)) - 1]
    gain = next((g for g in GAINS if g >= least), GAINS[-1])
    codes = [sum(x > t * gain for t in range(1 - 2 ** (w - 1), 2 ** (w - 1))) if w else 0 for x, w in zip(row, widths)]
    return codes, gain


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("rank", [1, 3, 1000])
def test_codes_and_values_are_exact(widths, rank):
    code, x = PlaneCode(widths, rank), rows(6, 64)
    codes, stored = code.quantize(x)
    values = code.dequantize(codes, stored)
    for i, row in enumerate(x.tolist()):
        want, gain = exact([Fraction(v) for v in row], code)
        assert codes[i].tolist() == want and Fraction(float(gains_of(stored)[i])) == gain
        per = [widths[n // 16] for n in range(64)]
        back = [(Fraction(c) - Fraction(2**w - 1, 2)) * gain if w else Fraction(0) for c, w in zip(want, per)]
        assert [Fraction(v) for v in values[i].tolist()] == back


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_nothing_is_clipped_at_rank_one(widths):
    """Every coded element errs by half a gain at most."""
    code, x = PlaneCode(widths), rows(200, 128)
    codes, stored = code.quantize(x)
    error = (code.dequantize(codes, stored) - x.float()).abs().unflatten(-1, (PLANES, -1))
    coded = torch.tensor(widths) > 0
    assert (error[:, coded] <= gains_of(stored)[:, None, None] / 2).all()
    top = torch.tensor(widths) == max(widths)
    assert (error[:, top] > 0).any()


def test_a_rank_clips_the_larger_ones_only():
    x = rows(500, 64)
    for rank in (2, 4):
        code = PlaneCode((3, 3, 3, 3), rank)
        codes, stored = code.quantize(x)
        above = x.float().abs() > 4 * gains_of(stored)[:, None]
        assert above.any() and above.sum(-1).max() < rank
        assert ((codes == 0) | (codes == 7))[above].all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "k,v", [((4, 3, 2, 1), (3, 2, 2, 2)), ((3, 2, 1, 0), (2, 1, 1, 0)), ((4, 4, 4, 4), (0, 0, 0, 0))]
)
def test_records_hold_codes_and_gains(head_dim, k, v):
    fmt = PlaneFormat(head_dim, PlaneCode(k), PlaneCode(v, 2))
    keys, values = rows(3, 2, PAGE_SIZE, head_dim), rows(3, 2, PAGE_SIZE, head_dim, seed=1)
    records = fmt.quantize_pages(keys, values)
    assert records.shape == (3, 2, fmt.record_bytes) and records.dtype == torch.uint8
    assert fmt.bits_per_element == (sum(k) + sum(v)) / 8 + 8 / head_dim
    assert all(start % 64 == 0 for start in fmt.parts)
    for code, x, got in zip((fmt.k, fmt.v), (keys, values), fmt.dequantize_pages(records)):
        assert torch.equal(got, code.dequantize(*code.quantize(x)))


def test_every_bit_of_a_record_is_one_codes_or_one_gains():
    """Turning a bit changes one element, or one token's row."""
    fmt = PlaneFormat(64, PlaneCode((4, 3, 1, 0)), PlaneCode((3, 2, 2, 1)))
    record = fmt.quantize_pages(rows(PAGE_SIZE, 64), rows(PAGE_SIZE, 64, seed=1))
    k, v = fmt.dequantize_pages(record)
    seen: dict[tuple, int] = {}
    for bit in range(8 * fmt.parts[2]):
        other = record.clone()
        other[bit // 8] ^= 1 << bit % 8
        changed = [
            (part, *at)
            for part, (a, b) in enumerate(zip((k, v), fmt.dequantize_pages(other)))
            for at in (a != b).nonzero().tolist()
        ]
        assert len(changed) == 1
        seen[changed[0]] = seen.get(changed[0], 0) + 1
    for (part, _, element), count in seen.items():
        assert count == (fmt.k, fmt.v)[part].widths[element // 16]
    assert len(seen) == PAGE_SIZE * 16 * (3 + 4)


@pytest.mark.parametrize(
    "widths,rank,words", [((4, 3, 2), 1, "four numbers"), ((5, 1, 1, 1), 1, "0 to 4"), ((1, 1, 1, 1), 0, "rank 0")]
)
def test_codes_that_do_not_exist_are_named(widths, rank, words):
    with pytest.raises(KVQuantError, match=words):
        PlaneCode(widths, rank)
    with pytest.raises(KVQuantError, match="head_dim 80"):
        PlaneFormat(80, PlaneCode((1, 1, 1, 1)), PlaneCode((1, 1, 1, 1)))
