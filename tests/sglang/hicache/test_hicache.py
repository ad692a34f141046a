"""Pages move between device, host and storage; the tiers are real, and SGLang's queues are stand-ins."""

from __future__ import annotations

import errno
import random
import threading
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.cache.pending import FreedPages
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.page import PageFormat
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


# -- storage -----------------------------------------------------------------------------------------------------------


def stored(controller: Controller, keys: list[str], rows: list[int]) -> dict[str, torch.Tensor]:
    """Returns the contents of storage after SGLang wrote these rows."""
    from sglang_kvq.sglang.hicache.storage import before_page_set

    before_page_set(controller, keys, indices(rows))
    return {key: controller.host.get_data_page(row * P).clone() for key, row in zip(keys, rows)}


def fetch(controller: Controller, found: dict[str, torch.Tensor], keys: list[str], rows: list[int]) -> int:
    """Returns how many pages come; ``original`` reads one after another, as SGLang's function does."""
    from sglang_kvq.sglang.hicache.storage import around_page_get

    def original(self, operation, hashes, places):
        for i, key in enumerate(hashes):
            if key not in found:
                raise OSError(errno.EIO, "Input/output error")
            if len(found[key]) != controller.host.page.page_bytes:
                raise OSError("Short read")
            self.storage_host_pool.set_from_flat_data_page(int(places[i * P]), found[key])
        return len(hashes)

    return around_page_get(original, controller, None, keys, indices(rows))


KEYS = ["a", "b", "c", "d"]


@pytest.fixture
def found(m, controller) -> dict[str, torch.Tensor]:
    m.leave(prefill(m, prompt(1)), publish=True)
    controller.write((pages_in_tree(m, prompt(1))[:4], [1, 2, 3, 4]))
    return stored(controller, KEYS, [1, 2, 3, 4])


def test_stored_pages_come_back(controller, found):
    assert fetch(controller, found, KEYS, [6, 7, 8, 9]) == 4
    assert controller.host.damaged_pages == 0
    assert torch.equal(controller.host.kv_buffer[6:10], controller.host.kv_buffer[1:5])


@pytest.mark.parametrize(
    "damage", ["first bit", "last byte", "top bits of two words", "two words exchanged", "zeros", "another page"]
)
def test_a_damaged_page_is_a_miss(controller, found, damage, caplog):
    page = found["c"]
    if damage == "first bit":
        page[0] ^= 1
    elif damage == "last byte":
        page[-1] ^= 0x80
    elif damage == "top bits of two words":
        page[[807, 1607]] ^= 0x80
    elif damage == "two words exchanged":
        words = page.view(torch.int64)
        different = int((words != words[0]).nonzero()[0])
        words[[0, different]] = words[[different, 0]]
    elif damage == "zeros":
        page.zero_()
    else:
        page.copy_(found["d"])
    assert fetch(controller, found, KEYS, [6, 7, 8, 9]) == 2
    assert controller.host.damaged_pages == 1 and "page c of the storage is damaged" in caplog.text


def test_a_damaged_page_that_cannot_be_removed_is_a_miss_and_the_pages_before_it_are_not(controller, found, caplog):
    """Storage may be mounted read-only."""

    def remove(key: str) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system", key)

    controller.host.remove_stored = remove
    found["c"][0] ^= 1
    assert fetch(controller, found, KEYS, [6, 7, 8, 9]) == 2
    assert controller.host.damaged_pages == 1 and "page c stays in the storage: " in caplog.text


def test_a_short_file_is_a_miss_and_the_pages_before_it_are_not(controller, found):
    found["c"] = found["c"][:100]
    assert fetch(controller, found, KEYS, [6, 7, 8, 9]) == 2
    assert controller.host.damaged_pages == 1


def test_a_file_that_cannot_be_read_is_a_miss_and_the_pages_before_it_are_not(controller, found, caplog):
    del found["c"]
    assert fetch(controller, found, KEYS, [6, 7, 8, 9]) == 2
    assert controller.host.damaged_pages == 0 and "page c of the storage cannot be read" in caplog.text


def test_an_error_of_the_system_is_not_a_damaged_page(controller, caplog):
    """After an error of the operating system the file is kept, because it may be readable next time."""
    from sglang_kvq.sglang.hicache.storage import around_page_get

    def original(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    assert around_page_get(original, controller, None, ["a"], indices([1])) == 0
    assert controller.host.damaged_pages == 0 and "Too many open files" in caplog.text


def test_files_are_read_at_the_same_time(controller, found):
    """Each reader waits for all others, so one reader after another would never end."""
    from sglang_kvq.sglang.hicache.storage import around_page_get

    controller.host.readers = len(KEYS)
    together = threading.Barrier(len(KEYS), timeout=20)

    def original(self, operation, hashes, places):
        together.wait()
        for i, key in enumerate(hashes):
            page = self.storage_host_pool.get_dummy_flat_data_page().copy_(found[key])
            self.storage_host_pool.set_from_flat_data_page(int(places[i * P]), page)
        return len(hashes)

    assert around_page_get(original, controller, None, KEYS, indices([6, 7, 8, 9])) == len(KEYS)
    assert torch.equal(controller.host.kv_buffer[6:10], controller.host.kv_buffer[1:5])


def test_each_thread_reads_into_rows_of_its_own(controller):
    """A page is read into its row of host memory; only pages that nobody announced get new memory."""
    host, rows = controller.host, controller.host.kv_buffer
    inside = threading.Barrier(2, timeout=20)
    seen: dict[int, list[int]] = {}

    def reader(pages: list[int]) -> None:
        with host.reading(pages):
            inside.wait()
            seen[pages[0]] = [host.get_dummy_flat_data_page().data_ptr() for _ in pages]
            inside.wait()

    threads = [threading.Thread(target=reader, args=(pages,)) for pages in ([4, 2], [3, 5])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {first: [rows[page].data_ptr() for page in (first, second)] for first, second in ((4, 2), (3, 5))}
    begin, end = rows.data_ptr(), rows.data_ptr() + rows.numel()
    assert not begin <= host.get_dummy_flat_data_page().data_ptr() < end


def test_rows_that_storage_fills_in_another_order_are_damaged_pages(controller, found):
    """Storage that fills rows in another order overwrites some; their checksums then differ, so nobody reads them."""
    from sglang_kvq.sglang.hicache.storage import around_page_get

    def original(self, operation, hashes, places):
        pages = [self.storage_host_pool.get_dummy_flat_data_page() for _ in hashes]
        for page, key in zip(reversed(pages), hashes):
            page.copy_(found[key])
        for i, page in enumerate(reversed(pages)):
            self.storage_host_pool.set_from_flat_data_page(int(places[i * P]), page)
        return len(hashes)

    assert around_page_get(original, controller, None, KEYS, indices([6, 7, 8, 9])) == 2
    assert torch.equal(controller.host.kv_buffer[6:8], controller.host.kv_buffer[1:3])
    assert controller.host.damaged_pages == 1


@pytest.mark.parametrize("readers", [1, 2, 3, 8])
@pytest.mark.parametrize("bad", [(0,), (1,), (1, 2), (3,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("how", ["damaged", "short", "unreadable"])
def test_readers_agree_on_the_first_gap(controller, found, readers, bad, how):
    """However many read, only the pages before the first gap count; a reader may find damage after it, too."""
    controller.host.readers = readers
    for place in bad:
        key = KEYS[place]
        if how == "damaged":
            found[key][0] ^= 1
        elif how == "short":
            found[key] = found[key][:100]
        else:
            del found[key]
    assert fetch(controller, found, KEYS, [6, 7, 8, 9]) == bad[0]
    assert torch.equal(controller.host.kv_buffer[6 : 6 + bad[0]], controller.host.kv_buffer[1 : 1 + bad[0]])
    assert controller.host.damaged_pages in (range(1) if how == "unreadable" else range(1, len(bad) + 1))


@pytest.mark.parametrize("more", [{}, {"enable_metadata_cache": True}], ids=["plain", "remembered"])
def test_a_damaged_file_is_removed(controller, found, tmp_path, more):
    """If the file remained, or SGLang remembered it, SGLang would never write it again."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    from sglang_kvq.sglang.hicache.stores import after_create

    rank = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False)
    config = HiCacheStorageConfig(
        **rank,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="a/model-kvq-test",
        extra_config=more,
    )
    backend = HiCacheFile(config, str(tmp_path))
    after_create(backend, None, "file", config, controller.host)
    assert backend.batch_set(KEYS, [found[key] for key in KEYS])
    (damaged,) = tmp_path.glob("c_*.bin")
    damaged.write_bytes(bytes(controller.host.page.page_bytes))
    assert [backend.exists(key) for key in KEYS] == [True] * 4
    sound = found["c"].clone()
    found["c"].zero_()
    assert fetch(controller, found, KEYS, [6, 7, 8, 9]) == 2
    assert [backend.exists(key) for key in KEYS] == [True, True, False, True]
    assert backend.set("c", sound) and damaged.read_bytes() == sound.numpy().tobytes()


def state(**changes) -> SimpleNamespace:
    """Returns a worker's state: all that a page's bytes depend on."""
    config = KVQuantConfig(changes.pop("method", "oscar"), seed=changes.pop("seed", None))
    formats = changes.pop("formats", (PageFormat(64, 64, 0.96, 0.92),) * 2)
    geometry = KVGeometry(changes.pop("kv_heads", 2), formats)
    status = {"rotations_sha256": changes.pop("sha", "ab12"), "rotations": changes.pop("folder", "/one")}
    return SimpleNamespace(config=config, geometry=geometry, status=status, layer_ids=changes.pop("layers", (0, 1)))


def test_names_differ_with_all_that_the_bytes_depend_on():
    from sglang_kvq.sglang.hicache.storage import format_tag

    tag = format_tag(state(), False)
    assert tag.startswith("kvq2-oscar-") and len(tag) < 40, "file names have 255 characters"
    assert tag == format_tag(state(folder="/two"), False), "the same rotations in another folder"
    assert format_tag(state(method="turboquant", seed=0), False) == format_tag(state(method="turboquant"), False)
    others = [
        format_tag(state(), True),
        format_tag(state(method="hadamard"), False),
        format_tag(state(method="turboquant", seed=1), False),
        format_tag(state(method="turboquant"), False),
        format_tag(state(method="turboquant", seed=2), False),
        format_tag(state(sha="cd34"), False),
        format_tag(state(kv_heads=1), False),
        format_tag(state(layers=(2, 3)), False),
        format_tag(state(formats=(PageFormat(64, 64, 0.96, 0.93),) * 2), False),
        format_tag(state(formats=(PageFormat(64, 32, 0.96, 0.92),) * 2), False),
        format_tag(state(formats=(PLANES,) * 2), False),
    ]
    assert len({tag, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("hf3fs", "stores keys and values of a page separately"),
        ("aibrix", "shapes of plain keys and values"),
        ("sim", "has not been tried"),
        *((name, None) for name in ("file", "mooncake", "nixl", "dynamic")),
    ],
)
def test_storage_that_is_attached_later_is_checked_too(controller, backend, text, monkeypatch):
    """The function that names pages is compiled then too, not later while a request waits."""
    from sglang.srt.mem_cache import utils

    from sglang_kvq.sglang.hicache.storage import before_attach

    named = []
    monkeypatch.setattr(utils, "get_hash_str", named.append)
    if text is None:
        before_attach(controller, backend)
        assert len(named) == 1
        return
    with pytest.raises(ValueError, match=f"--hicache-storage-backend {backend}: .*{text}"):
        before_attach(controller, backend)


def test_windows_are_not_stored(controller):
    from sglang_kvq.sglang.hicache.storage import before_attach

    controller.mem_pool_host.entries = [SimpleNamespace(name="kv"), SimpleNamespace(name="swa")]
    with pytest.raises(ValueError, match="--hicache-storage-backend file: .*sliding windows without a checksum"):
        before_attach(controller, "file")


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
