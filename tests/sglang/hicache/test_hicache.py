"""Pages move between device and host; the tiers are real, and SGLang's queues are stand-ins."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.pending import FreedPages
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.sglang import runtime
from tests.cache.scheduler_model import PLANES, TWO_BITS, Model
from tests.cache.schedules import shared_model
from tests.cache.test_sink_token_cache import again, prompt
from tests.cache.test_tiers import prefill

RATIO = 2.0


def indices(pages: list[int]) -> torch.Tensor:
    """Returns the indices of these pages' tokens, as SGLang numbers them."""
    return (torch.tensor(pages)[:, None] * P + torch.arange(P)).flatten()


class Controller(SimpleNamespace):
    """Stand-in for SGLang's cache controller, with its queues and its order: our hook, then the copies."""

    def __init__(self, m: Model) -> None:
        from sglang_kvq.sglang.hicache.host_pool import KVQuantHostPool

        sizes = dict(start_layer=0, end_layer=1, ratio=RATIO, size=0, allocator_type="default", pool_label="kv")
        self.host = KVQuantHostPool(m.tiers, tag="kvq-test", **sizes)
        super().__init__(write_queue=[], load_queue=[], load_fence_stream=None)
        self.mem_pool_host = SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=self.host))
        self.storage_host_pool, self.storage_backend, self.page_size = self.host, None, P

    def write(self, *nodes: tuple[list[int], list[int]]) -> None:
        """Copies pages of tree nodes to host rows."""
        from sglang_kvq.sglang.hicache.transfers import before_start_writing

        self.write_queue = [_operation(*_words(node)) for node in nodes]
        before_start_writing(self)
        host, device = _merged(self.write_queue)
        self.write_queue = []
        self.host.backup_from_device_all_layer(None, host, device, "kernel")

    def load(self, *nodes: tuple[list[int], list[int]]) -> None:
        from sglang_kvq.sglang.hicache.transfers import before_start_loading

        self.load_queue = [_operation(*_words(node)) for node in nodes]
        before_start_loading(self)
        host, device = _merged(self.load_queue)
        self.load_queue = []
        for layer in range(self.host.layer_num):
            self.host.load_to_device_per_layer(None, host, device, layer, "kernel")


def _operation(pages: list[int] | SimpleNamespace, rows: list[int] = ()) -> SimpleNamespace:
    return (
        pages
        if isinstance(pages, SimpleNamespace)
        else SimpleNamespace(device_indices=indices(pages), host_indices=indices(rows))
    )


def _words(node) -> tuple:
    return node if isinstance(node, tuple) else (node,)


def _merged(queue: list[SimpleNamespace]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([o.host_indices for o in queue]), torch.cat([o.device_indices for o in queue])


def pages_in_tree(m: Model, text: list[int]) -> list[int]:
    return [m.tree[tuple(text[:end])] for end in range(P, len(text) + 1, P) if tuple(text[:end]) in m.tree]


def evicted(m: Model, text: list[int]) -> None:
    """Evicts all pages, so that the tree forgets a conversation; SGLang keeps its node on the host."""
    m.evict(len(m.tree))
    assert not pages_in_tree(m, text)


def loaded(m: Model, controller: Controller, text: list[int], rows: list[int]) -> list[int]:
    """Loads the conversation's pages from the host into free device pages, and returns these."""
    pages = m.take_pages(len(rows))
    controller.load((pages, rows))
    for i, page in enumerate(pages):
        m.tree[tuple(text[: (i + 1) * P])] = page
        m.used[tuple(text[: (i + 1) * P])] = m.clock
    m.begun[pages[0]] = True
    return pages


def test_a_conversation_comes_back_as_it_was(m, controller):
    """A conversation comes back with the bytes that were written: codes, and first tokens where they are kept."""
    text = prompt(1)
    m.leave(prefill(m, text), publish=True)
    pages = pages_in_tree(m, text)
    assert len(pages) == 5
    assert not bool(m.tiers.page_valid[pages].all()), "the setting: some pages exist in BF16 only"
    before = m.pool.page_slot[pages].clone()
    controller.write((pages, [3, 9, 2, 7, 5]))
    assert bool(m.tiers.page_valid[pages].all()) and torch.equal(m.pool.page_slot[pages], before)
    records = m.pool.records[0][pages].clone()

    evicted(m, text)
    back = loaded(m, controller, text, [3, 9, 2, 7, 5])
    assert set(back).isdisjoint(pages)
    assert torch.equal(m.pool.records[0][back], records)
    request = again(m, text)
    m.check()
    assert int(m.tiers.errors) == 0
    first = int(m.pool.page_slot[back[0]]) > 0
    assert first is (m.tiers.sink_cache is not None), "a first token that came along has its BF16 page again"
    assert m.restored == first
    m.leave(request, publish=True)


@pytest.mark.parametrize("format", [TWO_BITS, PLANES], ids=["two bits", "first tokens"])
def test_a_conversation_comes_back_to_a_shared_memory(format, monkeypatch):
    """SGLang names pages by ids, which are not their places in a memory that BF16 pages share."""
    m = shared_model(random.Random(0), rows=2, recent=2, sinks=1, format=format)
    monkeypatch.setattr(runtime, "_current", SimpleNamespace(tiers=m.tiers))
    m.free.reverse()
    controller, text, rows = Controller(m), prompt(1), [3, 9, 2, 7, 5]
    m.leave(prefill(m, text), publish=True)
    ids = torch.tensor(pages_in_tree(m, text))
    controller.write((ids.tolist(), rows))
    pages = m.tiers.pages_of(ids)
    assert not (pages == ids).any() and bool(m.tiers.page_valid[pages].all())
    records = m.pool.records[0][pages].clone()
    evicted(m, text)
    back = m.tiers.pages_of(torch.tensor(loaded(m, controller, text, rows)))
    assert torch.equal(m.pool.records[0][back], records)
    request = again(m, text)  # reads all of it and compares
    m.check()
    assert int(m.tiers.errors) == 0 and m.restored == (m.tiers.sink_cache is not None)
    m.leave(request, publish=True)


def test_copies_of_pages_wait_for_loads(m, controller, monkeypatch):
    """While a load is queued, copies must be tried again later; the layers' stream waits for loads that have begun."""
    from sglang_kvq.sglang.hicache import transfers

    others = SimpleNamespace(mem_pool_host=None, load_queue=[1])
    assert transfers.wait_for_loads(others), "pages of another pool"
    waited = []
    controller.ack_load_queue = [SimpleNamespace(finish_event="one"), SimpleNamespace(finish_event="other")]
    controller.load_queue = [_operation([1], [1])]
    assert not transfers.wait_for_loads(controller)
    controller.load_queue = []
    assert transfers.wait_for_loads(controller), "on a CPU copies have ended when they return"
    pool = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(runtime, "_current", SimpleNamespace(tiers=SimpleNamespace(pool=pool)))
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(transfers, "_stream_of_layers", lambda controller: stream)
    assert transfers.wait_for_loads(controller) and waited == ["one", "other"]


@pytest.mark.parametrize("way", ["write", "load"])
def test_moves_of_pages_wait_for_copies_in_both_directions(way, monkeypatch):
    """On a GPU the stream that runs plans waits for SGLang's two streams of copies, once there has been a copy."""
    m = shared_model(random.Random(0), rows=2, recent=2, sinks=1)
    monkeypatch.setattr(runtime, "_current", SimpleNamespace(tiers=m.tiers))
    controller, text = Controller(m), prompt(1)
    m.leave(prefill(m, text), publish=True)
    if way == "write":
        controller.write((pages_in_tree(m, text), [3, 9, 2, 7, 5]))
    else:
        controller.load((m.take_pages(5), [3, 9, 2, 7, 5]))
    waited: list[str] = []
    controller.l2_transfer_engine = SimpleNamespace(device_to_host_stream="out", host_to_device_stream="in")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=waited.append))
    m.tiers.wait_for_copies()
    assert waited == [], "on a CPU copies have ended when they return"
    pool = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(runtime, "_current", SimpleNamespace(tiers=SimpleNamespace(pool=pool)))
    m.tiers.wait_for_copies()
    assert sorted(waited) == ["in", "out"]


def test_first_tokens_come_from_where_they_are(m, controller):
    """A first token is copied from the BF16 copy, or from where it is kept without one; other pages store none."""
    if m.tiers.sink_cache is None:
        assert controller.host.page.token_bytes == 0
        return
    from tests.cache.test_sink_token_cache import idle

    fresh, old = prompt(1), prompt(2)
    row = m.tiers.pool.bf16_pages
    idle_page = idle(m, old)
    m.leave(prefill(m, fresh), publish=True)
    page, second, third = pages_in_tree(m, fresh)[:3]
    want = row[:, int(m.pool.page_slot[page]), :, :, 0].clone()
    kept = m.tiers.sink_cache.tokens[:, int(m.tiers.sink_cache.entry[idle_page])].clone()
    controller.host.kv_buffer.fill_(0xAA)  # any old content
    controller.write(([page, second], [4, 6]), ([third], [7]), ([idle_page], [8]))
    page_of, buffer = controller.host.page, controller.host.kv_buffer
    assert [page_of.has_token(buffer, i) for i in (4, 6, 7, 8)] == [True, False, False, True]
    assert torch.equal(page_of.token_of(buffer, 4), want)
    assert torch.equal(page_of.token_of(buffer, 8), kept)


def test_recorded_events_come_first(m, controller):
    """A page that was freed and is allocated for a load before any plan has lost its record and its BF16 copy."""
    text = prompt(1)
    m.leave(prefill(m, text), publish=True)
    pages = pages_in_tree(m, text)
    controller.write((pages, [1, 2, 3, 4, 5]))
    evicted(m, text)
    m.free = sorted(m.free, key=pages.__contains__, reverse=True)  # hands out the same pages again
    assert any(isinstance(event, FreedPages) for event in m.tiers.pending._events)
    back = loaded(m, controller, text, [1, 2, 3, 4, 5])
    assert set(back) == set(pages) and not m.tiers.pending and int(m.tiers.errors) == 0
    assert not bool((m.pool.page_slot[back] > 0).any()) and bool(m.tiers.page_valid[back].all())
    again(m, text)
    m.check()


def test_a_page_that_counts_as_quantized_is_not_loaded_into(m, controller):
    text = prompt(1)
    m.leave(prefill(m, text), publish=True)
    pages = pages_in_tree(m, text)
    controller.write((pages, [1, 2, 3, 4, 5]))
    controller.load((pages[:1], [1]))
    assert int(m.tiers.errors) == 1


def test_operations_without_pages_of_ours_move_nothing(m, controller):
    """SGLang also queues operations for windows alone, between others or by themselves; they move no page."""
    text, none = prompt(1), SimpleNamespace(device_indices=indices([1])[:0], host_indices=indices([1])[:0])
    m.leave(prefill(m, text), publish=True)
    pages = pages_in_tree(m, text)
    controller.write((pages, [1, 2, 3, 4, 5]))
    kept = controller.host.kv_buffer.clone()
    for way in ("write", "load"):
        getattr(controller, way)(none)
        assert torch.equal(controller.host.kv_buffer, kept)
    evicted(m, text)
    back = m.take_pages(5)
    controller.load(none, (back, [1, 2, 3, 4, 5]))
    assert bool(m.tiers.page_valid[back].all()) and int(m.tiers.errors) == 0
    controller.write(none, (back[:2], [6, 7]))
    assert torch.equal(
        controller.host.kv_buffer[6, : m.pool.records[0][0].nbytes], kept[1, : m.pool.records[0][0].nbytes]
    )


@pytest.mark.parametrize("way", ["write", "load"])
def test_nothing_moves_while_a_window_moves(m, controller, way):
    ticket = m.tiers.pending.reserve_move()
    with pytest.raises(KVQuantError, match="an insertion into the tree is under way"):
        getattr(controller, way)(([1], [1]))
    m.tiers.pending.fill_move(ticket, torch.tensor([1]), torch.tensor([2]))
    assert not m.tiers.pending.has_open_move


def test_other_pools_are_left_alone(m):
    from sglang_kvq.sglang.hicache import transfers

    other = SimpleNamespace(mem_pool_host=SimpleNamespace(), write_queue=[1], load_queue=[1])
    transfers.before_start_writing(other)
    transfers.before_start_loading(other)


def test_sizes(m, controller):
    page = controller.host.page
    assert controller.host.size == m.pool.pages * RATIO * P + P
    assert page.page_bytes % 4096 == 0
    assert controller.host.get_size_per_token() * P == controller.host.get_ksize_per_token() * P == page.page_bytes
    pointers, sizes = controller.host.get_page_buffer_meta(indices([2, 5]))
    assert sizes == [page.page_bytes] * 2 and pointers[1] - pointers[0] == 3 * page.page_bytes


def test_rows_are_aligned_only_if_the_first_is(controller):
    """Direct I/O fails at other addresses; NIXL copies instead."""
    memory = torch.empty(3 * 4096, dtype=torch.uint8)
    begin = -memory.data_ptr() % 4096
    for offset, aligned in ((begin, True), (begin + 64, False)):
        controller.host.kv_buffer = memory[offset : offset + 4096]
        assert controller.host.is_stride_page_aligned(4096) is aligned


# -- where SGLang builds its host pools --------------------------------------------------------------------------------


@pytest.fixture
def device_pool(m):
    from sglang_kvq.sglang.memory.pool import KVQuantPool

    pool = KVQuantPool.__new__(KVQuantPool)
    pool.layout = SimpleNamespace(pages=m.pool.pages)
    return pool


def test_host_memory_is_sized_by_host_pages(m, controller, device_pool):
    from sglang_kvq.sglang.hicache.build import estimate_bytes

    def params(pool) -> SimpleNamespace:
        return SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool))

    ours = m.pool.pages * controller.host.page.page_bytes
    assert estimate_bytes(None, params(device_pool), None) == ours
    # The host has a place for a draft of each page, although the draft's own pool may have fewer.
    device_pool.size = 600
    draft = SimpleNamespace(size=200, get_kv_size_bytes=lambda: (1000, 500))
    both = SimpleNamespace(full_kv_pool=device_pool, swa_kv_pool=draft, size=600)
    assert estimate_bytes(None, params(both), None) == ours + 1500, "windows have as many places as on the device"
    assert estimate_bytes(None, params(device_pool), SimpleNamespace(device_pools=())) == ours
    assert estimate_bytes(None, params(device_pool), SimpleNamespace(device_pools=(draft,))) == ours + 4500
    other = params("another pool")
    assert estimate_bytes(lambda given, plan: (given is other, plan), other, "plan") == (True, "plan")


def test_other_caches_get_their_own_host_pool_and_drafts_no_part_of_ours(device_pool):
    from sglang_kvq.sglang.hicache.build import around_packing, build_kv_host_pool

    given = dict(page_size=P, host_size=None, mtp_draft_device_pools=(), pool_label="kv", use_mla=False)
    assert build_kv_host_pool(lambda **kwargs: kwargs, kv_pool="other", **given) == {"kv_pool": "other", **given}
    assert around_packing(lambda *args: True, "NEXTN", ("runner",)) is False
    with pytest.raises(RuntimeError, match="SGLang wants to store draft layers in our host pages"):
        build_kv_host_pool(None, kv_pool=device_pool, page_size=P, mtp_draft_device_pools=("draft",))
