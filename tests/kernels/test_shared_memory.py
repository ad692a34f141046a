"""Kernels work on one memory for records and BF16 pages: its strides, and ids that differ from pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.drafts import DraftBatch, chain
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache import fold
from sglang_kvq.cache.triton_tiers import move_tokens
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from tests.kernels.scene import (
    DEVICE,
    HEADS,
    Scene,
    activations,
    assert_close,
    check_extend,
    int64,
    make_scene,
    prefix_scene,
    randn,
)

WIDE = HEADS[1]
#: Layers with two-bit codes, planes and other codes: the three layouts alternate, so that layers of a store are not
#: adjacent.
FORMATS = [
    PageFormat(128, 128, 0.96, 0.92),
    PlaneFormat(128, PlaneCode((5, 3, 3, 1)), PlaneCode((2, 1, 1, 0))),
    PageFormat(128, 128, k=CodeFormat(3), v=CodeFormat(3)),
    PageFormat(128, 128, 0.96, 0.92),
]
LENGTHS = [452, 330]


@pytest.fixture
def scene() -> Scene:
    return make_scene(WIDE, LENGTHS, formats=FORMATS, shared=True)


def bytes_of(scene: Scene) -> torch.Tensor:
    """Returns the whole memory."""
    pool = scene.pool
    return torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(pool.bf16_pages.untyped_storage())


def written_alike(scene: Scene, write) -> None:
    """Checks that kernels leave the memory bit for bit as torch does, and that something changed."""
    memory, ops = bytes_of(scene), scene.ops(max_batch=1)
    before, left = memory.clone(), []
    for each in ops:
        memory.copy_(before)
        write(each)
        left.append(memory.clone())
    assert not torch.equal(left[1], before), "nothing was written"
    assert torch.equal(*left), f"bytes {(left[0] != left[1]).nonzero()[:4].flatten().tolist()}"


def test_decode_and_drafts(scene):
    ops, reference = scene.ops(max_batch=2)
    drafts = DraftBatch(scene.rows, scene.seq_lens, chain(2, DEVICE).expand(2, 2).contiguous())
    ops.plan_attention(scene.rows, scene.seq_lens)
    ops.plan_drafts(drafts)
    for layer, format in enumerate(FORMATS):
        q = scene.queries(2)
        got, want = (each.decode(layer, q, scene.rows, scene.seq_lens, scene.scale) for each in (ops, reference))
        assert_close(f"decode, {format}", got, want, 0.02)
        q = scene.queries(4)
        got, want = (each.verify(layer, q, drafts, scene.scale) for each in (ops, reference))
        assert_close(f"verify, {format}", got, want, 0.02)


@pytest.mark.parametrize("short", [True, False], ids=["in place", "gathered"])
def test_extend(short):
    lens = [(384, 5), (300, 3)] if short else [(384, 66), (300, 3)]
    stored = prefix_scene(WIDE, lens, formats=FORMATS, shared=True)
    check_extend(stored, lens, 0.02, layers=range(1, len(FORMATS)))  # the first layer has the last one's format


def test_new_tokens_go_to_the_pages_of_their_ids(scene):
    loc = scene.pool.req_to_token[1, : LENGTHS[0]].long()
    places = scene.pool.places.long()[loc // P]
    assert not torch.equal(places, loc // P), "ids are no pages"
    loc = loc[scene.pool.page_slot[places] > 0]  # in BF16 pages
    assert len(loc) > 2 * P
    _, k, v = activations(WIDE, len(loc))
    written_alike(scene, lambda ops: ops.store_tokens(1, loc, k, v))
    q = scene.queries(len(loc))
    written_alike(scene, lambda ops: ops.rotate_and_store(2, loc, q, k, v))
    written_alike(scene, lambda ops: ops.rotate_and_keep(0, loc, q, k, v))


def test_pages_are_quantized_where_they_lie(scene):
    pool = scene.pool
    pages = (pool.page_slot[1:] > 0).nonzero().flatten()[:3] + 1
    slots = pool.page_slot[pages].long()
    pool.bf16_pages[:, slots] = randn(*pool.bf16_pages[:, slots].shape)
    written_alike(scene, lambda ops: ops.quantize_slots(slots, pages, int64(2)))
    _, k, v = activations(WIDE, 2 * P)
    for layer in range(1, len(FORMATS)):  # the first layer has the last one's format
        written_alike(scene, lambda ops, n=layer: ops.quantize_tokens(n, int64(0, P), pages[:2], k, v))


def test_first_pages_are_restored_where_they_lie(scene):
    pool = scene.pool
    pages = pool.row_pages[1, 3:5]
    assert (pool.page_slot[pages.long()] < 0).all(), "they are records"
    taken = (pool.page_slot > 0).nonzero().flatten()[:2]
    pool.page_slot[pages.long()] = pool.page_slot[taken]
    pool.sink_cache.entry[pages[1:].long()] = 1
    pool.sink_cache.tokens.normal_()
    for each in (TritonOps(pool, LayerRotations(), WIDE.q, 1), ReferenceOps(pool, LayerRotations())):
        each.restore_pages(pages)
        if isinstance(each, TritonOps):
            got = bytes_of(scene).clone()
    assert torch.equal(got, bytes_of(scene))


def test_tokens_move_between_pages(scene):
    pool = scene.pool
    source, target = pool.row_pages[1, 2:5].long(), pool.row_pages[2, 2:4].long()
    chosen = torch.rand(len(FORMATS), WIDE.kv, 3 * P, device=DEVICE).argsort(-1)[..., : 2 * P]
    memory = bytes_of(scene)
    before = memory.clone()
    move_tokens(pool, source, target, chosen)
    got = memory.clone()
    memory.copy_(before)
    fold.fold_pages(pool, source, target, chosen)
    assert torch.equal(got, memory) and not torch.equal(got, before)


def test_a_record_knows_the_distance_to_the_next_page(scene):
    """Kernels for a pool with its own memory are compiled separately from those for a shared memory."""
    pool = scene.pool
    plain = make_scene(WIDE, [70], formats=FORMATS).pool
    assert pool.page_stride == pool.arena.page_bytes and plain.page_stride == 0
    ops, others = (TritonOps(each, LayerRotations(), WIDE.q, 1) for each in (pool, plain))
    assert all(a.page == pool.page_stride and b.page == 0 for a, b in zip(ops._records, others._records))
    assert replace(ops._records[0], page=0) is not others._records[0]
