"""Executes the inline assembly that unpacks codes line by line, because Triton's interpreter cannot run it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from sglang_kvq.kernels.decode import history_k_int8_v_fp16 as decode_half_int8
from sglang_kvq.kernels.device import unpack
from sglang_kvq.kernels.device.codes import Codes, record_of
from tests.kernels.test_formats import KINDS, make_format

ALL = {(c.bits, c.levels): c for kind in KINDS for r in [record_of(make_format(kind, 128))] for c in (r.k, r.v)}
CODES = pytest.mark.parametrize("codes", ALL.values(), ids=lambda c: f"{c.bits}-bits-to-{c.levels[-1]}")


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Executes PTX's prmt.b32 in its default mode."""
    both, result = a | b << 32, np.zeros_like(a)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both >> 8 * (nibble & 7) & 255
        result |= np.where(nibble & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint64) << 8 * i
    return result


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns bit 4 a + 2 b + c of the table, for each bit of three words."""
    terms = (
        (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c) for n in range(8) if int(table[0]) >> n & 1
    )
    return np.bitwise_or.reduce(list(terms))


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "mul.lo.u32": lambda a, b: a * b,
    "prmt.b32": permute,
    "lop3.b32": lop3,
}


def execute(assembly: str, outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Runs lines of PTX over arrays of 32-bit words."""
    values = {f"${outputs + i}": x.astype(np.uint64) for i, x in enumerate(inputs)}
    for line in assembly.replace("{", "").replace("}", "").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        name, target, *operands = re.split(r"[\s,]+", line.strip())
        if name == "mov.b32" and len(operands) == 2:  # splits a word into its halves
            word = values[operands[1]]
            values[target], values[operands[0]] = word & np.uint64(0xFFFF), word >> np.uint64(16)
            continue
        operands = [values[x] if x in values else np.full(len(inputs[0]), int(x, 0), np.uint64) for x in operands]
        values[target] = OPERATIONS[name](*operands) & np.uint64(0xFFFFFFFF)
    return [values[f"${i}"].astype(np.uint32).view(np.int8).reshape(-1, 4) for i in range(outputs)]


def words(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64)


def right(codes: Codes, low: np.ndarray, high: np.ndarray, shift: np.ndarray, plane: int) -> np.ndarray:
    """Computes the result that ``unpack`` documents, int ``[words, 4]``."""
    low, high = (x.astype(np.uint32).view(np.uint8).reshape(-1, 4).astype(int) for x in (low, high))
    code = low >> 2 * plane & 3
    if codes.bits == 2:
        return code * unpack.multiple(codes, plane)
    if codes.bits == 4:
        code |= (high >> 2 * plane & 3) << 2
    else:
        code |= (high >> shift[:, None].astype(int) + plane & 1) << 2
    return (np.array(codes.levels) - unpack.centre(codes))[code]


@pytest.mark.parametrize("fixed", [None, 0, 4])
@CODES
def test_planes(codes, fixed):
    low, high = words(5000, 1), words(5000, 2)
    shift = words(5000, 3) % 2 * 4 if fixed is None else np.full(5000, fixed, np.uint64)
    if codes.bits == 2:
        tiles = execute(unpack._masks(3), 4, [low])
    else:
        tiles = execute(unpack._assembly(codes, fixed), 4, [low, high, shift])
    for plane, tile in enumerate(tiles):
        assert np.array_equal(tile, right(codes, low, high, shift, plane)), f"plane {plane}"


@CODES
def test_products_of_levels_fit_their_accumulators(codes):
    """|operand| <= 127 times levels, summed over 256 dims, stays within the 2^22 that ``int8.MAGIC`` allows."""
    most = max(abs(level - unpack.centre(codes)) for level in codes.levels) * (2 if unpack.in_steps(codes) else 1)
    assert most < 128 and 127 * most * 256 < 2**22


def test_odd_codes_make_up_for_uneven_levels():
    codes = next(c for c in ALL.values() if unpack.in_steps(c))
    low = words(5000, 1)
    code, odd = (execute(unpack._masks(mask), 4, [low]) for mask in (3, 1))
    for plane in range(4):
        doubled = code[plane].astype(int) * unpack.step(codes) + odd[plane]
        expected = np.array(codes.levels)[right(codes, low, low, low, plane) // unpack.multiple(codes, plane)]
        assert np.array_equal(doubled, 2 * expected * unpack.multiple(codes, plane))


def test_queries_are_split():
    """The assembly collects the second bytes of four words and the first bytes of four others."""
    inputs = [words(2000, seed) for seed in range(8)]
    high, low = execute(decode_half_int8.SPLIT.value, 2, inputs)
    assert np.array_equal(high, np.stack([x >> np.uint64(8) for x in inputs[:4]], 1).astype(np.uint8).view(np.int8))
    assert np.array_equal(low, np.stack(inputs[4:], 1).astype(np.uint8).view(np.int8))
