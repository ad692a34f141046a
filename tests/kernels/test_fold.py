"""The kernel moves tokens between pages bit for bit as the reference does, for every layout."""

from __future__ import annotations

import torch

from sglang_kvq.cache import fold
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import HEAD_DIMS
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.kernels.device.codes import record_of
from sglang_kvq.kernels.quantize.fold_tokens import fold_pages
from tests.kernels.scene import DEVICE
from tests.kernels.test_formats import KINDS, make_format
from tests.kernels.test_planes import WIDTHS
from tests.pairs import each

MOVED = [kind for kind in KINDS if make_format(kind, 128).per_token]


def random_pool(formats: list[RecordFormat], kv_heads: int, pages: int) -> PagePool:
    """Returns a pool with random bytes in every record, because each bit belongs to some token."""
    table = torch.zeros(1, P, dtype=torch.int32, device=DEVICE)
    pool = PagePool.allocate(formats, kv_heads=kv_heads, pages=pages, slots=1, req_to_token=table)
    for records in pool.records:
        records.random_(256)
    return pool


def draw(shape: tuple[int, int, int], sources: int) -> torch.Tensor:
    """Draws distinct tokens for each layer and head, in any order."""
    layers, heads, count = shape
    drawn = [torch.randperm(sources * P)[:count] for _ in range(layers * heads)]
    return torch.stack(drawn).view(shape).to(DEVICE)


def compare(formats: list[RecordFormat], kv_heads: int = 1, sources: int = 3, targets: int = 2) -> None:
    pool = random_pool(formats, kv_heads, sources + targets + 1)
    ids = (torch.randperm(pool.pages) + 1).to(DEVICE)
    source, target = ids[:sources], ids[sources : sources + targets]
    tokens = draw((len(formats), kv_heads, targets * P), sources)
    before = [records.clone() for records in pool.records]
    fold.fold_pages(pool, source, target, tokens)
    want = [records.clone() for records in pool.records]
    for records, old in zip(pool.records, before):
        records.copy_(old)
        records[target] = 0xAA  # the kernel must not read these pages
    for store in pool.stores:
        fold_pages(store.records, record_of(store.format), store.layer_ids, source, target, tokens, pool.head_dim)
    for layer, (got, right) in enumerate(zip(pool.records, want)):
        assert torch.equal(got, right), f"layer {layer}: bytes {(got != right).nonzero()[:8].tolist()}"


@each(kind=MOVED, head_dim=HEAD_DIMS)
def test_codes(kind, head_dim):
    compare([make_format(kind, head_dim)], kv_heads=2 if head_dim == 96 else 1)


@each(widths=WIDTHS, head_dim=HEAD_DIMS)
def test_planes(widths, head_dim):
    compare([PlaneFormat(head_dim, PlaneCode(widths[0]), PlaneCode(widths[1]))], kv_heads=2 if head_dim == 96 else 1)


def test_layers_of_different_layouts():
    """Layers of one store are not adjacent in the pool; each layer and head has its own choice of tokens."""
    narrow, planes = PageFormat(64, 64, 0.96, 0.92), PlaneFormat(64, PlaneCode((4, 3, 1, 0)), PlaneCode((2, 1, 1, 0)))
    wide = make_format("uniform-3-3", 64)
    compare([narrow, wide, planes, narrow, planes, wide], kv_heads=3, sources=5, targets=4)


def test_every_token_of_the_sources_in_their_order_is_a_copy():
    pool = random_pool([make_format("sphere-4-3", 64)], 2, 6)
    (store,), source, target = pool.stores, torch.tensor([4, 1, 6]), torch.tensor([2, 5, 3])
    tokens = torch.arange(3 * P).expand(1, 2, -1).contiguous()
    on = [x.to(DEVICE) for x in (source, target, tokens)]
    fold_pages(store.records, record_of(store.format), store.layer_ids, *on, pool.head_dim)
    assert torch.equal(pool.records[0][on[1]], pool.records[0][on[0]])
