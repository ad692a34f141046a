"""Pages in storage: names, checksums, damage, several readers; storage is a dictionary, or SGLang's files."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.cache.layout import KVGeometry
from sglang_kvq.config import KVQuantConfig
from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.formats.page import PageFormat
from tests.cache.scheduler_model import PLANES
from tests.cache.test_sink_token_cache import prompt
from tests.cache.test_tiers import prefill
from tests.sglang.hicache.test_hicache import Controller, indices, pages_in_tree


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
