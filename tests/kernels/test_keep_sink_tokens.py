"""Kernels keep first tokens and restore BF16 pages bit for bit as torch does."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.attention.base import LayerRotations
from sglang_kvq.attention.reference import ReferenceOps
from sglang_kvq.attention.triton_ops import TritonOps
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.sink_token_cache import SinkTokenCache
from sglang_kvq.constants import HEAD_DIMS
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.kernels.quantize import keep_sink_tokens as sink_cache
from tests.kernels.scene import DEVICE, int64
from tests.kernels.test_formats import make_format
from tests.kernels.test_planes import WIDTHS
from tests.kernels.test_tier_schedules import twins
from tests.pairs import each


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows no more cache entries than the number of pages gives, however small the pool is."""
    monkeypatch.setattr("sglang_kvq.cache.sink_token_cache.LEAST_ENTRIES", 0)


def planes(widths, head_dim: int = 64) -> PlaneFormat:
    return PlaneFormat(head_dim, PlaneCode(widths[0]), PlaneCode(widths[1]))


def make_pool(formats: list[RecordFormat], kv_heads: int, pages: int = 40, slots: int = 12) -> PagePool:
    """Returns a pool with random BF16 pages and with records of other random pages."""
    table = torch.zeros(1, P, dtype=torch.int32, device=DEVICE)
    pool = PagePool.allocate(formats, kv_heads=kv_heads, pages=pages, slots=slots, req_to_token=table)
    pool.bf16_pages.copy_(torch.randn(pool.bf16_pages.shape, device=DEVICE))
    drawn = torch.randn(2, pages + 1, kv_heads, P, pool.head_dim, device=DEVICE).bfloat16()
    for format, records in zip(formats, pool.records):
        records.copy_(format.quantize_pages(*drawn))
    return pool


def restore_both_ways(pool: PagePool, pages: torch.Tensor) -> None:
    before = pool.bf16_pages.clone()
    ReferenceOps(pool, LayerRotations()).restore_pages(pages)
    want = pool.bf16_pages.clone()
    assert not torch.equal(want, before)
    pool.bf16_pages.copy_(before)
    TritonOps(pool, LayerRotations(), pool.kv_heads, max_batch=1).restore_pages(pages)
    different = (pool.bf16_pages.view(torch.int16) != want.view(torch.int16)).nonzero()
    assert not len(different), f"layer, slot, K or V, head, token, dim: {different[:8].tolist()}"


@each(widths=WIDTHS, head_dim=HEAD_DIMS)
def test_bf16_pages_are_restored_from_planes(widths, head_dim):
    pool = make_pool([planes(widths, head_dim)], kv_heads=3 if head_dim == 64 else 1)
    pool.page_slot[int64(7, 9, 20)] = int64(3, 12, 1).int()
    pool.sink_cache.entry[7] = 3  # the first tokens of pages 9 and 20 come from their records
    pool.sink_cache.tokens.copy_(torch.randn(pool.sink_cache.tokens.shape, device=DEVICE))
    restore_both_ways(pool, int64(7, 0, 20, 11, 9).int())


def test_bf16_pages_are_restored_from_layers_of_different_formats():
    """Layers of one store are not adjacent in the pool; layers that need no first token are restored too."""
    narrow, wide = planes(((2, 1, 1, 0), (2, 2, 1, 1))), planes(((4, 4, 3, 1), (5, 3, 3, 1)))
    two, sphere, channel = PageFormat(64, 64), make_format("sphere-4-3", 64), make_format("channel-2", 64)
    formats = [narrow, two, wide, sphere, narrow, channel, wide]
    pool = make_pool(formats, kv_heads=2)
    pool.page_slot[int64(33, 40)] = int64(12, 5).int()
    pool.sink_cache.entry[40] = 2
    pool.sink_cache.tokens.copy_(torch.randn(pool.sink_cache.tokens.shape, device=DEVICE))
    restore_both_ways(pool, int64(33, 40))


@pytest.mark.parametrize("rows", [64, 4], ids=["as-launched", "small"])
@pytest.mark.parametrize("kv_heads, layers", [(1, 1), (3, 5)])
def test_first_tokens_are_copied_to_their_entries(kv_heads, layers, rows, monkeypatch):
    """There are more pages than programs; some have no entry, and entries beyond the count are not read."""
    monkeypatch.setattr(sink_cache, "_ROWS", rows)
    pool = make_pool([planes(WIDTHS[0])] * layers, kv_heads, pages=80)
    entries, slots = int64(3, 0, 9, 1, 2, 0, 4, 8, 7, 5, 6, 6), int64(*range(1, 13))
    want = pool.sink_cache.tokens.clone()
    want[:, entries[:10]] = pool.bf16_pages[:, slots[:10], :, :, 0]
    want[:, 0] = 0
    sink_cache.keep_sink_tokens(slots, entries.int(), int64(10), pool.bf16_pages, pool.sink_cache.tokens)
    assert torch.equal(pool.sink_cache.tokens, want) and want.any()


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("seed", range(6))
def test_pages_get_the_entries_that_they_get_in_torch(seed, block):
    """Kernels and torch agree for tables in any state: free entries or none, pages with BF16 copies or entries."""
    from tests.kernels.sink_token_kernels import place  # defined while Triton's switch is set, see conftest.py

    generator = torch.Generator().manual_seed(seed)

    def some(count: int, below: int) -> torch.Tensor:
        return torch.randperm(below, generator=generator)[:count].to(DEVICE)

    step, n = 9, 20
    tiers = twins(rows=4, pages_each=10 * 4, slots=30, format=planes(WIDTHS[0]))
    t, pool = tiers.kernels.tables.arguments, tiers.kernels.pool
    assert len(t.first_page) == n
    held = some((6, n - 1)[seed % 2], n - 1) + 1
    pages = some(60, 160) + 1
    owners, lost = pages[: len(held)], pages[len(held) - 3 :]  # three of these have an entry already
    t.first_page[held], t.sink_entry[owners] = owners.int(), held.int()
    t.first_stamp[held] = torch.randint(0, step, held.shape, generator=generator).to(DEVICE)
    t.page_slot[owners[: seed * 2]] = 1
    t.claims[held[1::3]] = 5 - (step - 1 << 31)  # claimed in the previous step
    restored = held[seed::4]
    t.claims[restored] = 5 - (step << 31)
    lost = lost[torch.randperm(len(lost), generator=generator).to(DEVICE)][: (8, 28)[seed // 3]]
    t.lost_pages[: len(lost)] = lost

    want = SinkTokenCache(
        pool.sink_cache.tokens.clone(), *(x.clone() for x in (t.first_page, t.sink_entry, t.first_stamp))
    )
    spared = torch.zeros(n, dtype=torch.bool, device=DEVICE)
    spared[restored] = True
    tokens = torch.zeros(1, len(lost), 2, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    want.keep(lost, lost > 0, tokens, t.page_slot, step, spared)
    place[(1,)](t, len(lost), step, BLOCK=block)
    for got, table in ((t.first_page, want.pages), (t.sink_entry, want.entry), (t.first_stamp, want.stamp)):
        assert torch.equal(got, table)
    assert torch.equal(t.lost_entries[: len(lost)].long(), want.entries(lost))


def test_requests_of_a_batch_share_what_is_restored(monkeypatch):
    """Requests may be in any block of rows; the first request claims the restored page, as in torch."""
    monkeypatch.setattr("sglang_kvq.kernels.tiers.bf16_pages._ELEMENTS", 16)
    tiers = twins(rows=6, pages_each=8, slots=40, format=planes(WIDTHS[0]))
    none = torch.empty(0, dtype=torch.int64)
    rows = torch.arange(1, 7)
    tiers.plan_extend(rows[:2], rows[:2] * 0, rows[:2] * 0 + 5 * P, 0, none)
    table = tiers.pool.req_to_token
    pages = table[:, ::P].long() // P
    for row in (3, 4, 5, 6):  # these rows hit the prefixes of the first two
        table[row, : 5 * P] = table[2 - row % 2, : 5 * P]
    tiers.pending.free_rows([1, 2])
    tiers.apply_pending()
    for manager in (tiers, tiers.kernels):  # other pages took their BF16 copies
        gone = pages[1:3, 0].to(manager.slot_page.device)
        first = manager.pool.bf16_pages[:, manager.pool.page_slot[gone].long(), :, :, 0]
        manager.slot_page[manager.pool.page_slot[gone].long()] = 0
        manager.pool.page_slot[gone] = -1
        manager.pool.sink_cache.keep(gone, gone > 0, first, manager.pool.page_slot, manager.steps)
        manager.page_valid[pages[1:3, :5].flatten().to(manager.slot_page.device)] = True
    kept = [int(page) for page in pages[1:3, 0] if tiers.pool.sink_cache.kept(page.view(1))]
    assert kept
    tiers.plan_extend(rows[2:], rows[2:] * 0 + 5 * P, rows[2:] * 0 + 6 * P, 5 * P, none)
    assert [page for page in tiers.to_restore if page] == kept
    assert int(tiers.errors) == 0 and (tiers.pool.page_slot[kept] > 0).all()
