"""Pools with different layers: stores by layout, clip ranks as data, sizes that add up, and attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.methods import METHOD_NAMES, get_method

NARROW = PageFormat(64, 64, 0.9, 0.95)
WIDE_K = replace(NARROW, k=CodeFormat(4), clip_k=1.0)
FORMATS = (NARROW, WIDE_K, replace(NARROW, clip_k=0.96), WIDE_K, NARROW)


def pool_of(formats, pages: int = 6, rows: int = 2) -> PagePool:
    table = torch.zeros(rows, pages * PAGE_SIZE, dtype=torch.int32)
    return PagePool.allocate(formats, kv_heads=2, pages=pages, slots=pages, req_to_token=table)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_layers_share_a_store_by_layout_not_by_clip():
    pool = pool_of(FORMATS)
    assert [store.layers for store in pool.stores] == [(0, 2, 4), (1, 3)]
    assert [store.layer_ids.tolist() for store in pool.stores] == [[0, 2, 4], [1, 3]]
    assert pool.ranks.tolist() == [[f.rank_k, f.rank_v] for f in FORMATS]
    for store in pool.stores:
        assert store.format == store.format.layout and store.records.shape == (
            len(store.layers),
            7,
            2,
            store.format.record_bytes,
        )
        for view, layer in zip(store.records, store.layers):
            assert pool.records[layer].data_ptr() == view.data_ptr() and pool.formats[layer].layout == store.format


def test_geometry_counts_every_layers_own_bytes():
    geometry, pool = KVGeometry(2, FORMATS), pool_of(FORMATS)
    assert geometry.page_bytes == sum(store.records[:, 0].numel() for store in pool.stores)
    assert geometry.slot_bytes == pool.bf16_pages[:, 0].numel() * 2
    assert geometry.record_bits_per_element == pytest.approx(sum(f.bits_per_element for f in FORMATS) / 5)
    assert geometry.page_bytes % PAGE_SIZE == 0, "SGLang counts bytes per token"


def test_planes_share_a_store_by_their_widths_and_are_counted():
    narrow, wide = (PlaneFormat(64, PlaneCode(k), PlaneCode((2, 1, 1, 0))) for k in ((2, 1, 1, 0), (4, 4, 3, 1)))
    formats = (narrow, wide, narrow)
    pool, geometry = pool_of(formats), KVGeometry(2, formats)
    assert [store.layers for store in pool.stores] == [(0, 2), (1,)] and pool.ranks.tolist() == [[0, 0]] * 3
    assert geometry.record_bytes == sum(store.records[:, 0].numel() for store in pool.stores)
    assert geometry.page_bytes - geometry.record_bytes == pool.sink_cache.tokens[:, 0].nbytes // 8, (
        "eight pages share one"
    )
    assert geometry.record_bits_per_element == pytest.approx((4 * 5 + 12) / 4 / 6 + 8 / 64)


def test_bf16_pages_become_records_of_each_layers_own_format():
    pool = pool_of(FORMATS)
    pool.bf16_pages.copy_(rows(*pool.bf16_pages.shape))
    slots, pages = torch.tensor([3, 1, 2]), torch.tensor([2, 5, 4])
    ReferenceOps(pool, LayerRotations()).quantize_slots(slots, pages, torch.tensor([2]))
    for layer, format in enumerate(FORMATS):
        want = torch.zeros_like(pool.records[layer])
        want[[2, 5]] = format.quantize_pages(*pool.bf16_pages[layer, [3, 1]].unbind(1))
        assert torch.equal(pool.records[layer], want)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_decode_and_prefill_read_what_was_written(name):
    """Attention over records, through the backend's own calls, equals attention over their decoded values."""
    if get_method(name).planes:
        format = PlaneFormat(64, PlaneCode((4, 3, 1, 0)), PlaneCode((3, 2, 2, 1)))
    else:
        k_code, v_code = get_method(name).codes(get_method(name).widths[0])
        format = PageFormat(64, 64, k=k_code, v=v_code)
    pool = pool_of([format] * 2)
    pool.req_to_token[1] = torch.arange(6 * PAGE_SIZE) + PAGE_SIZE
    pool.read_rows()
    ops, length = ReferenceOps(pool, LayerRotations()), 4 * PAGE_SIZE
    k, v = rows(length, 2, 64), rows(length, 2, 64, seed=1)
    pool.row_history_end[1] = length
    ops.quantize_tokens(1, torch.arange(4) * PAGE_SIZE, torch.arange(1, 5), k, v)
    pages = (x.unflatten(0, (4, PAGE_SIZE)).transpose(1, 2) for x in (k, v))  # [page, head, token, D]
    k_back, v_back = (x.transpose(1, 2).flatten(0, 1) for x in format.dequantize_pages(format.quantize_pages(*pages)))
    q = rows(1, 4, 64, seed=2)
    got = ops.decode(1, q, torch.tensor([1]), torch.tensor([length]), 0.125)
    scores = torch.einsum("hd,nhd->hn", q[0].float(), k_back.bfloat16().float().repeat_interleave(2, 1)) * 0.125
    want = torch.einsum("hn,nhd->hd", scores.softmax(-1), v_back.bfloat16().float().repeat_interleave(2, 1))
    assert (got[0].float() - want).norm() < 0.01 * want.norm()
