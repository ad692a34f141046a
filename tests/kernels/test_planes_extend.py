"""Prefill over records of planes: pages are converted back to BF16, or attention reads them directly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_kvq.attention.planning.short_extend import ShortExtends
from sglang_kvq.constants import HEAD_DIMS, PAGE_SIZE
from sglang_kvq.formats.planes import PlaneCode, Widths, gains_of
from sglang_kvq.kernels.device.codes import PlaneCodes
from sglang_kvq.kernels.extend import gather_planes
from sglang_kvq.kernels.extend import history_planes as extend_planes
from tests.kernels.scene import Heads, Scene, make_batch, make_scene
from tests.kernels.test_formats import make_format
from tests.kernels.test_gather import GATHERED, check_pages
from tests.kernels.test_planes import HEADS, WIDTHS, plane_scene
from tests.kernels.test_short_extend import check, fma_f16x2
from tests.kernels.test_unpack import OPERATIONS, execute, words
from tests.pairs import each, few, label

#: One code for each combination of cells and fields.
CODES = {x: PlaneCode(x) for pair in WIDTHS for x in pair}


@each(widths=few(WIDTHS, 6), head_dim=HEAD_DIMS)
def test_pages_are_what_they_hold(head_dim, widths):
    """gather_pages dequantizes records with random bytes and gains."""
    scene = plane_scene(Heads(head_dim, min(head_dim, 128), 2, 1), widths, GATHERED)
    scene.pool.records[0].random_(0, 256)
    check_pages(scene)


@each(widths=few(WIDTHS, 6), heads=[replace(heads, kv=1) for heads in HEADS])
def test_short_extends_agree_with_float64(heads, widths):
    lens = [(64 * 5 + 9, 4), (64, 2)]
    check(plane_scene(heads, widths, [prefix for prefix, _ in lens]), lens, layers=[1])


def test_heads_and_requests():
    lens = [(64 * 9, 7), (0, 3), (64 * 4 + 63, 1), (5, 9)]
    check(plane_scene(HEADS[0], WIDTHS[0], [prefix for prefix, _ in lens]), lens)


def set_gains(scene: Scene, which: str, stored: torch.Tensor) -> None:
    """Sets the gain bytes of every record's keys ("k") or values ("v"): [tokens], or per page [pages, 1]."""
    parts = scene.pool.formats[0].parts
    first = parts.k_gains if which == "k" else parts.v_gains
    for records in scene.pool.records:
        gains = records[..., first : first + PAGE_SIZE]  # [pages, heads, tokens]
        gains.copy_(stored.to(gains)[..., None, :].expand_as(gains))


@pytest.mark.parametrize("across", ["pages", "tokens"])
def test_gains_of_any_size(across):
    """V's gains may range from 2^-16 to 2^15 from page to page, or from token to token."""
    lens = [(64 * 8, 3)]
    scene = plane_scene(replace(HEADS[0], kv=1), WIDTHS[1], [lens[0][0]])
    pages = len(scene.pool.records[0])
    set_gains(scene, "v", torch.arange(pages)[:, None] * 97 % 248 if across == "pages" else torch.arange(64) * 37 % 248)
    check(scene, lens, layers=[0])


@pytest.mark.parametrize("which, scale", [("v", 1.0), ("k", 2.0**-17)])
@pytest.mark.parametrize("first", [0, 240])
def test_gains_at_the_ends(first, which, scale):
    """The smallest gains occur alone or with the largest; FP16 has no such exponents and would flush or overflow."""
    lens = [(64 * 5, 3)]
    scene = plane_scene(replace(HEADS[0], kv=1), WIDTHS[5], [lens[0][0]])
    steps = torch.arange(PAGE_SIZE) * 7 % 16
    set_gains(scene, which, torch.where(steps < 8, first + steps, 240 + steps))
    check(scene, lens, layers=[0], size=scale)


@pytest.mark.parametrize("scale", few([0.0, 1e-28, 3e4, 1e-3, 30.0], 3))
def test_queries_of_any_size(scale):
    check(plane_scene(replace(HEADS[0], kv=1), WIDTHS[0], [64 * 5]), [(64 * 5, 4)], layers=[0], size=scale)


def test_many_rows_are_read_directly():
    """Planes are read directly for many rows, like uniform 2-bit records; other records only for few rows."""
    heads, short = HEADS[1], ShortExtends(costs=None)
    for scene, direct in (
        (plane_scene(heads, WIDTHS[0], [64]), True),
        (make_scene(heads, [64]), True),
        (make_scene(heads, [64], formats=[make_format("uniform-3-3", 128)] * 2), False),
    ):
        batch = make_batch(scene.rows, [(32768, 100)])
        ops = scene.ops()[0]
        ops.short = short
        way = ops._way(batch, ops._cheap[0])
        assert (getattr(way, "func", None) == ops._extend_short) == direct


def plane_codes(widths: Widths) -> PlaneCodes:
    cells = CODES[widths].cells
    return PlaneCodes(widths, cells, (0,) * len(cells), 0)


def bf16(x: np.ndarray) -> np.ndarray:
    """Returns the BF16 number in the lower 16 bits, as float64."""
    return (
        (x.astype(np.uint64) << np.uint64(16) & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32).astype(float)
    )


def fma_bf16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """PTX's fma.rn.bf16x2: computes both halves in float64, which holds the product and the sum, and rounds once."""
    halves = []
    for shift in (np.uint64(0), np.uint64(16)):
        exact = bf16(a >> shift) * bf16(b >> shift) + bf16(c >> shift)
        assert (exact == exact.astype(np.float32)).all(), "torch rounds by way of float32"
        halves.append(torch.from_numpy(exact).bfloat16().view(torch.int16).numpy().view(np.uint16).astype(np.uint64))
    return halves[0] | halves[1] << np.uint64(16)


def fp16(x: np.ndarray) -> np.ndarray:
    """Converts bits of float32 to bits of FP16."""
    return x.astype(np.uint32).view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint64)


@pytest.fixture
def packed_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, "fma.rn.f16x2", fma_f16x2)
    monkeypatch.setitem(OPERATIONS, "add.rn.f16x2", lambda a, b: fma_f16x2(a, np.full_like(a, 0x3C003C00), b))
    monkeypatch.setitem(OPERATIONS, "mul.rn.f16x2", lambda a, b: fma_f16x2(a, b, np.zeros_like(a)))
    monkeypatch.setitem(OPERATIONS, "mad.lo.u32", lambda a, b, c: a * b + c)
    monkeypatch.setitem(OPERATIONS, "cvt.rn.f16x2.f32", lambda a, b: fp16(a) << np.uint64(16) | fp16(b))
    monkeypatch.setitem(OPERATIONS, "fma.rn.bf16x2", fma_bf16x2)
    monkeypatch.setitem(OPERATIONS, "lop3.b32", lambda a, b, c, table: (a & b | c) * (table == 0xEA))


@pytest.mark.usefixtures("packed_operations")
@pytest.mark.parametrize("widths", CODES, ids=label)
def test_the_assembly_gives_codes_times_gain(widths):
    """Cells lie in the lower bytes of 16-bit halves, with arbitrary bits above them; every gain occurs."""
    count, codes = 2000, plane_codes(widths)
    cells = [words(count, seed) for seed in range(4)]
    stored = np.arange(count) % 256
    gains = ((stored + 888) << 4) * 0x10001
    for c, cell in enumerate(codes.cells):
        for f, field in enumerate(cell.fields):
            got = execute(gather_planes._expand_ptx.fn(codes, c, f), 4, [*cells, gains])
            for x, result in zip(cells, got):
                for half, value in enumerate(result.view(np.uint16).T):
                    code = (x >> np.uint64(16 * half + field.shift)).astype(int) & ((1 << field.width) - 1)
                    exact = (code - (2**field.width - 1) / 2) * bf16(gains)
                    want = torch.from_numpy(exact).bfloat16().view(torch.int16).numpy().view(np.uint16)
                    assert np.array_equal(value, want), f"{field}"


def test_the_assembly_picks_bytes():
    a, b = words(1000, 1), words(1000, 2)
    for low in range(4):
        for high in range(4):
            got = execute(gather_planes._halves_ptx.fn(low, high), 1, [a, b])[0].view(np.uint8)
            assert np.array_equal(got[:, 0], a >> np.uint64(8 * low) & np.uint64(255))
            assert np.array_equal(got[:, 2], b >> np.uint64(8 * high) & np.uint64(255))


def exact_gains(stored: np.ndarray) -> np.ndarray:
    """Returns gains as tiles hold them: the gain of each byte times 2^-5."""
    return gains_of(torch.from_numpy(stored.astype(np.uint8))).numpy().astype(float) / 32


@pytest.mark.usefixtures("packed_operations")
def test_the_assembly_gives_gains():
    """Every gain byte gives its gain, including those for which FP16 has no exponent."""
    count = 1024
    stored = (np.arange(4 * count).reshape(-1, 4) * 5 % 256).astype(np.uint8)  # each gain at each byte
    packed = stored.view(np.uint32)[:, 0].astype(np.uint64)
    even, odd = (x.view(np.float16) for x in execute(extend_planes.PAIRS_PTX.value, 2, [packed]))
    assert np.array_equal(np.stack([even, odd], 2).reshape(-1, 4), exact_gains(stored))
    for n in range(4):
        selector = np.full(count, 0x4044 + n * 0x100, np.uint64)
        both = execute(extend_planes.TWICE_PTX.value, 1, [packed, selector])[0].view(np.float16)
        assert (both == exact_gains(stored[:, n])[:, None]).all()


@pytest.mark.usefixtures("packed_operations")
@pytest.mark.parametrize("widths", CODES, ids=label)
def test_the_assembly_gives_elements(widths):
    count, codes = 2048, plane_codes(widths)
    packed, stored = words(count, 1), np.arange(4 * count).reshape(-1, 4) * 5 % 256  # each gain at each byte
    gains = exact_gains(stored).astype(np.float16).view(np.uint16).astype(np.uint64)
    even, odd = gains[:, 0] | gains[:, 2] << np.uint64(16), gains[:, 1] | gains[:, 3] << np.uint64(16)
    for c, cell in enumerate(codes.cells):
        shift = words(count, 2) % cell.shares * cell.bits
        for f, field in enumerate(cell.fields):
            got = execute(extend_planes.elements_ptx.fn(codes, c, f), 4, [packed, even, odd, shift])
            for n, result in zip((0, 2, 1, 3), got):
                code = (packed >> (shift + np.uint64(8 * n + field.shift))).astype(int) & ((1 << field.width) - 1)
                want = (code - (2**field.width - 1) / 2) * exact_gains(stored[:, n])
                error = np.abs(result.view(np.float16)[:, 0].astype(float) - want)
                assert (error <= np.where(stored[:, n] < 8, 2.0**-25, 0)).all(), f"{field}"
