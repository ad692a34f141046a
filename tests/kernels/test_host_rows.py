"""The kernel copies pages to host memory and back exactly as torch does."""

from __future__ import annotations

import pytest
import torch

from sglang_kvq.cache import host_pages
from sglang_kvq.cache.host_pages import HostLayout
from sglang_kvq.errors import KVQuantError
from sglang_kvq.formats.record import RecordFormat
from sglang_kvq.kernels.tiers import host_rows
from tests.cache.test_host_pages import BACK, FORMATS, HOST_PAGES, POISON, SOURCE, THERE, pool_of
from tests.kernels.scene import DEVICE, ON_GPU, int64
from tests.pairs import each


class Scene:
    """A pool of random records, and a poisoned host buffer with a tail behind each row."""

    def __init__(self, formats: tuple[RecordFormat, ...], kv_heads: int, tail: int = 32, shared: bool = False) -> None:
        self.pool = pool_of(formats, kv_heads, DEVICE, shared)
        self.layout = HostLayout(self.pool)
        self.table = host_rows.row_table(self.pool.records, self.layout.offsets)
        self.host = self.buffer(tail)
        self.source, self.there, self.back = int64(*SOURCE), int64(*THERE), int64(*BACK)
        self.rows = self.there.cpu()

    def buffer(self, tail: int = 32) -> torch.Tensor:
        shape = (HOST_PAGES, self.layout.page_bytes + tail)
        return torch.full(shape, POISON, dtype=torch.uint8, pin_memory=ON_GPU)

    def in_torch(self) -> Scene:
        """Returns this scene, switched to the copies in torch."""
        self.layout._kernel = None
        return self


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


#: Numbers of programs and of words that each moves at a time: uneven shares of rows and their parts, or as served.
LAUNCHES = {"few": (3, 512), "one": (1, 2048), "as-served": (host_rows._PROGRAMS, host_rows._WORDS)}
#: Records of a layer are contiguous, or they share a memory with BF16 pages and have gaps between pages.
MEMORY = {"divided": False, "shared": True}


def use_launch(monkeypatch: pytest.MonkeyPatch, launch: tuple[int, int]) -> None:
    monkeypatch.setattr(host_rows, "_PROGRAMS", launch[0])
    monkeypatch.setattr(host_rows, "_WORDS", launch[1])


@each(launch=LAUNCHES, formats=FORMATS, kv_heads=[3, 1, 8], tail=[32, 0, 16], rows=[1 << 20, 1, 2], shared=MEMORY)
def test_backup(launch, formats, kv_heads, tail, rows, shared, monkeypatch):
    """The copy passes through a buffer for one page, for two, or for all."""
    use_launch(monkeypatch, launch)
    scene = Scene(formats, kv_heads, tail, shared)
    monkeypatch.setattr(host_pages, "STAGED", min(rows, len(SOURCE)) * scene.layout.page_bytes)
    want, before = scene.buffer(tail), [records.clone() for records in scene.pool.records]
    kernel = host_pages._Kernel(scene.pool, scene.layout.offsets, scene.layout.page_bytes)
    scene.in_torch().layout.backup(scene.pool, scene.source, want, scene.rows)
    kernel.backup(scene.source, scene.host, scene.rows.tolist())
    wait()
    assert torch.equal(scene.host, want)
    assert all(torch.equal(records, old) for records, old in zip(scene.pool.records, before))


@each(launch=LAUNCHES, formats=FORMATS, kv_heads=[8, 1, 3], shared=MEMORY)
def test_load(launch, formats, kv_heads, shared, monkeypatch):
    use_launch(monkeypatch, launch)
    scene = Scene(formats, kv_heads, shared=shared)
    scene.host.random_(POISON)
    kept, stores = scene.host.clone(), scene.pool.stores
    for store in stores:
        store.records.fill_(POISON)
    for layer in reversed(range(scene.pool.layers)):
        before = [store.records.clone() for store in stores]
        host_rows.load_rows(scene.table, layer, scene.back, scene.host, scene.there)
        wait()
        got = [store.records.clone() for store in stores]
        for store, old in zip(stores, before):
            store.records.copy_(old)
        scene.in_torch().layout.load_layer(scene.pool, layer, scene.host, scene.there, scene.back)
        assert all(torch.equal(x, store.records) for x, store in zip(got, stores)), f"layer {layer}"
    assert torch.equal(scene.host, kept)


def test_a_layout_of_a_gpu_uses_the_kernel(monkeypatch):
    """The kernel copies to host memory that the GPU reaches; torch copies to other memory."""
    monkeypatch.setattr(host_pages, "_is_mapped", lambda host, device: host.shape[1] % 32 == 0)
    monkeypatch.setattr(host_pages, "_has_kernel", lambda device: True)
    launched: list[str] = []
    for name in ("gather_rows", "load_rows"):
        run = getattr(host_rows, name)
        monkeypatch.setattr(host_rows, name, lambda *x, run=run, name=name: (launched.append(name), run(*x)))
    scene = Scene(FORMATS["mixed"], 2)
    assert launched == ["gather_rows", "load_rows"], "both are compiled before the first request"
    launched.clear()
    for host in (scene.host, scene.buffer(48)):
        scene.layout.backup(scene.pool, scene.source.cpu(), host, scene.rows)
        wait()
        for layer in range(scene.pool.layers):
            scene.layout.load_layer(scene.pool, layer, host, scene.there.cpu(), scene.back)
            assert torch.equal(scene.pool.records[layer][scene.back], scene.pool.records[layer][scene.source])
    assert launched == ["gather_rows"] + ["load_rows"] * scene.pool.layers
    other = pool_of(FORMATS["mixed"], 2, DEVICE)
    scene.layout.load_layer(other, 1, scene.host, scene.there, scene.back)
    wait()
    assert launched[-1] == "load_rows" and len(launched) == scene.pool.layers + 4
    assert torch.equal(other.records[1][scene.back], scene.pool.records[1][scene.back]), "another pool's own records"


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no other memory")
def test_rows_on_the_device_are_refused():
    scene = Scene(FORMATS["two-bits"], 1)
    with pytest.raises(KVQuantError, match="host_pages: on cuda.*; must be on the host"):
        scene.layout.backup(scene.pool, scene.source, scene.host, scene.there)


def test_rows_that_are_not_aligned_are_refused():
    scene = Scene(FORMATS["two-bits"], 1)
    for host in (scene.buffer(8), scene.buffer(48)[:, 8:]):
        with pytest.raises(KVQuantError, match="host: rows of .* Align both to 16"):
            host_rows.gather_rows(scene.table, scene.source, host, scene.there)
    records = [torch.zeros(3, 1, 24, dtype=torch.uint8, device=DEVICE)]
    with pytest.raises(KVQuantError, match="layer 0: records of 24 bytes per page, every 24 bytes from .* at offset 0"):
        host_rows.row_table(records, [0])
