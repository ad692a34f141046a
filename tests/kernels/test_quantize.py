"""Kernels write the records that formats/page.py gives, bit for bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sglang_kvq.attention.base import AttentionOps
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.page import PageFormat
from tests.kernels.scene import DEVICE, HEADS, ON_GPU, SOME_HEADS, Scene, int64, make_scene, randn
from tests.pairs import each

PAGES = 40 if ON_GPU else 3


def heavy(*shape: int) -> torch.Tensor:
    """Returns rows with outliers, ties, constants, zeros, tiny and huge values."""
    x = randn(*shape).float()
    x *= torch.exp(torch.randn(*shape[:-1], 1, device=DEVICE))
    x[..., 3] *= 40
    flat = x.view(-1, shape[-1])
    flat[1::13] = flat[1::13].round()  # ties
    flat[2::13] = 1.5
    flat[3::13] *= 1e-7  # scales below FP16's normal numbers
    flat[4::13] *= 1e7  # clamped to FP16's largest
    flat[5::13] = flat[5::13].abs()
    flat[6::13, ::2] = 0.0
    flat[7::13] = 0.0
    return x.bfloat16()


def same_records(format: PageFormat, got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares records bit for bit, part by part; 0 and -0 mean the same."""
    for name, a, b in zip(format.parts._fields, format.parts, format.parts[1:]):
        x, y = got[..., a:b], want[..., a:b]
        if name.endswith(("offset", "mean")):
            x, y = ((z.contiguous().view(torch.float16) + 0.0).view(torch.int16) for z in (x, y))
        assert torch.equal(x, y), f"{name}: {(x != y).sum().item()} of {x.numel()} differ"


def check_written(scene: Scene, layers: slice, pages: torch.Tensor, run: Callable[[AttentionOps], None]) -> None:
    """Compares the pages that both backends write in some layers; nothing else may change."""
    records = scene.pool.stores[0].records
    before = records.clone()
    ops, reference = scene.ops()
    run(reference)
    want = records.clone()
    records.copy_(before)
    run(ops)
    same_records(scene.pool.formats[0], records[layers, pages], want[layers, pages])
    records[layers, pages] = before[layers, pages]
    assert torch.equal(records, before), "wrote outside its pages"


def some(count: int) -> torch.Tensor:
    """Returns ``PAGES`` distinct numbers from 1 to ``count``."""
    return (torch.randperm(count)[:PAGES] + 1).to(DEVICE)


@each(heads=SOME_HEADS, clip=[True, False])
def test_pages_of_activations(heads, clip):
    if not clip:
        heads = replace(heads, clip_k=1.0, clip_v=1.0)
    scene = make_scene(heads, [64], margin=PAGES + 2)
    _, k, v = heavy(PAGES * PAGE_SIZE + 70, heads.q + 2 * heads.kv, heads.head_dim).split(
        [heads.q, heads.kv, heads.kv], dim=1
    )
    first = int64(*(5 + PAGE_SIZE * i + (i > 1) * 9 for i in range(PAGES)))
    pages = some(scene.pool.pages)
    check_written(scene, slice(1, 2), pages, lambda ops: ops.quantize_tokens(1, first, pages, k, v))


@pytest.mark.parametrize(
    ("heads", "count"),
    [(HEADS[1], 0), (HEADS[1], PAGES - 1), *((heads, 1) for heads in SOME_HEADS if heads != HEADS[1])],
    ids=str,
)
def test_pages_of_bf16_pages(heads, count):
    scene = make_scene(heads, [64], margin=PAGES + 2)
    scene.pool.bf16_pages.copy_(heavy(*scene.pool.bf16_pages.shape))
    slots, pages = some(scene.pool.slots), some(scene.pool.pages)
    check_written(scene, slice(None), pages[:count], lambda ops: ops.quantize_slots(slots, pages, int64(count)))


def test_activations_and_bf16_pages_give_the_same_record():
    heads = HEADS[1]
    scene = make_scene(heads, [64], margin=4)
    ops, _ = scene.ops()
    k, v = (heavy(PAGE_SIZE, heads.kv, heads.head_dim) for _ in range(2))
    ops.quantize_tokens(0, int64(0), int64(2), k, v)
    scene.pool.bf16_pages[:, 3, 0], scene.pool.bf16_pages[:, 3, 1] = k.transpose(0, 1), v.transpose(0, 1)
    ops.quantize_slots(int64(3), int64(1), int64(1))
    assert torch.equal(scene.pool.records[0][1], scene.pool.records[0][2])


def test_no_pages():
    scene = make_scene(HEADS[1], [64])
    ops, _ = scene.ops()
    empty = int64()
    k = randn(8, HEADS[1].kv, HEADS[1].head_dim)
    ops.quantize_tokens(0, empty, empty, k, k)
    ops.quantize_slots(empty, empty, int64(0))
