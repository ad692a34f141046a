"""SGLang's router in front of two servers: one header keeps a session on one of them and names it there."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import requests
import yaml

from launch.server import Server
from sglang_kvq.server_process import ServerProcess, free_port
from tests.container.workshop import said
from tests.e2e import word_embeddings
from tests.e2e.preloaded import Preloaded, other_models

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]
KEY = "X-SMG-Routing-Key"
FLAGS = (
    *("--kv-quant", "int4", "--kv-quant-recent", "128", "--enable-metrics", "--episodic-session-header", KEY),
    *("--episodic-policy", "retrieve", "--episodic-budget", "1024", "--episodic-block", "192"),
)
#: The manifest's flags that say how the router treats servers and requests, but not where it finds servers.
CHOICE = re.compile("--(policy|assignment-mode|max-|health-|disable-circuit-breaker)")
FORGETFUL = ("--policy=round_robin",)
#: Seconds for which a server does not answer. The router's own limit for a health check is five.
LATE = 6
#: Refused requests in a row. Ten would open the router's circuit breaker if it were on.
REFUSED = 11
#: Bytes of a body larger than the router forwards.
LARGE = 17 << 20
SESSIONS = [f"conversation-{n}" for n in range(4)]
TURNS = 5
#: A text of about 140 tokens.
SAID = "The keeper of the lighthouse wrote down what had happened on that day. " * 10


@pytest.fixture(scope="module")
def servers(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("replicas")
    path, embedder = word_embeddings.install(folder)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
    env["SGLANG_DISABLED_MODEL_ARCHS"] = other_models()
    servers = [
        Server(shallow_model, *FLAGS, "--episodic-embedder", embedder, env=env, log_path=folder / f"{name}.log")
        for name in ("first", "second")
    ]
    preloaded = Preloaded(servers[0])
    try:
        for server in servers:
            server.spawn = partial(preloaded.fork, server)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.start(600), servers))
        yield servers
    finally:
        for server in servers:
            server.stop(grace=0)
        preloaded.stop()


def choice() -> list[str]:
    """Returns the router's flags in launch/kubernetes that keep a session on one server and large bodies away."""
    objects = yaml.safe_load_all((ROOT / "launch" / "kubernetes" / "replicas" / "router.yaml").read_text())
    (pod,) = (one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment")
    return [flag for flag in pod["containers"][0]["args"] if CHOICE.match(flag)]


@contextmanager
def routed(servers: list[Server], log: Path, *more: str) -> Iterator[ServerProcess]:
    """Yields a router in front of the servers once it knows them; it reports itself healthy before that.

    It has the manifest's flags, except for more frequent health checks, so that it soon misses a dead server.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), *choice()),
        *("--health-check-interval-secs=1", "--prometheus-port", str(free_port()), "--log-level=warn", *more),
        *("--worker-urls", *(server.url for server in servers)),
    ]
    router = ServerProcess(command, log, port).start()
    try:
        while sum(one["is_healthy"] for one in requests.get(f"{router.url}/workers", timeout=60).json()["workers"]) < 2:
            router.check_alive()
            time.sleep(0.2)
        yield router
    finally:
        router.stop(grace=0)  # otherwise it waits for connections that are kept open


@pytest.fixture(scope="module")
def router(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with routed(servers, tmp_path_factory.mktemp("router") / "router.log") as router:
        yield router


def turn(router: ServerProcess, name: str, n: int) -> requests.Response:
    """Sends a turn of a conversation, with the whole conversation before it."""
    text = f"{name} begins. " + "".join(f"Day {day}. {SAID}" for day in range(n + 1))
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    body = {"text": text, "sampling_params": sampling}
    return requests.post(f"{router.url}/generate", json=body, headers={KEY: name}, timeout=300)


def served(router: ServerProcess, name: str, n: int) -> int:
    """Sends a turn and asserts that it is answered; returns the number of its prompt's tokens."""
    answer = turn(router, name, n)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["meta_info"]["prompt_tokens"])


def known(server: Server, prefix: str) -> set[str]:
    """Returns the names of the sessions that a server remembers."""
    return {one["id"] for one in server.json("/v1/sessions")["data"] if one["id"].startswith(prefix)}


def homes(servers: list[Server]) -> list[set[str]]:
    """Returns the conversations that each server remembers."""
    return [known(server, "conversation") for server in servers]


def computed(server: Server) -> float:
    """Returns how many prompt tokens of sessions a server has computed, by its metrics."""
    lines = server.request("/metrics").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang_kvq_session_computed_tokens_total"))


def settled(servers: list[Server]) -> list[float]:
    """Returns each server's ``computed`` once no background work remains."""
    while True:
        before = [computed(server) for server in servers]
        time.sleep(0.5)
        if [computed(server) for server in servers] == before:
            return before


def test_sessions_stay_on_one_server(router: ServerProcess, servers: list[Server]) -> None:
    before = settled(servers)
    with ThreadPoolExecutor() as pool:  # the router counts the sessions being answered
        list(pool.map(lambda name: served(router, name, 0), SESSIONS))
    lengths = [[served(router, name, n) for name in SESSIONS] for n in range(1, TURNS)]
    first, second = homes(servers)
    assert first | second == set(SESSIONS) and not first & second, router.log_tail()
    assert len(first) == len(second), "the router divides the sessions evenly"
    new = sum(settled(servers)) - sum(before)
    assert sum(lengths[-1]) <= new <= 1.5 * sum(lengths[-1]), "each token once, and again what fills no page yet"


def test_a_server_that_answers_late_keeps_its_sessions(router: ServerProcess, servers: list[Server]) -> None:
    """A busy server may miss one health check; that must not move its sessions."""
    before = homes(servers)
    late, owned = next((server, names) for server, names in zip(servers, before) if SESSIONS[0] in names)
    assert late.process is not None
    os.killpg(late.process.pid, signal.SIGSTOP)
    try:
        time.sleep(LATE)
    finally:
        os.killpg(late.process.pid, signal.SIGCONT)
    for name in sorted(owned):
        served(router, name, TURNS - 1)
    assert homes(servers) == before, router.log_tail()


def test_refused_requests_move_no_session(router: ServerProcess, servers: list[Server]) -> None:
    """One client's mistakes must not move the sessions of others."""
    before = homes(servers)
    for _ in range(REFUSED):
        body = {"text": "Hello " * 10_000, "sampling_params": {"max_new_tokens": 1}}
        answer = requests.post(f"{router.url}/generate", json=body, headers={KEY: "refused"}, timeout=300)
        assert answer.status_code == 400, answer.text
    for name in SESSIONS:
        served(router, name, TURNS - 1)
    assert homes(servers) == before, router.log_tail()


def test_a_large_body_ends_at_the_router(router: ServerProcess) -> None:
    """A server would take minutes for 64 MB, and answer nothing else in the meantime."""
    body = {"text": "a" * LARGE, "sampling_params": {"max_new_tokens": 1}}
    answer = requests.post(f"{router.url}/generate", json=body, headers={KEY: "large"}, timeout=300)
    assert answer.status_code == 413
    said(answer.text, "length limit exceeded")


def test_what_the_router_does_not_pass_on_names_no_session(router: ServerProcess, servers: list[Server]) -> None:
    """The router drops X-Session-Id and session_id, as the guide says; otherwise clients could keep these names."""
    sampling = {"temperature": 0, "max_new_tokens": 2}
    chat = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    for path, body in (("generate", {"text": "Hello", "sampling_params": sampling}), ("v1/chat/completions", chat)):
        for headers, field in (({"X-Session-Id": "lost"}, {}), ({}, {"session_id": "lost"})):
            answer = requests.post(f"{router.url}/{path}", json={**body, **field}, headers=headers, timeout=300)
            assert answer.status_code == 200, answer.text
    assert not any(known(server, "lost") for server in servers)
    assert requests.get(f"{router.url}/v1/sessions", timeout=60).status_code == 404, "ask the replicas"


def test_a_router_that_does_not_keep_sessions_has_both_servers_compute_them(
    servers: list[Server], tmp_path: Path
) -> None:
    before = settled(servers)
    with routed(servers, tmp_path / "router.log", *FORGETFUL) as router:
        length = [served(router, "stray", n) for n in range(TURNS)][-1]
    assert all(known(server, "stray") for server in servers)
    new = [now - old for now, old in zip(settled(servers), before)]
    assert sum(new) > 1.7 * length, "the metrics show it"


def test_a_session_of_a_dead_server_moves_and_is_computed_there(router: ServerProcess, servers: list[Server]) -> None:
    (here,), (there,) = (
        [s for s in servers if (SESSIONS[0] in known(s, "conversation")) == owns] for owns in (True, False)
    )
    (before,) = settled([there])
    here.stop()
    deadline = time.monotonic() + 60
    while (answer := turn(router, SESSIONS[0], TURNS)).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.5)
    (after,) = settled([there])
    assert SESSIONS[0] in known(there, "conversation")
    assert after - before >= answer.json()["meta_info"]["prompt_tokens"]
