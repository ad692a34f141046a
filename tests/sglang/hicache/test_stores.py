"""Quantized pages in SGLang's Mooncake and NIXL back ends, with clients that damage and lose pages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_kvq.errors import KVQuantError
from tests.cache.test_sink_token_cache import prompt
from tests.cache.test_tiers import prefill
from tests.sglang.hicache import fake_stores
from tests.sglang.hicache.test_hicache import Controller, indices, pages_in_tree
from tests.sglang.hicache.test_storage import KEYS

TAG = "some/model-kvq1-test-0123"


class Store:
    """A back end of SGLang's on a controller's host pool, and what it has stored.

    Args:
        kind: ``mooncake``, ``nixl objects`` or ``nixl files``.
        rank, workers: the rank in the tensor-parallel group, and the group's size.
    """

    def __init__(self, kind: str, controller: Controller, objects: dict[str, bytes], rank: int = 0, workers: int = 1):
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        from sglang_kvq.sglang.hicache.stores import after_create

        self.kind, self.controller, self.objects = kind, controller, objects
        name = kind.split()[0]
        extra = {"master_server_address": "here:1", "protocol": "tcp"} if name == "mooncake" else {}
        if name == "nixl":
            plugin = "posix" if kind == "nixl files" else "obj"
            extra = {"use_direct_io": False, "plugin": {plugin: {"active": True, "bucket": "pages"}}}
            extra["l3_cleaner_enabled"] = False
        config = HiCacheStorageConfig(
            **dict(tp_rank=rank, tp_size=workers, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1),
            **dict(is_mla_model=False, enable_storage_metrics=True, is_page_first_layout=True, model_name=TAG),
            extra_config=extra,
        )
        self.backend = StorageBackendFactory.create_backend(name, config, controller.host)
        after_create(self.backend, StorageBackendFactory, name, config, controller.host)
        self.backend.register_mem_pool_host(controller.host)
        controller.storage_backend = self.backend

    def write(self, keys: list[str], rows: list[int]) -> bool:
        """Stores pages as SGLang's thread does, after our hook."""
        from sglang.srt.managers.cache_controller import HiCacheController

        from sglang_kvq.sglang.hicache.storage import before_page_set

        before_page_set(self.controller, keys, indices(rows))
        return HiCacheController._page_set_zero_copy(self.controller, keys, indices(rows))

    def read(self, keys: list[str], rows: list[int]) -> int:
        """Reads stored pages into host rows and returns how many came."""
        from sglang.srt.managers.cache_controller import HiCacheController

        from sglang_kvq.sglang.hicache.storage import around_page_get

        original, operation = HiCacheController._page_get_zero_copy, SimpleNamespace(request_id="one")
        return around_page_get(original, self.controller, operation, keys, indices(rows))

    def has(self, keys: list[str]) -> int:
        return self.backend.batch_exists(keys)

    def names(self) -> list[str]:
        if self.kind == "nixl files":
            return [file.name for base in self.backend.file_manager.base_dirs for file in self._files(base)]
        return [name for name in self.objects if TAG.replace("/", "-") in name]

    def _files(self, base: str) -> list[Path]:
        return [file for file in Path(base).rglob("*") if file.is_file()]

    def change(self, key: str, new) -> None:
        """Replaces a stored page's bytes by ``new`` of them; removes the page if that is None."""
        (name,) = (name for name in self.names() if f"{key}_" in name)
        if self.kind == "nixl files":
            file = Path(self.backend.file_manager.get_file_path(name))
            data = new(file.read_bytes())
            file.unlink()
            if data is not None:
                file.write_bytes(data)
            return
        data = new(self.objects.pop(name))
        if data is not None:
            self.objects[name] = data


@pytest.fixture
def create(controller, monkeypatch, tmp_path):
    """``create("mooncake")`` returns a store."""
    from sglang.srt.environ import envs

    objects = fake_stores.install(monkeypatch)
    nixl = "sglang.srt.mem_cache.storage.nixl.hicache_nixl"
    with envs.SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        yield lambda kind, *rank: Store(kind, controller, objects, *rank)
    sys.modules.pop(nixl, None)  # SGLang's module has the stand-in


@pytest.fixture(params=["mooncake", "nixl objects", "nixl files"])
def store(request, create, m, controller) -> Store:
    """Returns a store that has the pages ``KEYS``, from rows 1 to 4."""
    made = create(request.param)
    m.leave(prefill(m, prompt(1)), publish=True)
    controller.write((pages_in_tree(m, prompt(1))[:4], [1, 2, 3, 4]))
    assert made.write(KEYS, [1, 2, 3, 4]) and made.has([*KEYS, "e"]) == 4
    return made


def flipped(page: bytes) -> bytes:
    return page[:100] + bytes([page[100] ^ 1]) + page[101:]


def test_pages_come_back_and_each_is_one_object(store, controller):
    assert store.read(KEYS, [6, 7, 8, 9]) == 4
    assert torch.equal(controller.host.kv_buffer[6:10], controller.host.kv_buffer[1:5])
    assert controller.host.damaged_pages == 0
    assert len(store.names()) == 4 and all("-kvq1-test-0123" in name for name in store.names())


def test_a_damaged_page_is_a_miss_until_it_is_written_again(store, controller, caplog):
    store.change("c", flipped)
    assert store.read(KEYS, [6, 7, 8, 9]) == 2
    assert controller.host.damaged_pages == 1 and "page c of the storage is damaged" in caplog.text
    if store.kind != "nixl objects":  # NIXL cannot remove an object, but overwrites it
        assert store.has(KEYS) == 2
    assert store.write(["c", "d"], [3, 4]) and store.has(KEYS) == 4
    assert store.read(KEYS, [6, 7, 8, 9]) == 4 and controller.host.damaged_pages == 1


def test_the_page_of_another_name_is_damaged(store, controller):
    found: list[bytes] = []
    store.change("d", lambda page: found.append(page) or page)
    store.change("b", lambda page: found[0])
    assert store.read(KEYS, [6, 7, 8, 9]) == 1 and controller.host.damaged_pages == 1


@pytest.mark.parametrize("new", [lambda page: None, lambda page: page[:100]], ids=["lost", "too short"])
def test_a_lost_or_short_page_is_a_miss(store, controller, new):
    """NIXL then reads nothing of the batch; rows may keep parts of other pages, which nobody uses."""
    store.change("c", new)
    assert store.read(KEYS, [6, 7, 8, 9]) == (2 if store.kind == "mooncake" else 0)
    assert store.write(KEYS, [1, 2, 3, 4])
    assert store.read(KEYS, [6, 7, 8, 9]) == 4
    assert torch.equal(controller.host.kv_buffer[6:10], controller.host.kv_buffer[1:5])


@pytest.mark.parametrize("kind", ["mooncake", "nixl objects", "nixl files"])
def test_workers_have_pages_of_their_own(create, kind):
    """Rank 1 of 2 has other heads than rank 1 of 4, even if each has one head."""
    for rank, workers in ((0, 1), (0, 2), (1, 2), (1, 4)):
        store = create(kind, rank, workers)
        assert store.has(["a"]) == 0, "another worker's page"
        assert store.write(["a"], [1]) and store.has(["a"]) == 1


def test_a_back_end_within_another(create, monkeypatch):
    """SGLang can wrap any back end in one that delays calls; pages still get the names of their worker."""
    from sglang.srt.environ import envs

    if not hasattr(envs, "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"):
        pytest.skip("this SGLang wraps no back end")
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.001):
        store = create("mooncake", 1, 2)
    assert store.write(["a"], [1]) and store.has(["a"]) == 1
    assert [name.endswith("a_2_1_k") for name in store.names()] == [True]


def test_names_of_an_unknown_release_are_refused(controller):
    """A back end without these attributes may store keys and values separately."""
    from sglang_kvq.sglang.hicache.stores import after_create

    config = SimpleNamespace(tp_size=1)
    for name, backend in (
        ("nixl", SimpleNamespace()),
        ("mooncake", SimpleNamespace(is_mla_backend=False, mha_suffix="0")),
    ):
        with pytest.raises(
            KVQuantError, match=f"--hicache-storage-backend {name}: .* names stored pages in an unknown"
        ):
            after_create(backend, None, name, config, controller.host)
    other = SimpleNamespace()
    after_create(other, None, "nixl", config, "another pool")
    assert not vars(other)


def test_mooncake_says_what_it_did_not_remove(create, controller, caplog):
    store = create("mooncake")
    caplog.clear()  # SGLang's own lines, which appear if an earlier test raised its log level
    controller.host.remove_stored("nothing")
    assert not caplog.text, "it is gone already"
    store.backend.store.remove = lambda name, force: -600
    controller.host.remove_stored("c")
    assert "Mooncake did not remove the damaged page" in caplog.text and "error -600" in caplog.text


def test_a_class_of_the_user_gets_pages_by_address(controller):
    """A user's class with ``interface_v1`` gets pages like Mooncake: one address per page."""
    from sglang_kvq.sglang.hicache.stores import after_create

    controller.host.remove_stored = print
    after_create(object(), None, "dynamic", SimpleNamespace(tp_size=1), controller.host)
    assert controller.host.remove_stored is None, "of the storage before"
    pointers, sizes = controller.host.get_page_buffer_meta(indices([2]))
    assert pointers == [controller.host.kv_buffer[2].data_ptr()] and sizes == [controller.host.page.page_bytes]
