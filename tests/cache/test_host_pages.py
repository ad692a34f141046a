"""Pages go to host memory and back bit for bit, whatever their layers' widths, and nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.host_pages import ALIGNED, HostLayout
from sglang_kvq.cache.pool import PagePool
from sglang_kvq.cache.shared.arena import Arena, padded
from sglang_kvq.constants import PAGE_SIZE
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.code import CodeFormat
from sglang_kvq.formats.page import PageFormat
from sglang_kvq.formats.planes import PlaneCode, PlaneFormat
from sglang_kvq.formats.record import RecordFormat

TWO, FOUR = PageFormat(64, 64), PageFormat(64, 64, k=CodeFormat(4), v=CodeFormat(3))
PLANES = PlaneFormat(64, PlaneCode((4, 3, 1, 0)), PlaneCode((3, 2, 2, 1)))
#: Formats of layers; with mixed formats, layers of one store are not adjacent.
FORMATS = {"two-bits": (TWO, TWO), "mixed": (TWO, FOUR, PLANES, TWO, FOUR), "planes": (PLANES,) * 3}
PAGES, HOST_PAGES, POISON = 9, 14, 0xFF
#: Page numbers, unordered; they include the first and last host page and page 1, next to the padding page.
SOURCE, THERE, BACK = [7, 1, 9, 3], [13, 2, 0, 6], [2, 5, 4, 8]


def ids(pages: list[int]) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int64)


def pool_of(formats, kv_heads: int = 3, device: str = "cpu", shared: bool = False) -> PagePool:
    """Returns a pool whose records hold random bytes; shared: they share a memory with the BF16 pages."""
    table = torch.zeros(1, PAGES * PAGE_SIZE, dtype=torch.int32, device=device)
    slots, arena = 1, None
    if shared:
        slot_bytes = 4 * len(formats) * kv_heads * PAGE_SIZE * formats[0].head_dim
        arena = Arena.smallest(padded(kv_heads * sum(f.record_bytes for f in formats)), slot_bytes, 1, PAGES)
        slots = arena.slots
    pool = PagePool.allocate(formats, kv_heads=kv_heads, pages=PAGES, slots=slots, req_to_token=table, arena=arena)
    for store in pool.stores:
        store.records.random_(POISON)  # any byte but the poison
    return pool


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.uint8)


@pytest.fixture(params=FORMATS.values(), ids=FORMATS.keys())
def formats(request) -> tuple[RecordFormat, ...]:
    return request.param


@pytest.fixture(params=[False, True], ids=["divided", "shared"])
def pool(request, formats) -> PagePool:
    torch.manual_seed(0)
    return pool_of(formats, shared=request.param)


def test_rows_have_the_bytes_of_each_layer(pool):
    layout = HostLayout(pool)
    assert layout.row_bytes == tuple(3 * format.record_bytes for format in pool.formats)
    assert layout.offsets == tuple(sum(layout.row_bytes[:i]) for i in range(pool.layers)), "no format leaves gaps"
    assert layout.page_bytes == 3 * sum(format.record_bytes for format in pool.formats)
    assert not any(start % ALIGNED for start in (*layout.offsets, layout.page_bytes))


@pytest.mark.parametrize("tail", [0, 4, 48])
def test_backup_fills_rows_and_nothing_else(pool, tail):
    layout = HostLayout(pool)
    host, before = poisoned(HOST_PAGES, layout.page_bytes + tail), [records.clone() for records in pool.records]
    layout.backup(pool, ids(SOURCE), host, ids(THERE))
    want = poisoned(HOST_PAGES, layout.page_bytes + tail)
    for page, there in zip(SOURCE, THERE):
        want[there, : layout.page_bytes] = torch.cat([records[page].flatten() for records in pool.records])
    assert torch.equal(host, want)
    assert all(torch.equal(records, old) for records, old in zip(pool.records, before))


def test_load_fills_one_layers_pages_and_nothing_else(pool):
    layout = HostLayout(pool)
    host = torch.randint(0, POISON, (HOST_PAGES, layout.page_bytes + 16), dtype=torch.uint8)
    for store in pool.stores:
        store.records.fill_(POISON)
    want, kept = [records.clone() for records in pool.records], host.clone()
    for layer in reversed(range(pool.layers)):
        layout.load_layer(pool, layer, host, ids(THERE), ids(BACK))
        start, size = layout.offsets[layer], layout.row_bytes[layer]
        for there, page in zip(THERE, BACK):
            want[layer][page] = host[there, start : start + size].view(3, -1)
        assert all(torch.equal(got, old) for got, old in zip(pool.records, want)), f"after layer {layer}"
    assert torch.equal(host, kept)


def test_pages_come_back_bit_for_bit(pool):
    """Pages are loaded into other pages of another pool with the same formats."""
    layout, other = HostLayout(pool), pool_of(pool.formats)
    host = poisoned(HOST_PAGES, layout.page_bytes)
    layout.backup(pool, ids(SOURCE), host, ids(THERE))
    for store in other.stores:
        store.records.fill_(POISON)
    for layer in range(pool.layers):
        layout.load_layer(other, layer, host, ids(THERE), ids(BACK))
    for got, want in zip(other.records, pool.records):
        assert torch.equal(got[BACK], want[SOURCE])
        assert (got[[0, 1, 3, 6, 7, 9]] == POISON).all()


def test_a_buffer_may_be_a_view_of_a_wider_one(pool):
    layout = HostLayout(pool)
    wide = poisoned(HOST_PAGES, 16 + layout.page_bytes + 32)
    layout.backup(pool, ids(SOURCE), wide[:, 16:-16], ids(THERE))
    assert (wide[:, :16] == POISON).all() and (wide[:, 16 + layout.page_bytes :] == POISON).all()
    layout.load_layer(pool, 0, wide[:, 16:], ids(THERE), ids(BACK))
    assert torch.equal(pool.records[0][BACK], pool.records[0][SOURCE])


def test_no_pages_are_no_work(pool):
    layout = HostLayout(pool)
    host = poisoned(HOST_PAGES, layout.page_bytes)
    layout.backup(pool, ids([]), host, ids([]))
    layout.load_layer(pool, 0, host, ids([]), ids([]))
    assert (host == POISON).all() and not (pool.records[0] == POISON).any()


def test_parts_are_aligned_where_records_are_not():
    """Tests record sizes that none of our formats has."""
    widths = (24, 16, 8)
    pool = SimpleNamespace(
        records=tuple(torch.randint(0, POISON, (5, 1, n), dtype=torch.uint8) for n in widths),
        device=torch.device("cpu"),
    )
    layout = HostLayout(pool)
    assert layout.row_bytes == widths and layout.offsets == (0, 32, 48) and layout.page_bytes == 64
    host, kept = poisoned(2, 64), [records.clone() for records in pool.records]
    layout.backup(pool, ids([4]), host, ids([1]))
    assert (host[1, 24:32] == POISON).all() and (host[1, 56:] == POISON).all() and (host[0] == POISON).all()
    for layer, records in enumerate(pool.records):
        layout.load_layer(pool, layer, host, ids([1]), ids([2]))
        assert torch.equal(records[2], kept[layer][4]) and torch.equal(records[3:], kept[layer][3:])


@pytest.mark.parametrize(
    "change, what",
    [
        ({"pages": torch.tensor([1, 2])[None]}, r"pages: torch.int64 \[1, 2\]; must be int64 \[n\]"),
        ({"host_pages": torch.tensor([1], dtype=torch.int32)}, r"host_pages: torch.int32 \[1\]; must be int64"),
        ({"host_pages": torch.tensor([1, 2])}, "host_pages: 2 for 1 pages; must be as many"),
        ({"host": poisoned(4, 15)}, r"host: torch.uint8 \[4, 15\].* must be uint8 \[host pages, \d+ or more\]"),
        ({"host": torch.zeros(4, 1 << 20, dtype=torch.int8)}, "host: torch.int8"),
        ({"host": poisoned(1 << 20, 4).T}, r"strides \[1, 4\]"),
        ({"layer": 2}, "layer 2: the pool has 2 layers. Choose 0 to 1"),
        ({"layer": -1}, "layer -1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, what):
    pool = pool_of([TWO, FOUR])
    layout = HostLayout(pool)
    given = {"layer": 0, "host": poisoned(4, layout.page_bytes), "host_pages": ids([1]), "pages": ids([1])} | change
    with pytest.raises(KVQuantError, match=what):
        layout.load_layer(pool, *given.values())
    if "layer" not in change:
        with pytest.raises(KVQuantError, match=what):
            layout.backup(pool, given["pages"], given["host"], given["host_pages"])


def test_a_pool_of_other_records_is_refused():
    layout, other = HostLayout(pool_of([TWO, FOUR])), pool_of([FOUR, TWO])
    with pytest.raises(KVQuantError, match="pool: its layers have .* Make a HostLayout for this pool"):
        layout.backup(other, ids([1]), poisoned(2, layout.page_bytes), ids([1]))
