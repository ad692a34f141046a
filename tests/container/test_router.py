"""SGLang's router before two servers: it keeps a session on one of them if requests bring its header too."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from launch.server import Server
from sglang_kvq.server_process import ServerProcess, free_port
from tests.e2e import word_embeddings

pytestmark = pytest.mark.timeout(900)
FLAGS = (
    *("--kv-quant", "int4", "--kv-quant-recent", "128", "--enable-metrics"),
    *("--episodic-policy", "late", "--episodic-budget", "640", "--episodic-block", "192"),
)
SESSIONS = [f"conversation-{n}" for n in range(6)]
TURNS = 3


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("replicas")
    path, embedder = word_embeddings.install(folder)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
    servers = [
        Server(model, *FLAGS, "--episodic-embedder", embedder, env=env, log_path=folder / f"{name}.log")
        for name in ("first", "second")
    ]
    try:
        with ThreadPoolExecutor() as pool:  # until the end: a server ends with the thread that started it
            list(pool.map(lambda server: server.start(600), servers))
            yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def router(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--policy", "manual", "--assignment-mode", "min_group", "--prometheus-port", str(free_port())),
        *("--worker-urls", *(server.url for server in servers)),
    ]
    with ServerProcess(command, tmp_path_factory.mktemp("router") / "router.log", port) as router:
        # It is healthy before it knows its servers.
        while sum(one["is_healthy"] for one in requests.get(f"{router.url}/workers", timeout=60).json()["workers"]) < 2:
            router.check_alive()
            time.sleep(0.5)
        yield router


def turn(router: ServerProcess, name: str, n: int, *headers: str) -> None:
    """Sends a turn of a conversation: the whole of it so far."""
    text = f"{name} begins. " + "Then another thing happened. " * (n + 1)
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    answer = requests.post(
        f"{router.url}/generate",
        json={"text": text, "sampling_params": sampling},
        headers=dict.fromkeys(headers, name),
        timeout=300,
    )
    assert answer.status_code == 200, answer.text


def known(server: Server, prefix: str) -> set[str]:
    """Returns the names of the sessions that a server remembers."""
    return {one["id"] for one in server.json("/v1/sessions")["data"] if one["id"].startswith(prefix)}


def counted(server: Server) -> float:
    """Returns the requests of sessions that a server counts in its metrics."""
    lines = server.request("/metrics").decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("sglang_kvq") and "session_requests" in line
    )


def test_sessions_stay_on_one_server(router: ServerProcess, servers: list[Server]) -> None:
    for n in range(TURNS):
        for name in SESSIONS:
            turn(router, name, n, "X-Session-Id", "X-SMG-Routing-Key")
    first, second = (known(server, "conversation") for server in servers)
    assert first | second == set(SESSIONS) and not first & second
    assert len(first) == len(second) == len(SESSIONS) / 2, "the assignment is even"


def test_without_the_routers_header_both_servers_compute_a_session(
    router: ServerProcess, servers: list[Server]
) -> None:
    before = [counted(server) for server in servers]
    for n in range(8):
        turn(router, "stray", n, "X-Session-Id")
    assert [known(server, "stray") for server in servers] == [{"stray"}, {"stray"}]
    assert all(counted(server) > old for server, old in zip(servers, before)), "the metrics show it"
