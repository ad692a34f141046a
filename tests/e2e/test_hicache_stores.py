"""Quantized pages come back from a Mooncake store and from NIXL's files; a damaged page is computed again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_kvq.constants import PAGE_SIZE as P
from sglang_kvq.server_process import free_port
from tests.e2e.client import Client
from tests.e2e.conftest import lacks
from tests.e2e.test_hicache import FLAGS, PAGES, ask, at, come_back, page_names, wait_for

#: Flags without those of the storage back end.
OTHERS = [flag for flag in FLAGS if flag not in ("--hicache-storage-backend", "file")]
#: Milliseconds for which Mooncake keeps an object after a read, and refuses to remove it.
LEASE = 60_000
MODEL = "kvq2-int2-"


@pytest.fixture(scope="module")
def small_host(plugins) -> dict[str, str]:
    return plugins("small_host")


@pytest.fixture
def start(servers, small_host) -> Callable[..., Client]:
    """``start(backend, config, **variables)`` returns a client of a server with an empty cache."""

    def go(backend: str, config: dict, **variables: str) -> Client:
        flags = ("--hicache-storage-backend", backend, "--hicache-storage-backend-extra-config", json.dumps(config))
        env = {**small_host, **variables}
        server = servers("--kv-quant", "int2", *OTHERS, *flags, env=env, model=servers.shallow, fresh=True)
        client = Client(server)
        client.log = server.log_path
        return client

    return go


# -- NIXL --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(lacks("nixl._api", "nixl")), reason=str(lacks("nixl._api", "nixl")))
@pytest.mark.parametrize("direct", [False, True], ids=["zero copy", "direct I/O"])
def test_nixl(start, tmp_path, direct):
    variables = {
        "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(tmp_path),
        "SGLANG_HICACHE_NIXL_BACKEND_PLUGIN": "POSIX",
    }
    client = start("nixl", {"use_direct_io": direct}, **variables)
    come_back(client)
    size = client.state()["host_page_bytes"]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) >= PAGES and all(f"{MODEL}" in file.name and "_0_1" in file.name for file in files)
    assert {file.stat().st_size for file in files} == {size}, "one file a page"

    def of(name: str) -> Path:
        (file,) = tmp_path.rglob(f"{name}*")
        return file

    file = of(page_names(0)[3])
    good = file.read_bytes()
    file.write_bytes(good[:1000] + bytes([good[1000] ^ 4]) + good[1001:])
    client.flush()
    assert ask(client, 0)[0] == at("storage", 3 * P)
    assert client.state()["damaged_pages"] == 1
    wait_for(lambda: file.exists() and file.stat().st_size == size, "the page is not written again")
    # NIXL reads all pages of a batch or none; missing pages are written with the rest of the prompt.
    for harm in (lambda file: file.write_bytes(good[: size // 2]), Path.unlink):
        harm(of(page_names(0)[1]))
        client.flush()
        assert ask(client, 0)[0] == at("storage", 0)
        client.flush()
        assert ask(client, 0)[0] == at("storage")
    assert client.state()["damaged_pages"] == 1 and client.state()["errors"] == 0


# -- Mooncake ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def master(tmp_path) -> Iterator[str]:
    """Yields the address of a Mooncake master."""
    port, metrics = free_port(), free_port()
    command = [
        sys.executable,
        "-c",
        "import sys; from mooncake.cli import main; sys.argv[0] = 'mooncake_master'; main()",
    ]
    log = (tmp_path / "master.log").open("w")
    flags = [f"-rpc_port={port}", f"-metrics_port={metrics}", f"-default_kv_lease_ttl={LEASE}"]
    process = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


@pytest.mark.skipif(
    bool(lacks("mooncake.store", "mooncake-transfer-engine-non-cuda")),
    reason=str(lacks("mooncake.store", "mooncake-transfer-engine-non-cuda")),
)
def test_mooncake(start, master):
    from mooncake.store import MooncakeDistributedStore

    config = {"master_server_address": master, "protocol": "tcp", "local_hostname": "127.0.0.1"}
    client = start("mooncake", {**config, "metadata_server": "P2PHANDSHAKE", "global_segment_size": 256 << 20})
    come_back(client)
    (prefix,) = set(re.findall(r"Using Mooncake config prefix: (\S+)", client.log.read_text()))
    assert MODEL in prefix

    store, name = MooncakeDistributedStore(), f"{prefix}_{page_names(0)[3]}_1_0_k"
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master, None) == 0
    good = store.get(name)
    assert len(good) == client.state()["host_page_bytes"], "one object a page"
    assert store.remove(name) != 0, "the setting: somebody has read it"
    assert store.remove(name, True) == 0
    assert store.put(name, good[:1000] + bytes([good[1000] ^ 4]) + good[1001:]) == 0
    client.flush()
    assert ask(client, 0)[0] == at("storage", 3 * P)
    assert client.state()["damaged_pages"] == 1

    wait_for(lambda: store.is_exist(name) == 1, "the page is not written again")
    client.flush()
    assert ask(client, 0)[0] == at("storage")
    assert store.remove(f"{prefix}_{page_names(0)[4]}_1_0_k", True) == 0
    client.flush()
    assert ask(client, 0)[0] == at("storage", 4 * P)
    assert client.state()["damaged_pages"] == 1 and client.state()["errors"] == 0
