"""Stand-ins for the clients of Mooncake and NIXL, on bytes that a test can damage.

Like the clients, they copy by address and only within registered memory. SGLang's own classes call them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

NO_OBJECT, LEASED = -704, -706


class Registered:
    """Ranges of memory that a client may copy from and to."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def read(self, address: int, size: int) -> bytes:
        self._check(address, size)
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        self._check(address, len(data))
        ctypes.memmove(address, data, len(data))

    def _check(self, address: int, size: int) -> None:
        assert any(begin <= address and address + size <= begin + length for begin, length in self.ranges)


class MooncakeClient:
    """Stand-in for Mooncake's client: clients share all objects, and only a forced removal works, because of leases."""

    objects: dict[str, bytes]

    def __init__(self) -> None:
        self.memory = Registered()

    def setup(self, *args: object, **kwargs: object) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.memory.ranges.append((address, size))
        return 0

    def put(self, key: str, value: bytes) -> int:
        self.objects[key] = value
        return 0

    def get(self, key: str) -> bytes:
        return self.objects[key]

    def is_exist(self, key: str) -> int:
        return int(key in self.objects)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self.is_exist(key) for key in keys]

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return [self.put(key, self.memory.read(*place)) for key, *place in zip(keys, addresses, sizes)]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        results = []
        for key, address, size in zip(keys, addresses, sizes):
            if (found := self.objects.get(key)) is None or len(found) > size:
                results.append(NO_OBJECT)
                continue
            self.memory.write(address, found)
            results.append(len(found))
        return results

    def remove(self, key: str, force: bool = False) -> int:
        if not force:
            return LEASED
        return 0 if self.objects.pop(key, None) is not None else NO_OBJECT


class NixlAgent:
    """Stand-in for NIXL's agent: copies to and from objects, or files by their descriptors."""

    objects: dict[str, bytes]

    def __init__(self, name: str, config: object) -> None:
        self.memory, self.keys = Registered(), dict[int, str]()
        self.agent: object = None

    def get_plugin_list(self) -> list[str]:
        return ["POSIX", "OBJ"]

    def create_backend(self, name: str, params: dict[str, str]) -> None:
        self.files = name == "POSIX"

    def get_backend_params(self, name: str) -> dict[str, str]:
        return {}

    def get_reg_descs(self, items: list[tuple], kind: str) -> tuple[list[tuple], str]:
        return items, kind

    get_xfer_descs = get_reg_descs

    def register_memory(self, descs: tuple[list[tuple], str]) -> tuple[list[tuple], str]:
        items, kind = descs
        if kind == "DRAM":
            self.memory.ranges += [item[:2] for item in items]
        elif kind == "OBJ":
            self.keys.update({item[2]: item[3] for item in items})
        return descs

    def deregister_memory(self, descs: object) -> None:
        pass

    def query_memory(self, items: list[tuple], name: str, mem_type: str) -> list[object]:
        there = os.path.exists if self.files else self.objects.__contains__
        return [True if there(item[3]) else None for item in items]

    def initialize_xfer(self, direction: str, host: tuple, stored: tuple, name: str) -> tuple:
        return direction, host[0], stored[0]

    def transfer(self, request: tuple) -> str:
        """Transfers a batch; the caller learns only whether the whole batch succeeded."""
        direction, host, stored = request
        for (address, size, _), (_, _, place) in zip(host, stored, strict=True):
            if direction == "WRITE":
                data = self.memory.read(address, size)
                if self.files:
                    os.pwrite(place, data, 0)
                else:
                    self.objects[self.keys[place]] = data
                continue
            found = os.pread(place, size, 0) if self.files else self.objects.get(self.keys[place], b"")
            self.memory.write(address, found)
            if len(found) < size:
                return "ERR"
        return "DONE"

    def check_xfer_state(self, request: tuple) -> str:
        return "ERR"

    def release_xfer_handle(self, request: tuple) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Makes SGLang find the stand-ins; returns the objects that both of them store."""
    objects: dict[str, bytes] = {}
    mooncake, nixl = ModuleType("mooncake.store"), ModuleType("nixl._api")
    mooncake.MooncakeDistributedStore = type("Client", (MooncakeClient,), {"objects": objects})
    mooncake.ReplicateConfig = SimpleNamespace
    nixl.nixl_agent = type("Agent", (NixlAgent,), {"objects": objects})
    config = SimpleNamespace(enable_pthread=True, enable_listen=False, port=0, capture_telemetry=False)
    nixl.nixl_agent_config = lambda backends: config
    inner = SimpleNamespace(getAvailPlugins=lambda: [])
    nixl.nixlBind = SimpleNamespace(
        NIXL_THREAD_SYNC_STRICT=0, nixlAgentConfig=SimpleNamespace, nixlAgent=lambda name, config: inner
    )
    for module in (mooncake, nixl):
        package = module.__name__.partition(".")[0]
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # SGLang's module keeps the client that it was imported with.
    monkeypatch.delitem(sys.modules, "sglang.srt.mem_cache.storage.nixl.hicache_nixl", raising=False)
    return objects
